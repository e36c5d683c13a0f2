"""The split-KV kernel under a balanced schedule: a program walks over the pieces of one stretch (`balanced`).

A piece is read by the loop that reads a split (`tiles_attend.attend`); nothing but the walk, and where results go, is
this kernel's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .balanced import line_at, part_of_line, pieces_of_line, programs_of_row, sides_of
from .splits import CODES, SINKS, TAIL
from .tiles_kernel import codes_split, place_of, rows_of_lane, side_split


@triton.jit
def _piece(
    line, place, part, stored, size, SOURCE: tl.constexpr, queries, lengths, table, table_stride, partial, lse, limits,
    softcap, K: tl.constexpr, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Tiles ``part`` of a line's codes, its tail or its sinks; the result goes to ``place``."""
    batch = tl.cast(line // programs_of_row(C), tl.int64)
    lane, _, _, rows, span = rows_of_lane(line % programs_of_row(C), batch, lengths, C)
    q = place_of(queries, batch, 0, 0, rows[0], C)
    q_geo = (None, None, None)
    if G is not None:
        q_geo = place_of(queries[5:], batch, 0, 0, rows[0], C)
    first = tl.cast(place, tl.int64) * C.rows
    result = (partial + first * V.dim, lse + first, 1)
    rows = (tl.arange(0, C.rows), rows[1], rows[2], rows[3], rows[4])
    if SOURCE == CODES:
        codes_split(stored, table, table_stride, batch, lane, q, q_geo, result, rows, part, span, limits,
                    size, softcap, K, G, V, C)  # fmt: skip
    else:
        side_split(stored, size, SOURCE, batch, lane, q, q_geo, result, rows, span, limits, softcap,
                   K, G, V, C)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "table_stride", "window", "kept", "residual", "slots", "ring", "walkers", "batch_size"
    ]
)  # fmt: skip
def balanced_kernel(
    queries,
    streams,
    tails,
    sinks,
    lengths,
    schedule_ptr,
    table_ptr,
    table_stride,
    partial_ptr,
    lse_ptr,
    window,
    kept,
    residual,
    slots,
    ring,
    walkers,
    batch_size,
    softcap,
    K: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    K_SIDE: tl.constexpr,
    G_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """Grid: ``walkers``, each with a stretch of the codes; then a program a line for its tail, and one for its sinks.

    Args:
        schedule_ptr: what `schedule_kernel` made.
        partial_ptr, lse_ptr: (pieces, C.rows, D_v) and without D_v, float32.
        others: as of `partials_kernel`.
    """
    SIDES: tl.constexpr = sides_of(C)
    limits, walker = (window, kept, residual), tl.program_id(0)
    if walker < walkers:
        stretch, total = tl.load(schedule_ptr), tl.load(schedule_ptr + 1 + batch_size)
        begin = walker * stretch
        end = tl.minimum(begin + stretch, total * programs_of_row(C))
        if begin < end:
            first = line_at(schedule_ptr, begin, batch_size, C)
            behind = line_at(schedule_ptr, end - 1, batch_size, C) + 1
            # What is the same for all pieces would be kept in registers beside the accumulators.
            for line in tl.range(first, behind, disable_licm=True):
                part = part_of_line(schedule_ptr, walker, line, C)
                if part[0] < part[1]:  # rows without tiles lie between others
                    place = walker + line * (1 + SIDES) + SIDES
                    _piece(line, place, part, streams, slots, CODES, queries, lengths, table_ptr, table_stride,
                           partial_ptr, lse_ptr, limits, softcap, K, G, V, C)  # fmt: skip
    else:
        lines = batch_size * programs_of_row(C)
        line, which = (walker - walkers) % lines, (walker - walkers) // lines
        side, _ = pieces_of_line(schedule_ptr, line, C)
        if C.tail and which == 0:
            _piece(line, side, (0, 1), tails, ring, TAIL, queries, lengths, None, 0, partial_ptr, lse_ptr, limits,
                   softcap, K_SIDE, G_SIDE, V_SIDE, C)  # fmt: skip
        elif C.sink_len > 0:
            _piece(line, side + which, (0, 1), sinks, C.sink_len, SINKS, queries, lengths, None, 0, partial_ptr,
                   lse_ptr, limits, softcap, K_SIDE, G_SIDE, V_SIDE, C)  # fmt: skip
