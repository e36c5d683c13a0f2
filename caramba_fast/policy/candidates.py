"""Which caches are considered, and how many bytes each takes, counted exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from caramba_fast.cache import AnyLayerShape, DecoupledLayerShape, ModelKVCache
from caramba_fast.config import KVCacheKind, cache_configs
from caramba_fast.config.spec import FLAGS, NUMBERS, Part, parse_spec, spec_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.config.spec import TensorOptions

#: What every candidate is measured against.
BASELINE = "fp16"
#: Kinds with their defaults. Keys and values apart: which of them stands fewer bits depends on the model.
STANDARD = ("fp16", "q8", "q8/q4", "q4/q8", "q8/nf4", "q4", "nf4")
#: K_sem, K_geo and V apart.
DECOUPLED = ("fp16", "q8", "q4/q8/q8", "q8/q4/q8", "q8/q8/q4", "q4/q8/q4", "q4", "nf4")


def candidates_for(
    layout: Sequence[AnyLayerShape],
    given: Sequence[str] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> list[str]:
    """Specs to choose from, in canonical words, each once.

    Args:
        layout: what the model's layers cache.
        given: what was asked for; by default a set that fits the layers.
        fields: settings for all streams where a spec says nothing (`spec_with`).

    Raises:
        ValueError: an unknown spec, or one that does not fit the layers.
    """
    decoupled = isinstance(layout[0], DecoupledLayerShape)
    wanted = given or (DECOUPLED if decoupled else STANDARD)
    found = list(dict.fromkeys(spec_with(spec, **(fields or {})) for spec in wanted))
    for spec in found:
        cache_bytes(layout, spec, 1, 1)  # says what does not fit
    return found


def spec_with(spec: KVCacheKind | str, **fields: Unpack[TensorOptions]) -> str:
    """The spec with settings written into each part that does not say otherwise.

    Args:
        spec: a cache spec.
        fields: qblock, rotate, residual_len, sink_len, … as in `cache_configs`; None leaves one out.

    Returns:
        the canonical words of what ``cache_configs(spec, **fields)`` stores.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    unknown = [name for name in known if name not in (*FLAGS, *NUMBERS, "fit")]
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be written into a cache spec")
    parts = parse_spec(spec)
    if not known:
        return spec_name(spec)
    for name in known:  # settings of a layer: one word in one part says it for all
        if any(name in part.options for part in parts) and name in NUMBERS[1:]:
            known = {key: value for key, value in known.items() if key != name}
    written = [str(Part(part.kind, part.plain, {**known, **part.options})) for part in parts]
    return spec_name("/".join(written))


def cache_bytes(
    layout: Sequence[AnyLayerShape],
    spec: KVCacheKind | str,
    batch_size: int,
    max_seq_len: int,
    fields: Mapping[str, Any] | None = None,
) -> int:
    """Bytes of a whole cache: all rows, layers and streams, with scales, tail, sinks and unused slots.

    Nothing is allocated: the cache is built on the meta device and asked.

    Raises:
        ValueError: an unknown spec, or one that does not fit the layers.
    """
    return _measured(layout, spec, batch_size, max_seq_len, fields).nbytes


def bytes_per_token(
    layout: Sequence[AnyLayerShape],
    spec: KVCacheKind | str,
    fields: Mapping[str, Any] | None = None,
) -> float:
    """Bytes of codes and scales that one more token of one row takes, over all layers."""
    return _measured(layout, spec, 1, 1, fields).bytes_per_token


def _measured(
    layout: Sequence[AnyLayerShape],
    spec: KVCacheKind | str,
    batch_size: int,
    max_seq_len: int,
    fields: Mapping[str, Any] | None,
) -> ModelKVCache:
    configs: dict[str, Any] = cache_configs(spec, **(fields or {}))
    return ModelKVCache(layout, batch_size, max_seq_len, device="meta", **configs)
