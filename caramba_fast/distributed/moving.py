"""Pieces of what a spread layer cache does to its buffers: pick tokens, fit phases, copy rows, refill the ring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import LayerCache, PageAllocator, PageTable
from caramba_fast.cache.tensor import CacheTensor
from caramba_fast.ops import Transform
from caramba_fast.ops.memory import empty
from caramba_fast.ops.transform import PHASE_TILE

if TYPE_CHECKING:
    from caramba_fast.distributed.rows import SpreadRows


def picked(x: Tensor, index: Tensor | None, most: int) -> Tensor:
    """Of x (B, H, T, D) the tokens ``index`` (B, most), or the first ``most``."""
    if index is None:
        return x[:, :, :most]
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def on_pages(transform: Transform, pages: Sequence[int], page_size: int) -> Transform:
    """The transform of a rank that holds ``pages`` of a row: its slots turn by the positions they stand for.

    A phase table has one angle for each tile of 128 tokens; a rank's table has those of its own tiles.

    Raises:
        ValueError: the transform has phases, and pages are no whole tiles.
    """
    if transform.phases is None:
        return transform
    if page_size % PHASE_TILE:
        raise ValueError(
            f"page_size is {page_size}; keys centered on RoPE pairs need a multiple of {PHASE_TILE}"
        )
    tiles = page_size // PHASE_TILE
    first = torch.tensor(list(pages) or [0]) * tiles
    index = (first[:, None] + torch.arange(tiles)).flatten()
    last = transform.phases.shape[2] - PHASE_TILE - 1  # the last page may reach past the table
    index = torch.cat((torch.arange(PHASE_TILE), PHASE_TILE + index.clamp(max=last)))
    phases = transform.phases[:, :, index.to(transform.phases.device)].contiguous()
    return replace(transform, phases=phases)


def copied(cache: LayerCache, rows: Sequence[int], pages_per_row: int) -> LayerCache:
    """A paged cache whose row b holds what row ``rows[b]`` holds in ``cache``, with a pool of its own."""
    assert cache.pages is not None
    other = cache.take(rows)
    shared = other.pages
    assert shared is not None
    allocator = PageAllocator(len(rows) * pages_per_row)
    size = cache.pages.page_size
    other.pages = PageTable(len(rows), pages_per_row, size, allocator, cache.device)
    other.pages.reserve([0] * len(rows), other.lengths.host)
    pairs = [
        pair
        for old, new in zip(shared.rows, other.pages.rows, strict=True)
        for pair in zip(old, new, strict=True)
    ]
    source, target = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.to(cache.device)
    for stream in other.streams.values():
        _move_pages(stream, source, target, len(allocator.references))
    shared.shrink([0] * len(rows))
    return other


def _move_pages(stream: CacheTensor, source: Tensor, target: Tensor, count: int) -> None:
    def moved(buffer: Tensor) -> Tensor:
        new = empty((count, *buffer.shape[1:]), buffer.dtype, buffer.device)
        new[target] = buffer[source]
        return new

    scales = None if stream.scales is None else moved(stream.scales)
    stream.replace_buffers(moved(stream.codes), scales, stream.transform)


def refill(
    layer: SpreadRows, places: Sequence[tuple[int, int, int]]
) -> Callable[[int, int, int], None]:
    """Fetches positions from the ranks that hold their codes; what puts them back into the ring.

    One collective for all of them; none where nothing is asked for.

    Args:
        places: (row, start, stop).
    """
    if not places:
        return lambda *_: None
    found = {
        name: [_own_values(layer, stream, place) for place in places]
        for name, stream in layer.local.streams.items()
    }
    flat = torch.cat([x.flatten() for values in found.values() for x in values])
    flat = layer.group.all_gather(flat).sum(0)
    pieces = iter(flat.split([x.numel() for values in found.values() for x in values]))
    whole = {
        name: {place: next(pieces).view_as(x) for place, x in zip(places, values, strict=True)}
        for name, values in found.items()
    }

    def put_back(row: int, start: int, stop: int) -> None:
        assert layer.ring is not None
        for name, stream in layer.ring.streams.items():
            assert stream.tail is not None
            slot = torch.arange(start, stop, device=layer.device) % stream.tail.shape[2]
            stream.tail[row, :, slot] = whole[name][row, start, stop].to(stream.tail.dtype)

    return put_back


def _own_values(layer: SpreadRows, stream: CacheTensor, place: tuple[int, int, int]) -> Tensor:
    """(lanes, stop - start, lane_dim) float32 in the stored basis, 0 where another rank has the token."""
    row, start, stop = place
    spread, rank, lanes = layer.plans.spread, layer.group.rank, stream.lanes
    values = torch.zeros(
        lanes.count, stop - start, lanes.heads_per_lane * stream.head_dim, device=layer.device
    )
    position = spread.positions_of(rank, start, stop)
    if len(position):
        slot = torch.from_numpy(spread.count(rank, position)).to(layer.device)
        held = int(spread.count(rank, np.array(stop)))
        stored = layer.local._stored(stream, held)[row : row + 1, :, slot]
        values[:, torch.from_numpy(position - start).to(layer.device)] = lanes.pack(stored)[0]
    return values


def copy_of(layer: SpreadRows, rows: Sequence[int]) -> SpreadRows:
    """A layer whose row b holds what row ``rows[b]`` holds in ``layer``."""
    other = copy.copy(layer)
    pages = len(layer.plans.spread.pages_of(layer.group.rank))
    with torch.inference_mode(False):
        other.local = copied(layer.local, rows, max(1, pages))
        other.ring = None if layer.ring is None else layer.ring.take(rows)
        other.lengths = layer.lengths.taken(rows)
    other.batch_size, other._newest = len(rows), []
    return other
