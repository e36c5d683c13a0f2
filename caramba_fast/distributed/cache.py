"""ContextParallelKVCache: the caches of all layers of a model, their tokens spread over ranks.

A cache is made from a model's ``cache_layout``. `spread_layout` gives the same layout with shapes that make spread
layer caches, so that whatever makes a `ModelKVCache` from it (a `Generator`, a benchmark) makes a spread one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from caramba_fast.cache import (
    AnyLayerShape,
    DecoupledLayerKVCache,
    DecoupledLayerShape,
    LayerCache,
    LayerKVCache,
    LayerShape,
    ModelKVCache,
)
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.distributed.context import Context
from caramba_fast.distributed.group import RankGroup
from caramba_fast.distributed.spread import PAGE_SIZE


@dataclass(frozen=True)
class SpreadLayerShape(LayerShape):
    """A `LayerShape` whose cache is spread over ranks."""

    context: Context | None = field(default=None, compare=False)

    def new_cache(self, **sizes: Any) -> LayerCache:
        """This rank's part of the layer's cache, which behaves like all of it."""
        return _spread(self, LayerKVCache, self.context, sizes)


@dataclass(frozen=True)
class SpreadDecoupledLayerShape(DecoupledLayerShape):
    """A `DecoupledLayerShape` whose cache is spread over ranks."""

    context: Context | None = field(default=None, compare=False)

    def new_cache(self, **sizes: Any) -> LayerCache:
        """This rank's part of the layer's cache, which behaves like all of it."""
        return _spread(self, DecoupledLayerKVCache, self.context, sizes)


def _spread(
    shape: AnyLayerShape, kind: type[LayerCache], context: Context | None, sizes: dict[str, Any]
) -> LayerCache:
    assert context is not None
    configs = {name: sizes.pop(name) for name in list(sizes) if name.endswith("_cfg")}
    layer: Any = context.layer(kind, configs, **_plain(shape), **sizes)
    found: LayerCache = layer  # it offers what models and generators use of one
    return found


def _plain(shape: AnyLayerShape) -> dict[str, Any]:
    """The fields of a shape that layer caches take."""
    return {f.name: getattr(shape, f.name) for f in fields(shape) if f.name != "context"}


def spread_layout(layout: Sequence[AnyLayerShape], context: Context) -> list[AnyLayerShape]:
    """The layout with shapes that make spread caches."""
    return [
        SpreadLayerShape(**_plain(shape), context=context)
        if isinstance(shape, LayerShape)
        else SpreadDecoupledLayerShape(**_plain(shape), context=context)
        for shape in layout
    ]


class ContextParallelKVCache(ModelKVCache):
    """A `ModelKVCache` whose tokens are spread over the ranks of a group.

    Every rank makes one, feeds it the same and gets the same; each holds its own pages. Page ``p`` of every row is
    on rank ``p`` modulo the number of ranks, or on the next that has room (`PageSpread`).

    Args:
        layers: shapes of the model's layers (a model's ``cache_layout``).
        batch_size, max_seq_len: rows, and tokens of a row over all ranks.
        k_cfg, v_cfg: storage of K and V.
        group: the ranks.
        page_size, rank_tokens: as in `Context`.
        options: device, prefill, calibration, … of `ModelKVCache`. ``prefill="exact"``: a prompt on an
            empty cache attends to its exact keys and values on every rank, without a collective; "stored" and all
            later chunks attend to what the ranks hold.

    Raises:
        ValueError: as `ModelKVCache`, or rooms that do not suffice.
    """

    def __init__(
        self,
        layers: Sequence[AnyLayerShape],
        batch_size: int,
        max_seq_len: int,
        k_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        *,
        group: RankGroup,
        page_size: int = PAGE_SIZE,
        rank_tokens: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        context = Context(group, page_size, rank_tokens)
        layout = spread_layout(layers, context)
        super().__init__(layout, batch_size, max_seq_len, k_cfg, v_cfg, **options)
