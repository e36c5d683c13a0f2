"""The rotation of `caramba_fast.ops.hadamard` as device functions.

For kernels that store keys and values, for those that let a query meet keys, and for those that turn outputs back.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Bits of the widest head that can be rotated.
WIDTH_BITS = tl.constexpr(10)


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
