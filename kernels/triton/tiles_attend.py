"""One split of one lane: the loop over tiles that every variant of decode attention shares.

Scores are K · Q^T and the output is V^T · P, so that tokens are the long side of both products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import Q8_0
from .merge_splits import LOG2E, capped
from .splits import CODES, TAIL, seen, tiles_of_range, tiles_of_split, visible_range
from .tiles import gain, halves, load_tile, part_columns, parts_of
from .tiles_channel import channel_scores, channel_values, unit
from .tiles_query import load_query


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
        tile = load_tile(codes, scales, slot, inside, used, S, C.ptx, MASKED, VALUES)
    return tile


@triton.jit
def _scores(
    q, turned, size, stream, page, origin, slot, inside, used, slots, S, MASKED, C: tl.constexpr
):
    """(N, R) scores of a tile of one key stream."""
    if S.group > 1 and S.dot != tl.float32:
        codes = stream[0] + page * stream[2] + origin * (S.width // halves(S.form))
        scales = stream[1] + page * stream[3]
        scores = channel_scores(
            q, turned, size, codes, scales, origin, slot, inside, slots, S, MASKED, C
        )
    else:
        tile = tile_of(stream, page, origin, slot, inside, used, slots, S, MASKED, False, C)
        scores = _products(q, tile, C) * size[None, :]
    return scores


@triton.jit
def _turned(q):
    """The parts of the queries, transposed: once, and not in every tile."""
    parts = ()
    for part in tl.static_range(len(q)):
        parts += (tl.trans(q[part]),)
    return parts


@triton.jit
def _products(q, k, C: tl.constexpr):
    """K · Q^T over the parts of a lane: (N, R) float32."""
    total = tl.dot(k[0], tl.trans(q[0]), input_precision=C.precision)
    for part in tl.static_range(1, len(q)):
        total = tl.dot(k[part], tl.trans(q[part]), total, input_precision=C.precision)
    return total


@triton.jit
def _weighted(accumulators, alpha, p, v, C: tl.constexpr):
    """Each part's accumulator times alpha, plus P · V."""
    found = ()
    for part in tl.static_range(len(v)):
        scaled = accumulators[part] * alpha[None, :]
        found += (tl.dot(tl.trans(v[part]), p, scaled, input_precision=C.precision),)
    return found


@triton.jit
def _zero_part(column, C: tl.constexpr):
    return tl.full((column.shape[0], C.rows), 0.0, tl.float32)


@triton.jit
def _zeros(S: tl.constexpr, C: tl.constexpr):
    parts = ()
    for part in tl.static_range(parts_of(S)):
        parts += (_zero_part(part_columns(part, S), C),)
    return parts


@triton.jit
def _store_partial(
    partial, row, own_head, real, accumulators, total, splits, S: tl.constexpr, GAIN
):
    """Each row's columns of its own head, divided by the row's sum."""
    factor = tl.where(total == 0.0, 0.0, 1.0 / (tl.where(total == 0.0, 1.0, total) * GAIN))
    for part in tl.static_range(parts_of(S)):
        column = part_columns(part, S)
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
    largest = tl.full((C.rows,), float("-inf"), tl.float32)
    total = tl.full((C.rows,), 0.0, tl.float32)
    if begin < end:
        q, size = load_query(q_place[0], q_place[1], own_head, real, q_place[2], K)
        turned = _turned(q)
        size *= 1.0 / (gain(K, C.ptx) * unit(K, C.ptx))
        if G is not None:
            q_geo, size_geo = load_query(g_place[0], g_place[1], own_head, real, g_place[2], G)
            turned_geo = _turned(q_geo)
            size_geo *= 1.0 / (gain(G, C.ptx) * unit(G, C.ptx))
        accumulators = _zeros(V, C)
        # Where registers allow it, weights of a tile's tokens are summed apart and added up in the end.
        APART: tl.constexpr = K.group > 1 and K.dot != tl.float32
        sums = total
        if APART:
            sums = tl.full((C.tile, C.rows), 0.0, tl.float32)
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
            logits = _scores(
                q, turned, size, k, page, origin, slot, inside, used, slots, K, MASKED, C
            )
            if G is not None:
                logits += _scores(
                    q_geo,
                    turned_geo,
                    size_geo,
                    g,
                    page,
                    origin,
                    slot,
                    inside,
                    used,
                    slots,
                    G,
                    MASKED,
                    C,
                )
            if C.softcap:
                logits = capped(logits, softcap, True) * LOG2E
            allowed = seen(
                position[None, :], real[None, :], key[:, None], span[3], limits, SOURCE, C
            )
            logits = tl.where(allowed, logits, float("-inf"))
            larger = tl.maximum(largest, tl.max(logits, axis=0))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            p = tl.exp2(logits - base[None, :])
            alpha = tl.exp2(largest - base)
            if APART:
                sums = sums * alpha[None, :] + p
            else:
                sums = sums * alpha + tl.sum(p, axis=0)
            largest = larger
            tile = tile_of(v, page, origin, slot, inside, used, slots, V, MASKED, True, C)
            accumulators = _weighted(accumulators, alpha, p.to(V.dot), tile, C)
        total = tl.sum(sums, axis=0) if APART else sums
        _store_partial(
            result[0], row, own_head, stored, accumulators, total, result[2], V, gain(V, C.ptx)
        )
    lse = tl.where(
        total == 0.0, float("-inf"), largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    )
    tl.store(result[1] + row * result[2], lse, mask=stored)
