"""ContextParallelKVCache: a model's KV cache with its tokens spread over ranks.

A `ModelKVCache` built from the result of `spread_layout` (by a `Generator` or a benchmark) is spread over ranks.
`Context` holds the settings of the spread and builds the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

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
from caramba_fast.config.kvcache import ring_size
from caramba_fast.distributed.group import RankGroup
from caramba_fast.distributed.layer import (
    ContextParallelDecoupledLayerKVCache,
    ContextParallelLayer,
    ContextParallelLayerKVCache,
)
from caramba_fast.distributed.partial_attention import ZEROS, as_ring, ring_config, without_ring
from caramba_fast.distributed.placement import (
    PAGE_SIZE,
    PageSpread,
    Placement,
    check_page_size,
    check_rank_tokens,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.cache.model import SpreadCacheOptions

#: Class that presents a layer's whole cache, by the class that holds a rank's part of it.
LAYERS: dict[type[LayerCache], type[ContextParallelLayer]] = {
    LayerKVCache: ContextParallelLayerKVCache,
    DecoupledLayerKVCache: ContextParallelDecoupledLayerKVCache,
}


class Context:
    """How rows are spread: over which ranks, in which pages, and how many tokens each rank may hold.

    Args:
        group: the ranks.
        page_size: tokens per page, a multiple of 32.
        rank_tokens: for each rank, the most tokens of a row it holds; by default an even share.

    Raises:
        ValueError: a page size or counts that are not allowed.
    """

    def __init__(
        self, group: RankGroup, page_size: int = PAGE_SIZE, rank_tokens: Sequence[int] | None = None
    ) -> None:
        check_page_size(page_size)
        self.group, self.page_size, self.rank_tokens = group, page_size, rank_tokens
        if rank_tokens is not None:
            check_rank_tokens(rank_tokens, group.size)
        self._placements: dict[tuple[int, torch.device], Placement] = {}

    def placement(self, max_seq_len: int, device: torch.device) -> Placement:
        """The placement for caches of one size, shared by their layers."""
        key = (max_seq_len, device)
        if key not in self._placements:
            size = self.group.size
            spread = PageSpread(max_seq_len, size, self.page_size, self.rank_tokens)
            self._placements[key] = Placement(spread, self.group.rank, device)
        return self._placements[key]

    def layer(
        self,
        kind: type[LayerCache],
        configs: Mapping[str, KVCacheTensorConfig | None],
        *,
        max_seq_len: int,
        device: torch.device | str,
        page_size: int | None,
        num_pages: int | None,
        **sizes: Any,
    ) -> ContextParallelLayer:
        """One layer's cache on this rank, whose part is held by a ``kind`` (`LayerKVCache` or `DecoupledLayerKVCache`).

        ``configs`` has the storage of each stream, by argument name of ``kind``, None for fp16; ``max_seq_len`` is over
        all ranks; ``sizes`` are further arguments of ``kind``. Raises ValueError for another page size than that of the
        spread, a number of pages, or more sinks than a page has tokens.
        """
        made = {name: config or KVCacheTensorConfig() for name, config in configs.items()}
        self._check(page_size, num_pages, max(config.sink_len for config in made.values()))
        placement = self.placement(max_seq_len, torch.device(device))
        make: Any = partial(kind, device=device, **sizes)
        sinks = self.group.rank == placement.spread.first_rank
        own = {name: without_ring(config, sinks=sinks) for name, config in made.items()}
        tokens = placement.spread.tokens_of(self.group.rank) or self.page_size
        local = make(**own, max_seq_len=tokens, page_size=self.page_size)
        ring = None
        if ring_size(made.values()):
            rings = {name: ring_config(config) for name, config in made.items()}
            zeros = max(ZEROS, *(config.group for config in rings.values()))
            ring = as_ring(make(**rings, max_seq_len=max_seq_len, page_size=zeros, num_pages=1))
        return LAYERS[kind](local, ring, placement, self.group, max_seq_len)

    def _check(self, page_size: int | None, num_pages: int | None, sinks: int) -> None:
        if page_size not in (None, self.page_size) or num_pages is not None:
            raise ValueError(
                f"page_size is {page_size} and num_pages is {num_pages}; rows are spread in pages of "
                f"{self.page_size}, with room for all of them: allowed is None for both"
            )
        if sinks > self.page_size:
            raise ValueError(
                f"sink_len is {sinks}; up to page_size={self.page_size} is allowed, so that one rank has them all"
            )


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
    found: LayerCache = layer  # it has the methods that models and generators use
    return found


def _plain(shape: AnyLayerShape) -> dict[str, Any]:
    return {f.name: getattr(shape, f.name) for f in fields(shape) if f.name != "context"}


def spread_layout(layout: Sequence[AnyLayerShape], context: Context) -> list[AnyLayerShape]:
    """The layout with shapes that build caches spread over ranks."""
    return [
        SpreadLayerShape(**_plain(shape), context=context)
        if isinstance(shape, LayerShape)
        else SpreadDecoupledLayerShape(**_plain(shape), context=context)
        for shape in layout
    ]


class ContextParallelKVCache(ModelKVCache):
    """A `ModelKVCache` whose tokens are spread over the ranks of a group.

    Every rank creates one, makes the same calls with the same inputs and gets the same results; each stores its own
    pages. Page ``p`` of every row is on rank ``p % size``, or on the next rank with room (`PageSpread`).

    Args:
        layers: shapes of the model's layers (a model's ``cache_layout``).
        batch_size, max_seq_len: rows, and tokens of a row over all ranks.
        k_cfg, v_cfg: storage of K and V.
        group, page_size, rank_tokens: as in `Context`.
        options: device, prefill, k_sem_cfg and k_geo_cfg of `ModelKVCache`. With ``prefill="exact"``, a prompt on an
            empty cache attends to its exact keys and values on every rank, without a collective. With "stored", and
            for all later chunks, attention reads the stored keys and values of all ranks.

    Raises:
        ValueError: as `ModelKVCache`, or ``rank_tokens`` too small for ``max_seq_len``.
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
        **options: Unpack[SpreadCacheOptions],
    ) -> None:
        context = Context(group, page_size, rank_tokens)
        layout = spread_layout(layers, context)
        super().__init__(layout, batch_size, max_seq_len, k_cfg, v_cfg, **options)
