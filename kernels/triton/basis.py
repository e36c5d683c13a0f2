"""The transforms of `caramba_fast.ops.transform` as device functions: phases, turning bias, Hadamard.

Used where keys are stored, and where a query meets them: both must read the same table of phases, so
that what append subtracts is exactly what attention adds back. Sums of products round twice, as in the
reference; kernels are launched with `EXACT`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from caramba_fast.ops.transform import PHASE_TILE

TILE = tl.constexpr(PHASE_TILE)
#: Bits of the widest head that can be rotated.
BITS = tl.constexpr(10)


@triton.jit
def phase(phases_ptr, rows, which, t):
    """cos and sin of pair ``which`` at tokens ``t`` (int32, any shape), by the angle-addition rule.

    phases (H_kv * P, rows, 2) contiguous: 128 in-tile angles, then one for each tile start. Tokens
    outside the table (padding) read its first or last angle.
    """
    t = tl.minimum(tl.maximum(t, 0), (rows - TILE) * TILE - 1)
    table = phases_ptr + which.to(tl.int64) * rows * 2
    inside = table + (t % TILE) * 2
    start = table + (TILE + t // TILE) * 2
    cos_in, sin_in = tl.load(inside), tl.load(inside + 1)
    cos_at, sin_at = tl.load(start), tl.load(start + 1)
    return cos_at * cos_in - sin_at * sin_in, sin_at * cos_in + cos_at * sin_in


@triton.jit
def turned(phases_ptr, rows, bias_ptr, which, t):
    """R_t b of pair ``which``: what its first and its second dim carry at tokens ``t``."""
    cos, sin = phase(phases_ptr, rows, which, t)
    first, second = tl.load(bias_ptr + which * 2), tl.load(bias_ptr + which * 2 + 1)
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def minus_bias(
    x, column, t, bias_ptr, pairs_ptr, phases_ptr, rows, first_head, heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """x (R, C) without the turning bias; column (1 or R, C) counts through HEADS heads of DIM.

    t (R, 1) are the rows' tokens; ``first_head`` is the head of column 0, ``heads`` how many there are.
    """
    for h in tl.static_range(HEADS):
        exists = first_head + h < heads
        head = tl.minimum(first_head + h, heads - 1)
        for p in tl.static_range(PAIRS):
            which = head * PAIRS + p
            first, second = turned(phases_ptr, rows, bias_ptr, which, t)
            i = tl.load(pairs_ptr + which * 2) + h * DIM
            j = tl.load(pairs_ptr + which * 2 + 1) + h * DIM
            # One after the other: an unused pair may name the same dim twice.
            x = tl.where((column == i) & exists, x - first, x)
            x = tl.where((column == j) & exists, x - second, x)
    return x


@triton.jit
def _sub_blocks(column, DIM: tl.constexpr):
    """The power of two each column of a head belongs to, largest first, and its index in there."""
    width = tl.full(column.shape, 1, tl.int32)
    inner = column % DIM
    for i in tl.static_range(BITS - 1, -1, -1):
        if DIM & (1 << i):
            start = DIM & -(2 << i)  # behind the wider powers of two
            here = column % DIM >= start
            width = tl.where(here, 1 << i, width)
            inner = tl.where(here, column % DIM - start, inner)
    return width, inner


@triton.jit
def hadamard(x, DIM: tl.constexpr):
    """x (M, N) float32: the orthonormal Walsh-Hadamard transform of each DIM neighbouring columns.

    Its own inverse. A width that is no power of two is cut into its powers of two (80 = 64 + 16); what is
    left of N after the last whole DIM holds nothing of use. As butterflies: the partner of a column is
    another thread's register, fetched by a shuffle, so there is no matrix to make and no shared memory.
    """
    column = tl.arange(0, x.shape[1])
    width, inner = _sub_blocks(column, DIM)
    for i in tl.static_range(BITS):
        if (1 << i) < DIM:
            upper = (inner & (1 << i)) != 0
            sign = tl.where(upper, -1.0, 1.0)
            if DIM & (DIM - 1):
                on = width > (1 << i)
                step = tl.where(upper, -(1 << i), 1 << i)
                partner = tl.minimum(column + tl.where(on, step, 0), x.shape[1] - 1)
                sign = tl.where(on, sign, 0.0)
            else:
                partner = column ^ (1 << i)
            other = tl.gather(x, tl.broadcast_to(partner[None, :], x.shape), 1)
            # Exact product, one rounding: the sum or the difference in one instruction.
            x = tl.fma(x, sign[None, :], other)
    norm = tl.div_rn(tl.full(width.shape, 1.0, tl.float32), tl.sqrt_rn(width.to(tl.float32)))
    return x * norm[None, :]
