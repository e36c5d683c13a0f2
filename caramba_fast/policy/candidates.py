"""The candidate caches and their exact sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from caramba_fast.cache import AnyLayerShape, DecoupledLayerShape, ModelKVCache
from caramba_fast.config import KVCacheKind, cache_configs
from caramba_fast.config.spec import FLAGS, NUMBERS, Part, parse_spec, spec_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.config.spec import TensorOptions

#: The cache every candidate is compared with.
BASELINE = "fp16"
#: Default candidates. Some mix kinds, because whether K or V tolerates fewer bits depends on the model.
STANDARD = ("fp16", "q8", "q8/q4", "q4/q8", "q8/nf4", "q4", "nf4")
#: Default candidates of decoupled attention, as K_sem/K_geo/V.
DECOUPLED = ("fp16", "q8", "q4/q8/q8", "q8/q4/q8", "q8/q8/q4", "q4/q8/q4", "q4", "nf4")


def candidates_for(
    layout: Sequence[AnyLayerShape],
    given: Sequence[str] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> list[str]:
    """Specs to choose from, in canonical form, without duplicates.

    Args:
        layout: cache shape of each layer of the model.
        given: candidate specs; by default `STANDARD`, or `DECOUPLED` for decoupled attention.
        fields: settings of all streams, unless a spec sets them itself (`spec_with`).

    Raises:
        ValueError: an unknown spec, or one that does not fit the layers.
    """
    decoupled = isinstance(layout[0], DecoupledLayerShape)
    wanted = given or (DECOUPLED if decoupled else STANDARD)
    found = list(dict.fromkeys(spec_with(spec, **(fields or {})) for spec in wanted))
    for spec in found:
        cache_bytes(layout, spec, 1, 1)  # raises if the spec does not fit
    return found


def spec_with(spec: KVCacheKind | str, **fields: Unpack[TensorOptions]) -> str:
    """The canonical spec of the storage ``cache_configs(spec, **fields)``; ValueError for a field no spec can express.

    ``fields`` (qblock, rotate, residual_len, sink_len, …) are added to each part that does not set them itself; None
    leaves a setting unset.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    unknown = [name for name in known if name not in (*FLAGS, *NUMBERS, "fit")]
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be written into a cache spec")
    parts = parse_spec(spec)
    if not known:
        return spec_name(spec)
    for name in known:  # per-layer settings: a value in one part holds for all parts
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
    """Bytes of the whole cache: all rows, layers and streams, with scales, tail, sinks and unused slots.

    Allocates nothing: the cache is built on the meta device. Raises ValueError for a spec that is unknown or does not
    fit.
    """
    return _measured(layout, spec, batch_size, max_seq_len, fields).nbytes


def bytes_per_token(
    layout: Sequence[AnyLayerShape],
    spec: KVCacheKind | str,
    fields: Mapping[str, Any] | None = None,
) -> float:
    """Bytes of codes and scales per token of one row, over all layers."""
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
