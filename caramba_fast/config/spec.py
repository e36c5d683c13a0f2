"""Cache specs: a cache as a short string, such as ``"q4"``, ``"q8/q4"``, ``"q4:rotate,residual_len=32/q8:plain"``.

A spec names a kind for each stream (one for all, K/V, or K_sem/K_geo/V) and, after a colon, options of
`KVCacheTensorConfig`. A kind alone has defaults (`DEFAULTS`) chosen by measurement (docs/quality.md): keys are stored
per channel, values rotated. ``plain`` drops them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import ValidationError

from caramba_fast.config.files import explain
from caramba_fast.config.kvcache import (
    REMOVED,
    KVCacheKind,
    KVCacheTensorConfig,
    removed,
)
from caramba_fast.formats import ALIASES, KIND_NAMES

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Tokens that can be rolled back without loss, in the defaults of kinds with a ring.
TAIL_SLACK = 12
_RING = {"residual_len": 16, "tail_slack": TAIL_SLACK, "sink_len": 4}
_KEYS = {"kind": KVCacheKind.Q4_CHANNEL, "fit": "mse", **_RING}
_VALUES = {"fit": "mse", "rotate": True, **_RING}

#: Settings of each kind, for keys and for values, that differ from KVCacheTensorConfig's defaults (docs/quality.md).
#: "kind" is the kind that keys are stored as instead.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "q8_0": {
        "k": {"kind": KVCacheKind.Q8_CHANNEL, "tail_slack": TAIL_SLACK},
        "v": {"rotate": True, "tail_slack": TAIL_SLACK},
    },
    "q4_0": {"k": _KEYS, "v": _VALUES},
    "nf4": {"k": _KEYS, "v": _VALUES},
}

SHORT = {kind: alias for alias, kind in ALIASES.items()}
#: Settings all streams of a layer share.
SHARED = ("residual_len", "tail_slack", "sink_len")
STREAMS = {1: ("k_cfg", "v_cfg"), 2: ("k_cfg", "v_cfg"), 3: ("k_sem_cfg", "k_geo_cfg", "v_cfg")}
FLAGS = ("rotate",)
NUMBERS = ("qblock", *SHARED)
GRAMMAR = (
    "kind[:option,...] for all streams, K/V or K_sem/K_geo/V; kinds are "
    f"{', '.join(KIND_NAMES)}; options are plain, {', '.join(FLAGS)}, "
    f"fit=amax|mse, {', '.join(f'{name}=N' for name in NUMBERS)}"
)


class TensorOptions(TypedDict, total=False):
    """Fields of `KVCacheTensorConfig` except its kind; None means the kind's default."""

    qblock: int | None
    rotate: bool | None
    fit: Literal["amax", "mse"] | None
    residual_len: int | None
    tail_slack: int | None
    sink_len: int | None


@dataclass(frozen=True)
class Part:
    """One stream of a spec: its kind, whether its defaults are dropped, and the given options."""

    kind: KVCacheKind
    plain: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parses ``kind[:option,...]``; raises ValueError naming what is allowed."""
        kind, colon, rest = text.partition(":")
        names = rest.split(",") if colon else []
        given: dict[str, Any] = {}
        for name in (name for name in names if name != "plain"):
            key, value = _option(name, text)
            if key in given:
                raise ValueError(f"cache spec {text!r} gives {key} twice")
            given[key] = value
        return cls(KVCacheKind(kind), "plain" in names, given)

    def __str__(self) -> str:
        return self.named(self.kind.value)

    def named(self, kind: str) -> str:
        """This part as a string, with another name for the kind."""
        words = ["plain"] if self.plain else []
        for key, value in sorted(self.options.items()):
            words.append(key if value is True else f"{key}={str(value).lower()}")
        return kind + (":" + ",".join(words) if words else "")


def _option(text: str, spec: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if key in REMOVED:
        raise ValueError(f"cache spec {spec!r}: {removed(key)}")
    if key in FLAGS and value in ("", "true", "false"):
        return key, value != "false"
    if key in NUMBERS and equals and value.isdecimal():
        return key, int(value)
    if key == "fit" and equals:
        return key, value
    raise ValueError(f"cache spec {spec!r} has the option {text!r}; {GRAMMAR}")


def parse_spec(spec: KVCacheKind | str) -> list[Part]:
    """The parts of a spec; ValueError, stating the grammar, for an unknown kind or option, or more than three parts."""
    text = spec.value if isinstance(spec, KVCacheKind) else spec
    if not isinstance(text, str) or text.count("/") > 2:
        raise ValueError(f"cache spec is {spec!r}; {GRAMMAR}")
    return [Part.parse(part) for part in text.split("/")]


def spec_name(spec: KVCacheKind | str) -> str:
    """The spec in canonical form: full kind names, sorted options."""
    return "/".join(str(part) for part in parse_spec(spec))


def short_name(spec: KVCacheKind | str) -> str:
    """The spec for display: as `spec_name`, with the usual short names of kinds (q8, q4)."""
    return "/".join(
        part.named(SHORT.get(part.kind.value, part.kind.value)) for part in parse_spec(spec)
    )


def kind_names(spec: KVCacheKind | str) -> tuple[str, ...]:
    """The kinds a spec names, without options: one for all streams, K/V, or K_sem/K_geo/V."""
    return tuple(part.kind.value for part in parse_spec(spec))


def cache_configs(spec: KVCacheKind | str, **fields: Unpack[TensorOptions]) -> dict[str, Any]:
    """Storage of each stream, as keyword arguments of the caches.

    Args:
        spec: "q4", "q8/q4" (K/V), "q4/q8/q4" (K_sem/K_geo/V of decoupled attention), with options.
        fields: fields of `KVCacheTensorConfig` for all streams, unless set by the spec; None means the kind's default.

    Raises:
        ValueError: an invalid spec, a setting out of range, or streams that disagree on settings a layer shares
            (residual_len, tail_slack, sink_len).
    """
    parts = parse_spec(spec)
    streams = STREAMS[len(parts)]
    if len(parts) == 1:
        parts = parts * len(streams)
    given = {name: value for name, value in fields.items() if value is not None}
    chosen: dict[str, dict[str, Any]] = {}
    for stream, part in zip(streams, parts, strict=True):
        role = "v" if stream == "v_cfg" else "k"
        defaults = {} if part.plain else DEFAULTS.get(part.kind.value, {}).get(role, {})
        chosen[stream] = {"kind": part.kind, **defaults, **given, **part.options}
    for name in SHARED:
        _share(name, chosen, [part.options[name] for part in parts if name in part.options])
    try:
        return {stream: KVCacheTensorConfig(**settings) for stream, settings in chosen.items()}
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def _share(name: str, chosen: dict[str, dict[str, Any]], explicit: list[int]) -> None:
    """Sets one value for all streams: the requested one, else the largest of the defaults."""
    if len(set(explicit)) > 1:
        raise ValueError(f"{name} must be the same for all streams of a layer, got {explicit}")
    found = explicit or [settings[name] for settings in chosen.values() if name in settings]
    if found:
        for settings in chosen.values():
            settings[name] = max(found)
