"""The split-KV attention kernel: one program reads one split of one lane, once, and leaves a partial result.

Standard and decoupled attention, contiguous and paged caches, the tail, the sinks and every mix of formats
are this one kernel, and so are a few queries of all heads (decode) and blocks of a prompt's (extend).
A key stream is described by a `tiles_layout.Stream`, the second one of decoupled
attention (``g``) like the first; what a call does not use is None and leaves no code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .splits import CODES, SINKS, TAIL, row_span
from .tiles_attend import attend
from .tiles_extend import extend, rows_of_block


@triton.jit
def _lane(stream, batch, lane):
    """Pointers to the codes and scales of a lane's slot 0, and their strides of pages.

    Triton 3.6 cannot return None: without scales the codes stand in, and are not looked at.
    """
    lane = lane.to(tl.int64)
    codes = stream[0] + (batch * stream[2] + lane * stream[3])
    scales = codes
    if stream[1] is not None:
        scales = stream[1] + (batch * stream[4] + lane * stream[5])
    return codes, scales, stream[2], stream[4]


@triton.jit
def _buffer(buffer, batch, lane, lanes, size, S: tl.constexpr):
    """The same for a tail or sinks, (B, lanes, size, width) contiguous."""
    values = buffer + (batch * lanes + lane) * size * S.width
    return values, values, 0, 0


@triton.jit
def _attend(
    q, q_geo, k, g, v, table, result, rows, split, span, limits, slots, softcap, SOURCE: tl.constexpr, K: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    if C.extend:
        extend(q, q_geo, k, g, v, table, result, rows, split, span, limits, slots, softcap,
               SOURCE, K, G, V, C)  # fmt: skip
    else:
        attend(q, q_geo, k, g, v, table, result, rows, split, span, limits, slots, softcap,
               SOURCE, K, G, V, C)  # fmt: skip


@triton.jit
def rows_of_lane(number, batch, lengths, C: tl.constexpr):
    """Part ``number`` of the queries of all lanes, C.rows of one lane's; returns as `rows_of_block`, from head 0 on."""
    PER_KV: tl.constexpr = C.groups * C.tokens
    PIECES: tl.constexpr = (C.per_lane * PER_KV + C.rows - 1) // C.rows
    ALL: tl.constexpr = C.heads * PER_KV
    lane = number // PIECES
    inner = number % PIECES * C.rows + tl.arange(0, C.rows)
    row = lane * (C.per_lane * PER_KV) + inner
    span = row_span(batch, lengths[0], lengths[1], lengths[2], C.tokens)
    token = row % C.tokens
    real = (inner < C.per_lane * PER_KV) & (row < ALL) & (token < span[2])
    stored = (inner < C.per_lane * PER_KV) & (row < ALL)
    rows = (row, inner // PER_KV, real, span[0] + token, stored)
    return lane, 0, 0, rows, span


@triton.jit
def place_of(query, batch, head, first, row, C: tl.constexpr):
    """Pointer to the queries, (R,) offsets of the rows, and the factor of their scores."""
    pointer = query[0] + batch * query[1]
    if C.extend:
        pointer += head * query[2] + first * query[3]
        offset = row * query[3]
    else:
        offset = row // C.tokens * query[2] + row % C.tokens * query[3]
    return pointer, offset, query[4]


@triton.jit
def codes_split(
    streams,
    table,
    table_stride,
    batch,
    lane,
    q,
    q_geo,
    result,
    rows,
    split,
    span,
    limits,
    slots,
    softcap,
    K: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
):
    """A split of the codes. Pages have no batch dimension; the block table finds them."""
    first = batch
    if C.page > 0:
        table += batch * table_stride
        first = batch * 0
    k, v = _lane(streams[0], first, lane), _lane(streams[2], first, lane)
    if G is None:
        g = None
    else:
        g = _lane(streams[1], first, lane)
    _attend(q, q_geo, k, g, v, table, result, rows, split, span, limits, slots, softcap,
            CODES, K, G, V, C)  # fmt: skip


@triton.constexpr_function
def side_of(shape):
    """`Shape.side`."""
    return shape.side


@triton.jit
def side_split(
    buffers,
    size,
    SOURCE: tl.constexpr,
    batch,
    lane,
    q,
    q_geo,
    result,
    rows,
    span,
    limits,
    softcap,
    K: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
):
    """The tail, or the sinks: one split of fp16 values."""
    LANES: tl.constexpr = (C.heads + C.per_lane - 1) // C.per_lane
    k, v = (
        _buffer(buffers[0], batch, lane, LANES, size, K),
        _buffer(buffers[2], batch, lane, LANES, size, V),
    )
    if G is None:
        g = None
    else:
        g = _buffer(buffers[1], batch, lane, LANES, size, G)
    _attend(q, q_geo, k, g, v, None, result, rows, (0, 1, 1), span, limits, size, softcap,
            SOURCE, K, G, V, side_of(C))  # fmt: skip


# What grows with a cache, or with the batch, is no reason to compile again: in the middle of a generation that takes
# seconds. Tuples are always specialized on, so none of it may be in one.
@triton.jit(
    do_not_specialize=[
        "table_stride",
        "window",
        "kept",
        "residual",
        "slots",
        "ring",
        "splits",
        "least",
        "tokens",
    ]
)
def partials_kernel(
    queries,
    streams,
    tails,
    sinks,
    lengths,
    table_ptr,
    table_stride,
    partial_ptr,
    lse_ptr,
    window,
    kept,
    residual,
    slots,
    ring,
    splits,
    least,
    tokens,
    softcap,
    K: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    K_SIDE: tl.constexpr,
    G_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """Grid: splits, then the tail and the sinks if there are any; lanes * row groups, in extend blocks of
    queries; B.

    Args:
        queries: pointer, strides of B, H and T, and factor of the first key stream's; then the second's.
        streams: k, g and v: pointers to codes and scales, and of each the strides of B and of lanes.
        tails, sinks: pointers of k, g and v, contiguous.
        lengths: pointers to cache_seqlens, cache_leftpad and query_lens.
        partial_ptr, lse_ptr: (B, H_q * T, programs of the first axis, D_v) and without D_v, float32.
        window, kept, residual: the window, tokens kept in front of it, residual_len.
        slots, ring: of a contiguous cache, and of the tail.
        tokens: T, which decode is specialized for.
    """
    limits = (window, kept, residual)
    split, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    number, in_all = tl.program_id(1), tl.num_programs(0)
    if C.extend:
        lane, head, first, rows, span = rows_of_block(number, batch, lengths, tokens, C)
        origin = (batch * (C.heads * C.groups * tokens) + head * tokens + first) * in_all
    else:
        lane, head, first, rows, span = rows_of_lane(number, batch, lengths, C)
        origin = batch * (C.heads * C.groups * C.tokens * in_all)
    q = place_of(queries, batch, head, first, rows[0], C)
    q_geo = (None, None, None)
    if G is not None:
        q_geo = place_of(queries[5:], batch, head, first, rows[0], C)
    result = (
        partial_ptr + origin * V.dim + split * V.dim,
        lse_ptr + origin + split,
        in_all,
    )
    if split < splits:
        part = (split, splits, least)
        codes_split(streams, table_ptr, table_stride, batch, lane, q, q_geo, result, rows, part,
               span, limits, slots, softcap, K, G, V, C)  # fmt: skip
    elif C.tail and split == splits:
        side_split(tails, ring, TAIL, batch, lane, q, q_geo, result, rows, span, limits, softcap,
              K_SIDE, G_SIDE, V_SIDE, C)  # fmt: skip
    elif C.sink_len > 0:
        side_split(sinks, C.sink_len, SINKS, batch, lane, q, q_geo, result, rows, span, limits,
              softcap, K_SIDE, G_SIDE, V_SIDE, C)  # fmt: skip
