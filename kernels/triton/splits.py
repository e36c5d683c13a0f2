"""Which tokens a query row can see, cut into splits: by the device, from lengths the host never reads.

A program attends to one split of one lane. How many splits there are at most is the host's choice
(`plan`), from shapes alone, so that one CUDA graph serves every length; how long a split is follows
from the row's own visible range, and programs beyond it leave at once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

#: Where a program reads its keys from.
CODES, TAIL, SINKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Overheads(NamedTuple):
    """What a launch costs besides its tiles, in tiles of a program that has an SM to itself.

    Attributes:
        program: beginning and ending a program.
        merge: merging one split of a row.
        together: by how much each further program on an SM lengthens the others' time, as a share: 0 where they hide
            each other's waiting, 1 where they only take turns.
    """

    program: float
    merge: float
    together: float


class Room(NamedTuple):
    """Where programs run.

    Attributes:
        processors: SMs.
        resident: programs an SM runs at once.
        besides: programs there are besides those of splits; they are short.
    """

    processors: int
    resident: int
    besides: int = 0


#: Overheads in tokens, and together of packed and of other streams: fitted to decode attention of 8 kv heads of 128 and
#: 1,024 to 32,768 tokens, 1 and 8 rows, 1 to 128 splits, on an H200, whose L2 cache held up to 60 MB of them (`tune`
#: finds those of another GPU, from memory).
PROGRAM, MERGE, TOGETHER = 128.0, 9.0, {True: 0.6, False: 0.9}
#: Those of programs that are one warp, in tiles: five kinds, heads of 64 and 128, 1 to 32 rows.
OF_A_WARP = Overheads(4.0, 0.15, 0.2)
#: Shortest split in tokens, of four warps and of one; and how many splits there are at most.
SHORTEST, SHORTEST_OF_A_WARP, MOST_SPLITS = 128, 64, 128
#: A row that is short, for which the shortest split is chosen.
SHORT_ROW = 1024
#: Processors assumed where there is no GPU (the interpreter).
ASSUMED_PROCESSORS = 4


def assumed_overheads(tile: int, packed: bool, warps: int) -> Overheads:
    """Those of tiles of so many tokens; ``packed``: of keys and values with scales; ``warps``: of a program."""
    if warps == 1:
        return OF_A_WARP
    return Overheads(PROGRAM / tile, MERGE / tile, TOGETHER[packed])


@functools.cache
def processors(device: torch.device) -> int:
    """SMs (or compute units) of a device."""
    if device.type != "cuda":
        return ASSUMED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def load(
    tiles: int, programs: int, splits: int, room: Room, together: float
) -> tuple[float, int, int]:
    """(What the busiest SM takes for the tiles, in tiles; waves of programs; splits that have tiles).

    Programs besides fill the gaps of the last wave; where more than one an SM find none, they count as another wave.
    """
    each = -(-tiles // splits)
    used = -(-tiles // each)
    at_once = room.processors * room.resident
    waves = -(-programs * used // at_once)
    left = programs * used - (waves - 1) * at_once + room.besides
    behind = min(left - at_once, room.besides)
    last = min(room.resident, -(-left // room.processors))
    full = 1 + together * (room.resident - 1)
    work = (waves - 1) * full + 1 + together * (last - 1)
    if behind > room.processors:
        waves += 1
        work += 1 + together * (min(room.resident, -(-behind // room.processors)) - 1)
    return each * work, waves, used


@functools.cache
def cheapest(tiles: int, programs: int, room: Room, overheads: Overheads) -> int:
    """How many splits make ``tiles`` of each of ``programs`` (batch, lane) rows finish first."""

    def cost(splits: int) -> float:
        work, waves, used = load(tiles, programs, splits, room, overheads.together)
        return work + waves * overheads.program + used * overheads.merge

    return min(range(1, min(tiles, MOST_SPLITS) + 1), key=cost)


def plan(
    tokens: int,
    tile: int,
    programs: int,
    room: Room,
    wanted: int,
    overheads: Overheads,
    warps: int = 4,
) -> tuple[int, int]:
    """(splits at most, tiles a split has at least), from shapes alone.

    Args:
        tokens: capacity of a row, or the reach of its window.
        tile: tokens of a tile.
        programs: rows times lanes.
        room: where they run.
        wanted: splits the caller asked for, 0 or less for none.
        overheads: what is paid besides.
        warps: of a program.
    """
    tiles = max(1, triton.cdiv(tokens, tile))
    if wanted > 0:
        return min(wanted, tiles), 1
    short = min(tiles, triton.cdiv(SHORT_ROW, tile))
    shortest = triton.cdiv(SHORTEST_OF_A_WARP if warps == 1 else SHORTEST, tile)
    least = max(shortest, triton.cdiv(short, cheapest(short, programs, room, overheads)))
    return max(1, min(cheapest(tiles, programs, room, overheads), triton.cdiv(tiles, least))), least


@triton.jit
def row_span(batch, seqlens_ptr, leftpad_ptr, query_lens_ptr, tokens):
    """(first query's position, tokens cached, real queries, padding) of a row."""
    length = tl.load(seqlens_ptr + batch)
    count = tokens
    if query_lens_ptr is not None:
        count = tl.load(query_lens_ptr + batch)
    pad = 0
    if leftpad_ptr is not None:
        pad = tl.load(leftpad_ptr + batch)
    return length - count, length, count, pad


@triton.jit
def visible_range(span, limits, SOURCE: tl.constexpr, C: tl.constexpr):
    """Two ranges of positions, [start, kept_stop) and [middle, stop), that hold all visible keys.

    The first is what ``num_sink_tokens`` keeps visible in front of a window, and is empty otherwise.

    Args:
        span: first query's position, tokens cached, real queries, padding.
        limits: window, tokens kept in front of it, residual_len (0 without a tail).
    """
    first, length, count, pad = span
    window, kept, residual = limits
    start = pad + C.sink_len
    stop = length - residual
    if C.group > 1:
        # Of a group that is read from codes the last token is that far behind.
        stop = tl.maximum(stop, 0) // C.group * C.group
    if SOURCE == SINKS:
        start = pad
        stop = tl.minimum(pad + C.sink_len, length)
    middle = start
    if C.window:
        middle = tl.maximum(start, first - window).to(tl.int32)
    kept_stop = start
    if C.kept:
        kept_stop = tl.minimum(pad + kept, middle)
    if SOURCE == TAIL:
        stop = length
        oldest = first - residual + 1
        if C.group > 1:
            oldest = tl.maximum(oldest, 0) // C.group * C.group
        oldest = tl.maximum(start, oldest)
        middle = oldest if C.kept else tl.maximum(middle, oldest)
        kept_stop = start
    stop = tl.where(count > 0, stop, 0)
    return start, tl.minimum(kept_stop, stop), middle, stop


@triton.jit
def tiles_of_range(start, kept_stop, middle, stop, TILE: tl.constexpr):
    """Tiles of a visible range: (in all, of its first part, the first tile of that, and of the second part)."""
    kept_first = start // TILE
    kept_last = (kept_stop + TILE - 1) // TILE
    kept = tl.where(kept_stop > start, kept_last - kept_first, 0)
    # A tile both ranges share belongs to the first.
    first = middle // TILE
    first = tl.where(kept > 0, tl.maximum(first, kept_last), first)
    rest = tl.where(stop > middle, (stop + TILE - 1) // TILE - first, 0)
    return kept + tl.maximum(rest, 0), kept, kept_first, first


@triton.jit
def tiles_of_split(split, splits, least, tiles):
    """The first of a row's ``tiles`` that are this split's, and the one behind the last."""
    chunk = tl.maximum((tiles + splits - 1) // splits, least)
    begin = tl.minimum(split * chunk, tiles)
    return begin, tl.minimum(begin + chunk, tiles)


@triton.jit
def seen(position, real, key, pad, limits, SOURCE: tl.constexpr, C: tl.constexpr):
    """Whether the query at ``position`` reads ``key`` from SOURCE.

    Queries lie along one dimension and keys along the other: (1, R) and (N, 1), or (R, 1) and (1, N).
    """
    window, kept, residual = limits
    distance = position - key
    behind = distance
    if C.group > 1:
        # How far behind the last token of the key's group is: that decides where all of it is read from.
        behind = position - (key // C.group * C.group + (C.group - 1))
    if SOURCE == CODES:
        allowed = (behind >= residual) & (key >= pad + C.sink_len)
    elif SOURCE == TAIL:
        allowed = (distance >= 0) & (behind < residual) & (key >= pad + C.sink_len)
    else:
        allowed = (distance >= 0) & ((key >= pad) & (key < pad + C.sink_len))
    if C.window:
        near = distance <= window
        if C.kept:
            near = near | (key < pad + kept)
        allowed = allowed & near
    return allowed & real
