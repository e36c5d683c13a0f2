"""The fp16 tail of a layer whose pages are spread over ranks.

Keys less than ``residual_len`` behind a query are read in fp16 from a ring, wherever their codes are. The ring is
small, so every rank has it, whole; one of them attends to it. It is the ring of an ordinary layer cache that has no
pages: what it is given goes to the ring, its codes nowhere. Reading it with a window of ``residual_len`` tokens leaves
nothing visible but what comes from the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import LayerCache
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.distributed.merge import State
from caramba_fast.distributed.spread import PAGE_MULTIPLE

#: Tokens of the one page the ring's cache has, which holds zeros: as few as a page can have.
ZEROS = PAGE_MULTIPLE


class NoPages:
    """Stands for the page table of a cache that keeps no codes.

    Writing finds no page; reading finds one page of zeros wherever it looks, which no query sees.
    """

    def __init__(self, batch_size: int, pages: int, device: torch.device) -> None:
        self.tensor = torch.full((batch_size, pages), -1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self.tensor)

    def columns(self, longest: int) -> Tensor:
        """(B, pages) int32, the page of zeros; ``longest`` changes nothing."""
        del longest
        return self._zeros

    def reserve(self, held: Sequence[int], added: Sequence[int]) -> list[tuple[int, int]]:
        """Nothing to do, as in `shrink` and `reorder`."""
        del held, added
        return []

    def shrink(self, lengths: Sequence[int]) -> None:
        """Nothing to do."""

    def reorder(self, order: Sequence[int]) -> None:
        """Nothing to do."""

    def taken(self, rows: Sequence[int]) -> NoPages:
        """The same for other rows."""
        return NoPages(len(rows), self.tensor.shape[1], self.tensor.device)


def ring_config(config: KVCacheTensorConfig) -> KVCacheTensorConfig:
    """Storage of a cache that is used for its ring alone: ``config`` without sinks."""
    return config.model_copy(update={"sink_len": 0})


def without_ring(config: KVCacheTensorConfig, *, sinks: bool) -> KVCacheTensorConfig:
    """Storage of the pages: ``config`` without the tail, and with its sinks or without."""
    change = {"residual_len": 0} if sinks else {"residual_len": 0, "sink_len": 0}
    return config.model_copy(update=change)


def as_ring(cache: LayerCache) -> LayerCache:
    """Turns a fresh paged cache of one page into one that keeps its ring alone."""
    assert cache.pages is not None
    for stream in cache.streams.values():
        for buffer in (stream.codes, stream.scales):
            if buffer is not None:
                buffer.zero_()
    rows, pages = cache.pages.tensor.shape
    stand_in: Any = NoPages(rows, pages, cache.device)
    cache.pages = stand_in
    return cache


def attend_to_ring(
    ring: LayerCache, queries: Sequence[Tensor], before: int, left: int, options: dict[str, Any]
) -> State:
    """The queries over the keys less than residual_len behind them, and less than ``left`` + 1, -1 for no limit."""
    reach = ring.residual_len - 1
    window = (reach if left < 0 else min(reach, left), 0)
    found: Any = ring._attend(
        *queries, before=before, window_size=window, return_softmax_lse=True, **options
    )
    return found[0], found[1]


def lost_positions(ring: LayerCache, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, start, stop) that have to be put back into the ring when rows are shortened to ``lengths``."""
    needed: list[tuple[int, int, int]] = []
    keeper = ring._tail.taken(range(len(lengths)))
    keeper.shortened(ring.lengths.host, lengths, lambda *place: needed.append(place))
    return needed


def shorten(
    ring: LayerCache, lengths: Sequence[int], refill: Callable[[int, int, int], None]
) -> None:
    """Shortens rows of the ring; ``refill(row, start, stop)`` has put back what is missing."""
    ring._narrow()
    ring._tail.shortened(ring.lengths.host, lengths, refill)
    ring.lengths.set(lengths)
