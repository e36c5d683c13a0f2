"""Queries as operands of ``tl.dot``, and what the transforms of K make of them.

The rows of a lane are the g * G * T queries of its g kv heads; a row has its query's values in the
columns of its own head and zeros in the others' (a block-diagonal Q), so that one product serves all
heads of a lane. In fp16 a row is divided by a power of two first, which costs nothing: the product is
multiplied by the softmax scale anyway.

Where K is transformed a kernel of its own prepares the queries, once for all splits: ``H (q * scale)``
and the coefficients of what centering took out of the logits (`caramba_fast.ops.transform`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .basis import PHASE_TILE, hadamard
from .casts import from_float32, to_float32
from .tiles import part_columns, parts_of


@triton.jit
def prepare_kernel(
    q_ptr,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    mean_ptr,
    bias_ptr,
    pairs_ptr,
    scale_ptr,
    out_ptr,
    coefficients_ptr,
    factor,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """One query row -> its transform (B, H_q * T, D), and 1 + 2 P coefficients times ``factor``.

    Coefficients: q · mean, then A_p, then B_p (see docs/transforms.md).
    """
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, rows = row // TOKENS, tl.num_programs(0)
    kv = head // GROUPS
    q = q_ptr + batch * q_batch_stride + head * q_head_stride + row % TOKENS * q_token_stride
    dim = tl.arange(0, PADDED)
    inside = dim < DIM
    x = to_float32(tl.load(q + dim, mask=inside, other=0.0))
    coefficients = coefficients_ptr + (batch * rows + row) * (1 + 2 * PAIRS)
    constant = 0.0
    if mean_ptr is not None:
        constant = tl.sum(x * tl.load(mean_ptr + kv * DIM + dim, mask=inside, other=0.0))
    tl.store(coefficients, constant * factor)
    for p in tl.static_range(PAIRS):
        at = (kv * PAIRS + p) * 2
        first = to_float32(tl.load(q + tl.load(pairs_ptr + at)))
        second = to_float32(tl.load(q + tl.load(pairs_ptr + at + 1)))
        b1, b2 = tl.load(bias_ptr + at), tl.load(bias_ptr + at + 1)
        tl.store(coefficients + 1 + p, (first * b1 + second * b2) * factor)
        tl.store(coefficients + 1 + PAIRS + p, (second * b1 - first * b2) * factor)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr + kv * DIM + dim, mask=inside, other=0.0)
    if ROTATE:
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
        parts = ()
        for part in tl.static_range(parts_of(S)):
            parts += (from_float32(wide[part] * inverse[:, None], S.dot),)
    return parts, size * factor


# -- what centering took out --------------------------------------------------------------------


@triton.jit
def _table_row(phases, index, valid):
    """cos and sin of one row of the table for each coefficient."""
    return (
        tl.load(phases + index * 2, mask=valid, other=0.0),
        tl.load(phases + index * 2 + 1, mask=valid, other=0.0),
    )


@triton.jit
def _harmonic(lane, S: tl.constexpr, C: tl.constexpr):
    """Of each harmonic of a lane: whether it is a sine, its pair, its head, and whether it exists.

    The first half are the cosines of each pair of each head of the lane, the second half the sines.
    """
    number = tl.arange(0, S.harmonics)
    pair = number % (S.harmonics // 2)
    head = lane * C.per_lane + pair // S.pairs
    valid = (pair < C.per_lane * S.pairs) & (head < C.heads)
    return number >= S.harmonics // 2, pair, head, valid


@triton.jit
def _phases(phases_ptr, table, pair, head, S: tl.constexpr):
    return phases_ptr + (head * S.pairs + pair % S.pairs) * table * 2


@triton.jit
def _split(x, S: tl.constexpr):
    """x as operands of a product: float32, or two fp16 that add up to 22 bits of it."""
    parts = ()
    if S.dot == tl.float32:
        parts += (x,)
    else:
        high = x.to(tl.float16)
        parts += (high, (x - high.to(tl.float32)).to(tl.float16))
    return parts


@triton.jit
def harmonics(phases_ptr, table, lane, S: tl.constexpr, C: tl.constexpr):
    """cos and sin of the angles from a tile's first token to each of its tokens: `_split` (tile, harmonics)."""
    sine, pair, head, valid = _harmonic(lane, S, C)
    phases = _phases(phases_ptr, table, pair, head, S) + sine.to(tl.int32)
    token = tl.arange(0, C.tile) * 2
    return _split(tl.load(phases[None, :] + token[:, None], mask=valid[None, :], other=0.0), S)


@triton.jit
def load_coefficients(coefficients, row, own_head, real, S: tl.constexpr, C: tl.constexpr):
    """A and B of each row, and B and -A, divided by the power of two (R,) that comes last.

    Both are (R, harmonics) float32, with zeros in the columns of other heads.
    """
    sine, pair, _, _ = _harmonic(0, S, C)
    mask = (own_head[:, None] == (pair // S.pairs)[None, :]) & real[:, None]
    mask = mask & (pair < C.per_lane * S.pairs)[None, :]
    source = coefficients + (row * (1 + 2 * S.pairs))[:, None] + 1
    own = tl.load(
        source + (pair % S.pairs + tl.where(sine, S.pairs, 0))[None, :], mask=mask, other=0.0
    )
    other = tl.load(
        source + (pair % S.pairs + tl.where(sine, 0, S.pairs))[None, :], mask=mask, other=0.0
    )
    size, inverse = _power_of_two(tl.max(tl.abs(own), axis=1))
    other = tl.where(sine[None, :], -other, other)
    return own * inverse[:, None], other * inverse[:, None], size


@triton.jit
def waves_at(coefficients, angles, phases_ptr, table, lane, t, S: tl.constexpr, C: tl.constexpr):
    """What centering took out of the logits of the tile that begins at token t: (tile, R) float32.

    A cos(a + b) + B sin(a + b) = (A cos a + B sin a) cos b + (B cos a - A sin a) sin b, where a is the angle of
    token t, from the table's two levels: the rows' coefficients are turned, which are fewer than the tile's
    ``angles``. ``t`` may be negative, for tiles that begin in the padding.
    """
    _, pair, head, valid = _harmonic(lane, S, C)
    phases = _phases(phases_ptr, table, pair, head, S)
    ahead = tl.abs(t)
    c, s = _table_row(phases, PHASE_TILE + ahead // PHASE_TILE, valid)
    c1, s1 = _table_row(phases, ahead % PHASE_TILE, valid)
    cos, sin = c * c1 - s * s1, s * c1 + c * s1
    sin = tl.where(t < 0, -sin, sin)
    x = _split(tl.trans(coefficients[0] * cos[None, :] + coefficients[1] * sin[None, :]), S)
    wave = tl.dot(angles[0], x[0], input_precision=C.precision)
    if S.dot != tl.float32:
        wave = tl.dot(angles[0], x[1], wave)
        wave = tl.dot(angles[1], x[0], wave)
    return wave * coefficients[2][None, :]
