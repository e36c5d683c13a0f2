"""New tokens as they are stored, but for the format: read once, turned by RoPE, put into lanes, rotated.

RoPE turns pairs of a head's halves by the angle of their token (`apply_rotary_emb`), where a cache's option says so;
"rotated" means the Hadamard basis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .basis import hadamard, hadamard_halves
from .casts import from_float32, to_float32


@triton.jit
def rounded(x, like):
    """x as ``like``'s type holds it, in float32."""
    return to_float32(from_float32(x, like.dtype.element_ty))


@triton.jit
def turned(x, source, step, table, s, L: tl.constexpr, dim, mask):
    """x (R, C) by RoPE: ``source`` is where x lies, ``step`` from one value to the next, ``table`` of its angles."""
    HALF: tl.constexpr = L.DIM // 2
    first = dim < HALF
    other = to_float32(
        tl.load(source + tl.where(first, HALF, -HALF).to(tl.int64) * step, mask=mask, other=0.0)
    )
    angle = dim if L.ROTARY == L.DIM else dim % HALF
    cos = to_float32(tl.load(s.cos + table + angle, mask=mask, other=0.0))
    sin = to_float32(tl.load(s.sin + table + angle, mask=mask, other=0.0))
    other = tl.where(first, -other, other)
    return rounded(rounded(x * cos, s.new) + rounded(other * sin, s.new), s.new)


@triton.jit
def new_values(s, L: tl.constexpr, b, lane, heads, token, there, column, WIDTH: tl.constexpr):
    """(R, C) float32: what is stored, but for the rotation; zeros where no head is.

    token and there are (R, 1); column (1 or R, C) of a lane whose heads take WIDTH columns each.
    """
    dim = column % WIDTH
    if L.HEADS == 1:
        head = tl.zeros((1, 1), tl.int32) + lane
    else:
        head = lane * L.HEADS + column // WIDTH
    exists = head < heads
    if WIDTH > L.DIM:
        exists = exists & (dim < L.DIM)
    source = s.new + b * s.new_row + token.to(tl.int64) * s.new_token
    source = source + head.to(tl.int64) * s.new_head
    if s.new_dim is None:
        source = source + dim
    else:
        source = source + dim.to(tl.int64) * s.new_dim
    x = to_float32(tl.load(source, mask=there & exists, other=0.0))
    if L.ROTARY > 0:
        table = b * s.cos_row + token.to(tl.int64) * L.ROTARY
        step = 1 if s.new_dim is None else s.new_dim
        x = turned(x, source, step, table, s, L, dim, there & exists)
    return x


@triton.jit
def _picked(x, L: tl.constexpr, first, SIZE: tl.constexpr):
    """x (tokens, N), PAD columns a head -> (tokens * STRIDE, SIZE): of each block, values from ``first`` on."""
    place = tl.arange(0, L.STRIDE * SIZE)
    value = place // SIZE * L.BLOCK + place % SIZE + first
    column = tl.minimum(value // L.DIM * L.PAD + value % L.DIM, x.shape[1] - 1)
    index = tl.broadcast_to(column[None, :], (x.shape[0], L.STRIDE * SIZE))
    return tl.reshape(tl.gather(x, index, 1), (x.shape[0] * L.STRIDE, SIZE))


@triton.jit
def rotated_blocks(s, L: tl.constexpr, b, lane, heads, token, there):
    """Like `blocks`, of whole tokens (N, 1): (N * STRIDE, values of a block)."""
    ROWS: tl.constexpr = token.shape[0] * L.STRIDE
    HALF: tl.constexpr = L.BLOCK // 2
    if L.HEADS > 1 and L.PAD > L.DIM:
        # Heads are spread out, so that each begins at a multiple of its powers of two.
        column = tl.arange(0, L.SPREAD)[None, :]
        there = there & (column < L.HEADS * L.PAD)
        x = new_values(s, L, b, lane, heads, token, there, column, L.PAD)
        x = hadamard(x, L.DIM, L.PAD)
        if L.BITS == 4:
            low, high = _picked(x, L, 0, HALF), _picked(x, L, HALF, HALF)
        else:
            low = _picked(x, L, 0, L.BLOCK)
            high = low
    elif L.BITS == 4:
        place = tl.arange(0, L.STRIDE * HALF)[None, :]
        column = place // HALF * L.BLOCK + place % HALF
        there = there & (column < L.BLOCKS * L.BLOCK)
        low = new_values(s, L, b, lane, heads, token, there, column, L.PAD)
        high = new_values(s, L, b, lane, heads, token, there, column + HALF, L.PAD)
        low, high = hadamard_halves(low, high, L.DIM, L.PAD, HALF)
        low, high = tl.reshape(low, (ROWS, HALF)), tl.reshape(high, (ROWS, HALF))
    else:
        column = tl.arange(0, L.STRIDE * L.BLOCK)[None, :]
        there = there & (column < L.BLOCKS * L.BLOCK)
        x = new_values(s, L, b, lane, heads, token, there, column, L.PAD)
        low = tl.reshape(hadamard(x, L.DIM, L.PAD), (ROWS, L.BLOCK))
        high = low
    return low, high


@triton.jit
def blocks(s, L: tl.constexpr, b, lane, heads, token, there, block):
    """What is stored of blocks (R,) of tokens (R,): for 4 bits in halves, else whole, and twice."""
    token, there, column = token[:, None], there[:, None], block[:, None] * L.BLOCK
    if L.BITS == 4:
        HALF: tl.constexpr = L.BLOCK // 2
        column = column + tl.arange(0, HALF)[None, :]
        low = new_values(s, L, b, lane, heads, token, there, column, L.DIM)
        high = new_values(s, L, b, lane, heads, token, there, column + HALF, L.DIM)
    else:
        column = column + tl.arange(0, L.BLOCK)[None, :]
        low = new_values(s, L, b, lane, heads, token, there, column, L.DIM)
        high = low
    return low, high
