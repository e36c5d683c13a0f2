"""One split of one lane: the loop over tiles that every variant of decode attention shares.

Scores are K · Q^T and the output is V^T · P, so that tokens are the long side of both products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import Q8_0
from .merge_splits import LOG2E, capped
from .splits import CODES, TAIL, seen, tiles_of_range, tiles_of_split, visible_range
from .tiles import gain, halves, lean, load_tile, value_columns, value_parts_of
from .tiles_channel import channel_scores, channel_values, products_of, unit
from .tiles_layout import by_words
from .tiles_query import load_query, positive

#: The least float32, where the largest score of a row begins: a difference from it is never that of two infinities.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def tile_of(
    stream,
    page,
    origin,
    slot,
    inside,
    used,
    slots,
    S: tl.constexpr,
    MASKED: tl.constexpr,
    VALUES: tl.constexpr,
    C: tl.constexpr,
):
    """The tile that begins ``origin`` slots into a page (page 0 of a contiguous cache is all of it)."""
    codes, scales = stream[0], stream[1]
    codes += page * stream[2] + origin * (S.width // halves(S.form))
    if S.group > 1:
        scales += page * stream[3]
        tile = channel_values(codes, scales, origin, slot, inside, used, slots, S, MASKED, C)
    else:
        if S.form >= Q8_0:
            scales += page * stream[3] + origin * (S.width // S.block)
        tile = load_tile(codes, scales, slot, inside, used, S, MASKED, VALUES, C)
    return tile


@triton.jit
def _scores(q, turned, stream, page, origin, slot, inside, used, slots, S, MASKED, C: tl.constexpr):
    """(N, R) scores of a tile of one key stream, before their factor."""
    if S.group > 1 and S.dot != tl.float32:
        codes = stream[0] + page * stream[2] + origin * (S.width // halves(S.form))
        scales = stream[1] + page * stream[3]
        scores = channel_scores(q, turned, codes, scales, origin, slot, inside, slots, S, MASKED, C)
    else:
        tile = tile_of(stream, page, origin, slot, inside, used, slots, S, MASKED, False, C)
        scores = _products(q, tile, C)
    return scores


@triton.jit
def _turned(q):
    """The parts of the queries, transposed: once, and not in every tile."""
    parts = ()
    for part in tl.static_range(len(q)):
        parts += (tl.trans(q[part]),)
    return parts


@triton.constexpr_function
def apart(stream, shape):
    """How tokens of a tile lie in threads, if sums of their weights are kept apart until all tiles are read, or None.

    Returns:
        (A, B, C): of tokens in the shape (A, B, C, 8), those along A and C are one thread's.
    """
    by_channel = stream.group > 1 and stream.dot != tl.float32
    if shape.rows > 32:  # too many sums for the registers
        return None
    if shape.warps == 1:
        return 1, 1, shape.tile // 8
    if not lean(shape):
        return (1, shape.tile // 8, 1) if by_channel else None
    if by_channel:
        count = products_of(stream, shape)
        return 1, count, shape.tile // count // 8
    again = max(1, shape.tile // (16 * shape.warps))
    return again, shape.tile // 16 // again, 2


@triton.jit
def _of_threads(p, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """(N, R) -> (B, 8, R): sums of what a thread has."""
    return tl.sum(tl.sum(tl.reshape(p, (A, B, C, 8, p.shape[1])), axis=2), axis=0)


@triton.jit
def _products(q, k, C: tl.constexpr):
    """K · Q^T over the parts of a lane: (N, R) float32."""
    total = tl.dot(k[0], tl.trans(q[0]), input_precision=C.precision)
    for part in tl.static_range(1, len(q)):
        total = tl.dot(k[part], tl.trans(q[part]), total, input_precision=C.precision)
    return total


@triton.jit
def _weighted(accumulators, alpha, p, v, S: tl.constexpr, C: tl.constexpr):
    """Each part's accumulator times alpha, plus P · V."""
    found = ()
    for part in tl.static_range(len(v)):
        scaled = accumulators[part] * alpha[None, :]
        turned = v[part] if by_words(S, C) else tl.trans(v[part])
        found += (tl.dot(turned, p, scaled, input_precision=C.precision),)
    return found


@triton.jit
def _zero_part(column, C: tl.constexpr):
    return tl.full((column.shape[0], C.rows), 0.0, tl.float32)


@triton.jit
def _zeros(S: tl.constexpr, C: tl.constexpr):
    parts = ()
    for part in tl.static_range(value_parts_of(S, C)):
        parts += (_zero_part(value_columns(part, S, C), C),)
    return parts


@triton.jit
def _store_partial(
    partial, row, own_head, real, accumulators, total, splits, S: tl.constexpr, GAIN, C: tl.constexpr
):  # fmt: skip
    """Each row's columns of its own head, divided by the row's sum."""
    factor = tl.where(total == 0.0, 0.0, 1.0 / (tl.where(total == 0.0, 1.0, total) * GAIN))
    for part in tl.static_range(value_parts_of(S, C)):
        column = value_columns(part, S, C)
        mask = (own_head[None, :] == (column // S.dim)[:, None]) & real[None, :]
        target = partial + (row * (splits * S.dim))[None, :] + (column % S.dim)[:, None]
        tl.store(target, accumulators[part] * factor[None, :], mask=mask)


@triton.jit
def place(token, key, used, table, slots, pad, SOURCE: tl.constexpr, C: tl.constexpr):
    """Where a tile begins, where its tokens lie from there, and which of those slots exist."""
    page, origin, slot, inside = 0, token, key - token, used
    if SOURCE == CODES:
        if C.page > 0:
            page, origin = tl.load(table + token // C.page), token % C.page
        if C.masked:
            inside = key < slots
    elif SOURCE == TAIL:
        origin, slot = 0, key % slots
    else:
        origin, slot = 0, key - pad
    return tl.cast(page, tl.int64), tl.cast(origin, tl.int64), slot, inside


@triton.jit
def attend(
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
    """One split of one lane, read from the codes, the tail or the sinks.

    Args:
        q_place, g_place: pointer, offsets (R,) and factor of each key stream's queries.
        k, g, v: what `_lane` or `_buffer` returned.
        result: pointers to the partial output and lse, and the splits they have room for.
        rows: row numbers, their head in the lane, whether they are real queries, their positions, whether
            there is such a row at all; (R,) each.
        split: which one, of how many, and the tiles each has at least; of a balanced schedule its first tile and the
            one behind its last.
        span: first query's position, length, real queries, padding.
        limits: window, tokens kept in front of it, residual_len.
    """
    row, own_head, real, position, stored = rows
    start, kept_stop, middle, stop = visible_range(span, limits, SOURCE, C)
    tiles, kept_tiles, kept_first, rest_first = tiles_of_range(
        start, kept_stop, middle, stop, C.tile
    )
    if C.balanced and SOURCE == CODES:
        begin, end = split[0], split[1]
    else:
        begin, end = tiles_of_split(split[0], split[1], split[2], tiles)
    largest = tl.full((C.rows,), LOWEST, tl.float32)
    total = tl.full((C.rows,), 0.0, tl.float32)
    if begin < end:
        q, size = load_query(q_place[0], q_place[1], own_head, real, q_place[2], K)
        q, size = positive(q, size * (1.0 / (gain(K, C.ptx) * unit(K, C.ptx))))
        turned = _turned(q)
        if G is not None:
            q_geo, size_geo = load_query(g_place[0], g_place[1], own_head, real, g_place[2], G)
            q_geo, size_geo = positive(q_geo, size_geo * (1.0 / (gain(G, C.ptx) * unit(G, C.ptx))))
            turned_geo = _turned(q_geo)
        accumulators = _zeros(V, C)
        APART: tl.constexpr = apart(K, C)
        sums = total
        if APART is not None:
            sums = tl.full((APART[1], 8, C.rows), 0.0, tl.float32)
        # The tail and the sinks are a tile or two: no buffers for a pipeline of them.
        STAGES: tl.constexpr = None if SOURCE == CODES else 1
        for i in tl.range(begin, end, num_stages=STAGES):
            number = rest_first + i - kept_tiles
            if C.kept:
                number = tl.where(i < kept_tiles, kept_first + i, number)
            token = number * C.tile
            key = token + tl.arange(0, C.tile)
            used = (key >= middle) & (key < stop)
            if C.kept:
                used = used | ((key >= start) & (key < kept_stop))
            page, origin, slot, inside = place(token, key, used, table, slots, span[3], SOURCE, C)
            MASKED: tl.constexpr = C.masked or SOURCE != CODES
            logits = _scores(q, turned, k, page, origin, slot, inside, used, slots, K, MASKED, C)
            # Factors are above 0, so that the largest product makes the largest score: one multiply-add does the rest.
            FUSED: tl.constexpr = lean(C) and G is None and not C.softcap
            if not FUSED:
                logits *= size[None, :]
            if G is not None:
                other = _scores(
                    q_geo, turned_geo, g, page, origin, slot, inside, used, slots, G, MASKED, C
                )
                logits += other * size_geo[None, :]
            if C.softcap:
                logits = capped(logits, softcap, True) * LOG2E
            allowed = seen(
                position[None, :], real[None, :], key[:, None], span[3], limits, SOURCE, C
            )
            logits = tl.where(allowed, logits, float("-inf"))
            top = tl.max(logits, axis=0)
            larger = tl.maximum(largest, top * size if FUSED else top)
            if FUSED:
                p = tl.exp2(logits * size[None, :] - larger[None, :])
            else:
                p = tl.exp2(logits - larger[None, :])
            alpha = tl.exp2(largest - larger)
            if APART is not None:
                sums = sums * alpha[None, None, :] + _of_threads(p, APART[0], APART[1], APART[2])
            else:
                sums = sums * alpha + tl.sum(p, axis=0)
            largest = larger
            tile = tile_of(v, page, origin, slot, inside, used, slots, V, MASKED, True, C)
            accumulators = _weighted(accumulators, alpha, p.to(V.dot), tile, V, C)
        if APART is not None:
            total = tl.sum(tl.sum(sums, axis=0), axis=0)
        else:
            total = sums
        _store_partial(
            result[0], row, own_head, stored, accumulators, total, result[2], V, gain(V, C.ptx), C
        )
    lse = tl.where(
        total == 0.0, float("-inf"), largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    )
    tl.store(result[1] + row * result[2], lse, mask=stored)
