"""The transforms of `caramba_fast.ops.transform` as device functions: phases, turning bias, Hadamard.

For kernels that store keys and for those that let a query meet them: both must read the same table of
phases, so that what append subtracts is exactly what attention adds back. Products and sums round one
by one, as in the reference, if the kernel is launched with `launch.EXACT`.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Tokens of one tile of the table of phases: its first rows, before one for each tile start.
PHASE_TILE = tl.constexpr(128)
#: Bits of the widest head that can be rotated.
WIDTH_BITS = tl.constexpr(10)


@triton.jit
def phase(phases_ptr, rows, which, t):
    """cos and sin of pair ``which`` at tokens ``t`` (int32, any shape), by the angle-addition rule.

    phases (H_kv * P, rows, 2) float32 contiguous: 128 in-tile angles, then one for each tile start.
    Tokens outside the table (padding) read its first or last angle. ``which`` is head * P + pair.
    """
    t = tl.minimum(tl.maximum(t, 0), (rows - PHASE_TILE) * PHASE_TILE - 1)
    table = phases_ptr + which.to(tl.int64) * rows * 2
    inside = table + (t % PHASE_TILE) * 2
    start = table + (PHASE_TILE + t // PHASE_TILE) * 2
    cos_in, sin_in = tl.load(inside), tl.load(inside + 1)
    cos_at, sin_at = tl.load(start), tl.load(start + 1)
    return cos_at * cos_in - sin_at * sin_in, sin_at * cos_in + cos_at * sin_in


@triton.jit
def turned_bias(phases_ptr, rows, bias_ptr, which, t):
    """R_t b of pair ``which``: what its first and its second dim carry at tokens ``t``.

    bias (H_kv * P, 2) float32 contiguous.
    """
    cos, sin = phase(phases_ptr, rows, which, t)
    first, second = tl.load(bias_ptr + which * 2), tl.load(bias_ptr + which * 2 + 1)
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def minus_bias(x, head, dim, t, exists, bias_ptr, pairs_ptr, phases_ptr, rows, PAIRS: tl.constexpr):
    """x (R, C) without the turning bias, for columns that are dims of one head or of several.

    dim is (1 or R, C); head and exists (whether the cache has that head) are (1, 1) or like dim; t (R, 1) are
    the rows' tokens; bias and phases as above, pairs (H_kv * P, 2) int32.
    """
    for p in tl.static_range(PAIRS):
        which = tl.where(exists, head, 0) * PAIRS + p
        first, second = turned_bias(phases_ptr, rows, bias_ptr, which, t)
        i = tl.where(exists, tl.load(pairs_ptr + which * 2), -1)
        j = tl.where(exists, tl.load(pairs_ptr + which * 2 + 1), -1)
        # One after the other: an unused pair may name a dim again.
        x = tl.where(dim == i, x - first, x)
        x = tl.where(dim == j, x - second, x)
    return x


@triton.jit
def _width_of(dim, DIM: tl.constexpr):
    """The power of two that each dim of a head belongs to, largest first (80 = 64 + 16)."""
    width = tl.full(dim.shape, 1, tl.int32)
    for i in tl.static_range(WIDTH_BITS - 1, -1, -1):
        if DIM & (1 << i):
            width = tl.where(dim >= (DIM & -(2 << i)), 1 << i, width)
    return width


@triton.jit
def _combined(x, other, dim, BIT: tl.constexpr, DIM: tl.constexpr):
    """x (M, N) plus ``other``, its partners at ``dim`` (N,) with BIT flipped; minus it where BIT is set."""
    sign = tl.where((dim & BIT) != 0, -1.0, 1.0)
    # The product is exact: a sum or a difference, rounded once.
    found = tl.fma(x, tl.broadcast_to(sign[None, :], x.shape), other)
    if DIM & (DIM - 1):
        # A power of two begins at a multiple of itself, so partners are in the same, or it is done.
        found = tl.where((_width_of(dim, DIM) > BIT)[None, :], found, x)
    return found


@triton.jit
def _shuffled(x, FLIP: tl.constexpr):
    """x (M, N) with the columns' bit FLIP flipped: from another thread of the warp, without shared memory."""
    index = tl.arange(0, x.shape[1]) ^ FLIP
    return tl.gather(x, tl.broadcast_to(index[None, :], x.shape), 1)


@triton.jit
def _normalized(x, dim, DIM: tl.constexpr):
    width = _width_of(dim, DIM).to(tl.float32)
    return x * tl.div_rn(tl.full(width.shape, 1.0, tl.float32), tl.sqrt_rn(width))[None, :]


@triton.jit
def hadamard(x, DIM: tl.constexpr, PAD: tl.constexpr):
    """x (M, N) float32: the orthonormal Walsh-Hadamard transform of heads of DIM, PAD columns each.

    Its own inverse. A width that is no power of two is cut into its powers of two (80 = 64 + 16). PAD is
    the power of two above DIM; what lies between is of no use. Butterflies: there is no matrix to make.
    """
    dim = tl.arange(0, x.shape[1]) % PAD
    for i in tl.static_range(WIDTH_BITS):
        if (1 << i) < DIM:
            x = _combined(x, _shuffled(x, 1 << i), dim, 1 << i, DIM)
    return _normalized(x, dim, DIM)


@triton.jit
def hadamard_halves(low, high, DIM: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr):
    """`hadamard` of columns that are dealt out, HALF to low (M, N), HALF to high, and so on."""
    column = tl.arange(0, low.shape[1])
    dim = (column // HALF * (2 * HALF) + column % HALF) % PAD
    for i in tl.static_range(WIDTH_BITS):
        if (1 << i) < DIM:
            if (1 << i) == HALF:
                other, others = high, low
            elif (1 << i) < HALF:
                other, others = _shuffled(low, 1 << i), _shuffled(high, 1 << i)
            else:
                other, others = _shuffled(low, 1 << i - 1), _shuffled(high, 1 << i - 1)
            low = _combined(low, other, dim, 1 << i, DIM)
            high = _combined(high, others, dim + HALF, 1 << i, DIM)
    return _normalized(low, dim, DIM), _normalized(high, dim + HALF, DIM)
