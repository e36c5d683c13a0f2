"""A balanced schedule: all tiles of a batch lie end to end and are cut into stretches of one length, on the device.

Splits by shape alone (`splits.plan`) are the same for every row, so that in a batch of one long row and many short
ones a few programs read the long row while the others have long left. Here a program takes one stretch, whatever rows
it runs across, and leaves a piece of each: no program reads more than a tile beyond the mean. The C++ kernels cut their
work like this for threads (``csrc/attention_plan.h``), FlashInfer's BatchAttention and the scheduler of
FlashAttention-3 for the CTAs of a GPU.

A *line* is what one row has for one program of a lane: its tiles, as many for every lane. The tiles of all lines are
counted through, row by row and within a row lane by lane, so one prefix sum over the rows says where each begins:

    schedule (2 + B,) int32: tiles of a stretch, 0, tiles of row 0, of rows 0 and 1, …, each for one line a row

Line ``l`` of stretch ``s`` leaves its partial result at ``s + (1 + sides) * l + sides``: of consecutive lines each
has places of its own, one after the other, without a list that says whose they are; in front of them are those of its
tail and sinks. There is room for all where there is room for `most_pieces`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .splits import CODES, MOST_SPLITS, row_span, tiles_of_range, visible_range

#: Rows that are looked at together.
ROWS_AT_ONCE = tl.constexpr(128)
#: So long are stretches at least that no line is cut into more.
MOST_CUTS = tl.constexpr(MOST_SPLITS)


def most_pieces(walkers: int, lines: int, sides: int) -> int:
    """Partial results there is a place for."""
    return walkers + lines * (1 + sides)


@triton.constexpr_function
def row_groups(C):
    """Programs that share the queries of a lane."""
    return -(-C.per_lane * C.groups * C.tokens // C.rows)


@triton.constexpr_function
def programs_of_row(C):
    """Lines of a row: lanes times row groups."""
    return -(-C.heads // C.per_lane) * row_groups(C)


@triton.constexpr_function
def sides_of(C):
    """Pieces a line has besides those of its codes: the tail, the sinks."""
    return int(C.tail) + int(C.sink_len > 0)


@triton.jit
def line_tiles(schedule, line, C: tl.constexpr):
    """Where a line's tiles begin, and how many they are."""
    row = line // programs_of_row(C)
    before = tl.load(schedule + 1 + row)
    tiles = tl.load(schedule + 2 + row) - before
    return before * programs_of_row(C) + line % programs_of_row(C) * tiles, tiles


@triton.jit
def pieces_of_line(schedule, line, C: tl.constexpr):
    """The place of a line's first partial result, and how many it has."""
    stretch = tl.load(schedule)
    begin, tiles = line_tiles(schedule, line, C)
    first = begin // stretch
    cuts = tl.where(tiles > 0, (begin + tiles - 1) // stretch - first + 1, 0)
    return first + line * (1 + sides_of(C)), cuts + sides_of(C)


@triton.jit
def part_of_line(schedule, stretch, line, C: tl.constexpr):
    """The first of a line's tiles that are in a stretch, and the one behind the last; read again for every line."""
    length = tl.load(schedule)
    begin, tiles = line_tiles(schedule, line, C)
    skipped = stretch * length - begin
    return tl.maximum(skipped, 0), tl.minimum(skipped + length, tiles)


@triton.jit
def line_at(schedule, tile, batch_size, C: tl.constexpr):
    """The line that ``tile`` of all tiles is in."""
    row = 0
    for first in range(0, batch_size, ROWS_AT_ONCE):
        some = first + tl.arange(0, ROWS_AT_ONCE)
        ends = tl.load(schedule + 2 + some, mask=some < batch_size, other=2**30)
        row += tl.sum((ends <= tile // programs_of_row(C)).to(tl.int32), axis=0)
    before = tl.load(schedule + 1 + row)
    tiles = tl.load(schedule + 2 + row) - before
    return row * programs_of_row(C) + (tile - before * programs_of_row(C)) // tiles


# Like the kernels that read its result it is compiled once, however the batch and the cache grow.
@triton.jit(
    do_not_specialize=[
        "window", "kept", "residual", "walkers", "least", "merge_overhead", "batch_size"
    ]
)  # fmt: skip
def schedule_kernel(
    lengths,
    schedule_ptr,
    window,
    kept,
    residual,
    walkers,
    least,
    merge_overhead,
    batch_size,
    C: tl.constexpr,
):
    """One program: the schedule of a batch, for ``walkers`` programs.

    Args:
        lengths: pointers to cache_seqlens, cache_leftpad and query_lens.
        schedule_ptr: (2 + batch_size,) int32, to be written.
        window, kept, residual: as of the kernel that reads it.
        walkers: programs that take a stretch.
        least: tiles of a stretch at least.
        merge_overhead: what merging one piece costs, in tiles: where a row is cut into ``n / stretch`` pieces, stretch
            plus merging costs least at ``sqrt(merge_overhead * n)``.
    """
    limits = (window, kept, residual)
    total = 0
    longest = 0
    for first in range(0, batch_size, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        there = row < batch_size
        span = row_span(
            tl.minimum(row, batch_size - 1), lengths[0], lengths[1], lengths[2], C.tokens
        )
        start, kept_stop, middle, stop = visible_range(span, limits, CODES, C)
        tiles, _, _, _ = tiles_of_range(start, kept_stop, middle, stop, C.tile)
        tiles = tl.where(there, tiles, 0)
        tl.store(schedule_ptr + 2 + row, total + tl.cumsum(tiles, axis=0), mask=there)
        total += tl.sum(tiles, axis=0)
        longest = tl.maximum(longest, tl.max(tiles, axis=0))
    share = (total * programs_of_row(C) + walkers - 1) // walkers
    cheap = tl.ceil(tl.sqrt(merge_overhead * longest)).to(tl.int32)
    stretch = tl.maximum(tl.maximum(share, cheap), (longest + MOST_CUTS - 1) // MOST_CUTS)
    tl.store(schedule_ptr, tl.maximum(stretch, least))
    tl.store(schedule_ptr + 1, 0)
