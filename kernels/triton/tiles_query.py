"""Queries as operands of ``tl.dot``, and how they are rotated.

The rows of a lane are the g * G * T queries of its g kv heads; a row has its query's values in the
columns of its own head and zeros in the others' (a block-diagonal Q), so that one product serves all
heads of a lane. In fp16 a row is divided by a power of two first, which costs nothing: the product is
multiplied by the softmax scale anyway.

Where K is rotated a kernel of its own rotates the queries, once for all splits (`caramba_fast.ops.hadamard`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .basis import hadamard
from .casts import from_float32, to_float32
from .tiles import halves, part_columns, parts_of

#: What a factor of scores is at least: the least float32 that is not subnormal.
LEAST = tl.constexpr(2.0**-126)


@triton.jit(do_not_specialize=["tokens"])
def prepare_kernel(
    q_ptr,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    out_ptr,
    tokens,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One query row -> the same in the basis of the keys, (B, H_q * T, D) float32."""
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, token = tl.cast(row // tokens, tl.int64), tl.cast(row % tokens, tl.int64)
    rows = tl.num_programs(0)
    q = q_ptr + batch * q_batch_stride + head * q_head_stride + token * q_token_stride
    dim = tl.arange(0, PADDED)
    inside = dim < DIM
    x = to_float32(tl.load(q + dim, mask=inside, other=0.0))
    x = tl.reshape(hadamard(x[None, :], DIM, PADDED), (PADDED,))
    tl.store(out_ptr + (batch * rows + row) * DIM + dim, x, mask=inside)


@triton.jit
def _query_part(q, source, own_head, real, part: tl.constexpr, S: tl.constexpr):
    column = part_columns(part, S)
    mask = (own_head[:, None] == (column // S.dim)[None, :]) & real[:, None]
    return to_float32(
        tl.load(q + source[:, None] + (column % S.dim)[None, :], mask=mask, other=0.0)
    )


@triton.jit
def _power_of_two(x):
    """The largest power of two up to x, from 2^-100 to 2^100, and one over it."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23), 227 << 23)
    inverse = (254 << 23) - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.constexpr_function
def room(stream):
    """What queries below 2 are multiplied by, so that a scale by channel makes them neither infinite nor subnormal."""
    if stream.group == 1:
        return 1.0
    return 2.0 if halves(stream.form) == 2 else 32.0


@triton.jit
def load_query(q, source, own_head, real, factor, S: tl.constexpr):
    """The parts of Q, (R, width of the part) each, and the factor (R,) of the scores.

    Args:
        q: pointer to the batch row's queries.
        source: (R,) offset of each row's query.
        own_head: (R,) which head of the lane a row belongs to.
        real: (R,) whether the row is a query at all.
    """
    wide = ()
    largest = tl.zeros(own_head.shape, tl.float32)
    for part in tl.static_range(parts_of(S)):
        x = _query_part(q, source, own_head, real, part, S)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
        wide += (x,)
    if S.dot == tl.float32:
        parts = wide
        size = tl.full(own_head.shape, 1.0, tl.float32)
    else:
        size, inverse = _power_of_two(largest)
        size, inverse = size * (1.0 / room(S)), inverse * room(S)
        parts = ()
        for part in tl.static_range(parts_of(S)):
            parts += (from_float32(wide[part] * inverse[:, None], S.dot),)
    return parts, size * factor


@triton.jit
def positive(q, size):
    """The same with a factor above 0: the queries take its sign, and 0 becomes the least number there is room for."""
    sign = tl.where(size < 0.0, -1.0, 1.0)
    parts = ()
    for part in tl.static_range(len(q)):
        parts += (q[part] * sign.to(q[part].dtype)[:, None],)
    return parts, tl.maximum(size * sign, LEAST, propagate_nan=tl.PropagateNan.ALL)
