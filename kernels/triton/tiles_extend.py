"""A block of a prompt's queries over one split of one lane: the loop of extend attention.

The same cache, ranges and masks as `tiles_attend`, the other way round: queries are the long side of both products, so
that a tile of keys and values is loaded and unpacked once for all of them. Scores are Q · K^T, the output is P · V.

Tiles that every query of the block sees whole need no mask. They come first, for the order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .merge_splits import LOG2E, capped
from .splits import CODES, row_span, seen, tiles_of_range, tiles_of_split, visible_range
from .tiles import gain, part_columns, parts_of
from .tiles_attend import place, tile_of
from .tiles_query import load_query


@triton.jit
def rows_of_block(number, batch, lengths, tokens, C: tl.constexpr):
    """Block ``number`` of one row's queries: C.rows successive tokens of one query head.

    Returns:
        its lane; its query head and first token, 64-bit; row numbers from there, their head in the lane, whether they
        are real queries, their positions, whether there is such a row at all, (R,) each; the block's own span, as
        `row_span` has it.
    """
    HEADS: tl.constexpr = C.per_lane * C.groups
    blocks = (tokens + C.rows - 1) // C.rows
    lane = number // (HEADS * blocks)
    within = number % (HEADS * blocks)
    # The longest blocks are the last of a prompt: they begin first.
    first = (blocks - 1 - within // HEADS) * C.rows
    head = lane * HEADS + within % HEADS
    row = tl.arange(0, C.rows)
    token = first + row
    position, _, count, pad = row_span(batch, lengths[0], lengths[1], lengths[2], tokens)
    # A lane may have room for more heads than there are.
    there = head < C.heads * C.groups
    count = tl.where(there, tl.minimum(tl.maximum(count - first, 0), C.rows), 0)
    position += first
    stored, real = token < tl.where(there, tokens, 0), token < first + count
    own_head = tl.zeros_like(token) + within % HEADS // C.groups
    # Rows are counted from the block's first, in 32 bits: addresses of all of them would fill the registers.
    rows = (row, own_head, real, position + row, stored)
    span = (position, position + count, count, pad)
    return lane, head.to(tl.int64), first.to(tl.int64), rows, span


@triton.jit
def _products(q, k, C: tl.constexpr):
    """Q · K^T over the parts of a lane: (R, N) float32."""
    total = tl.dot(q[0], tl.trans(k[0]), input_precision=C.precision)
    for part in tl.static_range(1, len(q)):
        total = tl.dot(q[part], tl.trans(k[part]), total, input_precision=C.precision)
    return total


@triton.jit
def _load(place, rows, S: tl.constexpr, C: tl.constexpr):
    """`load_query` with a factor that is not below 0."""
    q, size = load_query(place[0], place[1], rows[1], rows[2], place[2], S)
    size *= 1.0 / gain(S, C.ptx)
    sign = tl.where(size < 0.0, -1.0, 1.0)
    parts = ()
    for part in tl.static_range(len(q)):
        parts += (q[part] * sign.to(q[part].dtype)[:, None],)
    return parts, size * sign


@triton.jit
def _weighted(accumulators, alpha, p, v, C: tl.constexpr):
    """Each part's accumulator times alpha, plus P · V."""
    found = ()
    for part in tl.static_range(len(v)):
        scaled = accumulators[part] * alpha[:, None]
        found += (tl.dot(p, v[part], scaled, input_precision=C.precision),)
    return found


@triton.jit
def _zero_part(column, C: tl.constexpr):
    return tl.full((C.rows, column.shape[0]), 0.0, tl.float32)


@triton.jit
def _zeros(S: tl.constexpr, C: tl.constexpr):
    parts = ()
    for part in tl.static_range(parts_of(S)):
        parts += (_zero_part(part_columns(part, S), C),)
    return parts


@triton.jit
def _whole_tiles(begin, end, start, rest_first, span, limits, SOURCE, C: tl.constexpr):
    """Of the tiles from ``begin`` to ``end``: the first and the last + 1 of those that every query sees whole."""
    first, last = begin, begin
    if SOURCE == CODES and not C.window:
        stop = tl.maximum(span[0] - limits[2] + 1, 0)
        if C.group > 1:
            stop = stop // C.group * C.group
        first = tl.minimum(tl.maximum((start + C.tile - 1) // C.tile - rest_first, begin), end)
        last = tl.minimum(tl.maximum(stop // C.tile - rest_first, first), end)
    return first, last


@triton.jit
def _step(
    largest, total, accumulators, token, used, q, size, q_geo, size_geo, k, g, v, table, rows, span, limits, slots,
    softcap, SOURCE: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The softmax and the output of a block with one more tile of keys, from position ``token`` on."""
    key = token + tl.arange(0, C.tile)
    page, origin, slot, inside = place(token, key, used, table, slots, span[3], SOURCE, C)
    MASKED: tl.constexpr = (C.masked and not WHOLE) or SOURCE != CODES
    tile = tile_of(k, page, origin, slot, inside, used, slots, K, MASKED, False, C)
    logits = _products(q, tile, C)
    # The factor is not below 0, so that the largest product makes the largest score: one multiply-add does the rest.
    FUSED: tl.constexpr = WHOLE and G is None and not C.softcap
    if not FUSED:
        logits *= size[:, None]
    if G is not None:
        tile = tile_of(g, page, origin, slot, inside, used, slots, G, MASKED, False, C)
        logits += _products(q_geo, tile, C) * size_geo[:, None]
    if C.softcap:
        logits = capped(logits, softcap, True) * LOG2E
    if not WHOLE:
        allowed = seen(rows[3][:, None], rows[2][:, None], key[None, :], span[3], limits, SOURCE, C)
        logits = tl.where(allowed, logits, float("-inf"))
    top = tl.max(logits, axis=1)
    larger = tl.maximum(largest, top * size if FUSED else top)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    if FUSED:
        p = tl.exp2(logits * size[:, None] - base[:, None])
    else:
        p = tl.exp2(logits - base[:, None])
    alpha = tl.exp2(largest - base)
    total = total * alpha + tl.sum(p, axis=1)
    tile = tile_of(v, page, origin, slot, inside, used, slots, V, MASKED, True, C)
    return larger, total, _weighted(accumulators, alpha, p.to(V.dot), tile, C)


@triton.jit
def _store_partial(
    partial, rows, accumulators, total, splits, S: tl.constexpr, GAIN, C: tl.constexpr
):
    """Each row's columns of its own head, divided by the row's sum."""
    factor = tl.where(total == 0.0, 0.0, 1.0 / (tl.where(total == 0.0, 1.0, total) * GAIN))
    for part in tl.static_range(parts_of(S)):
        column = part_columns(part, S)
        mask = rows[4][:, None]
        if C.per_lane > 1:
            mask = mask & (rows[1][:, None] == (column // S.dim)[None, :])
        target = partial + (rows[0] * (splits * S.dim))[:, None] + (column % S.dim)[None, :]
        tl.store(target, accumulators[part] * factor[:, None], mask=mask)


@triton.jit
def extend(
    q_place,
    g_place,
    k,
    g,
    v,
    table,
    result,
    rows,
    split,
    span,
    limits,
    slots,
    softcap,
    SOURCE: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
):
    """One split of one lane for one block, from the codes, the tail or the sinks; arguments as of `attend`."""
    start, kept_stop, middle, stop = visible_range(span, limits, SOURCE, C)
    tiles, kept_tiles, kept_first, rest_first = tiles_of_range(
        start, kept_stop, middle, stop, C.tile
    )
    begin, end = tiles_of_split(split[0], split[1], split[2], tiles)
    largest = tl.full((C.rows,), float("-inf"), tl.float32)
    total = tl.full((C.rows,), 0.0, tl.float32)
    if begin < end:
        q, size = _load(q_place, rows, K, C)
        q_geo, size_geo = q, size
        if G is not None:
            q_geo, size_geo = _load(g_place, rows, G, C)
        accumulators = _zeros(V, C)
        first, last = _whole_tiles(begin, end, start, rest_first, span, limits, SOURCE, C)
        if SOURCE == CODES and not C.window:
            all_used = tl.full((C.tile,), True, tl.int1)
            for i in tl.range(first, last):
                token = (rest_first + i) * C.tile
                largest, total, accumulators = _step(
                    largest, total, accumulators, token, all_used, q, size, q_geo, size_geo, k, g, v, table, rows,
                    span, limits, slots, softcap, SOURCE, True, K, G, V, C,
                )  # fmt: skip
        # At the edges of what is seen there is a tile or two: no buffers for a pipeline of them.
        STAGES: tl.constexpr = None if SOURCE == CODES and C.window else 1
        for j in tl.range(begin, end - (last - first), num_stages=STAGES):
            i = tl.where(j < first, j, j + (last - first))
            number = rest_first + i - kept_tiles
            if C.kept:
                number = tl.where(i < kept_tiles, kept_first + i, number)
            token = number * C.tile
            key = token + tl.arange(0, C.tile)
            used = (key >= middle) & (key < stop)
            if C.kept:
                used = used | ((key >= start) & (key < kept_stop))
            largest, total, accumulators = _step(
                largest, total, accumulators, token, used, q, size, q_geo, size_geo, k, g, v, table, rows, span,
                limits, slots, softcap, SOURCE, False, K, G, V, C,
            )  # fmt: skip
        _store_partial(result[0], rows, accumulators, total, result[2], V, gain(V, C.ptx), C)
    lse = tl.where(
        total == 0.0, float("-inf"), largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    )
    tl.store(result[1] + rows[0] * result[2], lse, mask=rows[4])
