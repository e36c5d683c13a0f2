"""CacheSettings: how a transformers cache is stored, parsed from user arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from caramba_fast.cache.model import PrefillMode
from caramba_fast.config import KVCacheKind, KVCacheTensorConfig, cache_configs
from caramba_fast.config.kvcache import REMOVED, removed
from caramba_fast.config.names import hint
from caramba_fast.config.spec import TensorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: What ``cache=`` takes: a spec ("q4", "q8/q4", …), a kind, or one of either for k and for v.
CacheArgument = str | KVCacheKind | Mapping[str, "str | KVCacheKind | KVCacheTensorConfig"]
STREAMS = ("k", "v")
FIELDS = tuple(name for name in KVCacheTensorConfig.model_fields if name != "kind")


class StorageOptions(TensorOptions, total=False):
    """How a cache is stored and how prompts read it: options of `CarambaCache` and `CarambaStaticCache`."""

    prefill: PrefillMode


@dataclass(frozen=True)
class CacheSettings:
    """How K and V of every layer are stored.

    Attributes:
        k, v: storage of each.
        prefill: "exact": a prompt on an empty cache attends to its unquantized K and V; "stored": to the stored ones.
        name: the requested cache, for messages.
    """

    k: KVCacheTensorConfig
    v: KVCacheTensorConfig
    prefill: PrefillMode = "exact"
    name: str = ""

    @classmethod
    def of(
        cls,
        cache: CacheArgument,
        prefill: PrefillMode = "exact",
        **fields: Unpack[TensorOptions],
    ) -> CacheSettings:
        """Parses user arguments; raises ValueError for an unknown kind, field or mode, listing the known ones.

        ``fields`` are fields of `KVCacheTensorConfig` for K and V that the spec does not set.
        """
        for name in fields.keys() & {*REMOVED, "calibration"}:
            raise ValueError(removed(name))
        unknown = [name for name in fields if name not in FIELDS]
        if unknown:
            raise ValueError(
                f"unknown option {unknown[0]!r}; {hint(unknown[0], (*FIELDS, 'prefill'))}"
            )
        if prefill not in get_args(PrefillMode):
            raise ValueError(f"prefill is {prefill!r}; allowed are 'exact' and 'stored'")
        configs = _configs(cache, {**fields})
        return cls(configs["k"], configs["v"], prefill, str(cache))


def _configs(cache: CacheArgument, fields: dict[str, Any]) -> dict[str, KVCacheTensorConfig]:
    if not isinstance(cache, Mapping):
        if not isinstance(cache, str):
            raise ValueError(f"cache is {cache!r}; a kind, a spec or dict(k=…, v=…) is needed")
        found = cache_configs(cache, **fields)
        if "k_cfg" not in found:
            raise ValueError(
                f"cache={cache!r} is for decoupled attention; here a cache has K and V"
            )
        return {name: found[f"{name}_cfg"] for name in STREAMS}
    if set(cache) != set(STREAMS):
        raise ValueError(f"cache has {', '.join(map(repr, cache))}; exactly k and v are needed")
    if all(isinstance(given, KVCacheTensorConfig) for given in cache.values()):
        if fields:
            raise ValueError(
                f"{', '.join(fields)} and whole KVCacheTensorConfigs were both given; give one"
            )
        return {name: cache[name] for name in STREAMS}  # type: ignore[misc]
    words: list[Any] = [getattr(cache[name], "value", cache[name]) for name in STREAMS]
    if not all(isinstance(word, str) for word in words):
        raise ValueError(
            f"cache is {dict(cache)!r}; kinds for both or KVCacheTensorConfigs for both"
        )
    return _configs("/".join(words), fields)
