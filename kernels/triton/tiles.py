"""A tile of cached tokens as operands of ``tl.dot``: loading, unpacking and scaling, per format.

A lane of W values is cut into *segments*, powers of two that add up to W (160 = 128 + 32), and a
segment of a 4-bit format into two *parts*: the low nibbles and the high nibbles, so that a byte is
loaded once and meets two halves of the query. Everything that holds a lane's values (queries, keys,
values, accumulators) is a tuple of such parts; `part_columns` says which values a part holds.

Codes of slots nobody has written are loaded and unpacked like any other: keys are masked in the
scores, values by a scale (or a value) of 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .casts import from_float32, to_float32
from .formats import NF4, Q4_0, Q8_0, decode_bytes, decode_nibbles
from .tiles_asm import NF4_HALF, NF4_HALF_GAIN, Q4_HALF, Q8_HALF

HALF_GAIN = tl.constexpr(NF4_HALF_GAIN)
Q8_ASM, Q4_ASM, NF4_ASM = tl.constexpr(Q8_HALF), tl.constexpr(Q4_HALF), tl.constexpr(NF4_HALF)


@triton.jit
def halves(FORMAT: tl.constexpr):
    """Parts of one segment."""
    return 2 if FORMAT == Q4_0 or FORMAT == NF4 else 1


@triton.jit
def parts_of(S: tl.constexpr):
    """Parts of a lane."""
    return len(S.segments) * halves(S.form)


@triton.jit
def gain(S: tl.constexpr, PTX: tl.constexpr):
    """What unpacked values are multiplied by besides their scale; the caller divides it out."""
    return HALF_GAIN if PTX and S.dot == tl.float16 and S.form == NF4 else 1.0


@triton.jit
def part_columns(part: tl.constexpr, S: tl.constexpr):
    """The positions in the lane of a part's values."""
    if halves(S.form) == 2:
        byte = tl.arange(0, S.segments[part // 2][1] // 2)
        column = byte // (S.block // 2) * S.block + byte % (S.block // 2)
        column = S.segments[part // 2][0] + part % 2 * (S.block // 2) + column
    else:
        column = S.segments[part][0] + tl.arange(0, S.segments[part][1])
    return column


@triton.jit
def _scaled(x, scale, DOT: tl.constexpr):
    """x (N, w) times scale (N, blocks of the segment), in DOT's arithmetic."""
    blocks: tl.constexpr = scale.shape[1]
    wide = tl.reshape(x, (x.shape[0], blocks, x.shape[1] // blocks))
    return tl.reshape(wide * scale.to(DOT)[:, :, None], x.shape)


@triton.jit
def _scaled_offset(x, scale):
    """(x - 1) times scale in fp16: one multiply-add, for the constant is the scale itself."""
    blocks: tl.constexpr = scale.shape[1]
    wide = tl.reshape(x, (x.shape[0], blocks, x.shape[1] // blocks))
    factor = tl.broadcast_to(scale[:, :, None], wide.shape)
    return tl.reshape(tl.fma(wide, factor, -factor), x.shape)


@triton.jit
def _unpacked_bytes(codes, scale, DOT: tl.constexpr, PTX: tl.constexpr):
    """codes (N, w) int8 -> values (N, w)."""
    if PTX and DOT == tl.float16:
        x = tl.inline_asm_elementwise(Q8_ASM, "=r,=r,r", [codes], tl.float16, True, 4)
        value = _scaled(x, scale, DOT)
    else:
        value = from_float32(_scaled(decode_bytes(codes, Q8_0), scale, tl.float32), DOT)
    return value


@triton.jit
def _unpacked_nibbles(codes, scale, FORMAT: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """codes (N, w / 2) uint8 -> values of the low and of the high nibbles, (N, w / 2) each."""
    if PTX and DOT == tl.float16:
        if FORMAT == Q4_0:
            low, high = tl.inline_asm_elementwise(Q4_ASM, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), True, 4)
        else:
            low, high = tl.inline_asm_elementwise(NF4_ASM, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), True, 4)
        if FORMAT == Q4_0:
            low, high = _scaled(low - 1032.0, scale, DOT), _scaled(high - 1032.0, scale, DOT)
        else:
            low, high = _scaled_offset(low, scale), _scaled_offset(high, scale)
    else:
        low, high = decode_nibbles(codes, FORMAT, PTX)
        low = from_float32(_scaled(low, scale, tl.float32), DOT)
        high = from_float32(_scaled(high, scale, tl.float32), DOT)
    return low, high


@triton.jit
def _loaded(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(pointers, mask=mask, other=0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def _segment(
    codes,
    scales,
    slot,
    inside,
    used,
    S: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    PTX: tl.constexpr,
    MASKED: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One segment of a tile: a tuple of its parts."""
    PER_BYTE: tl.constexpr = halves(S.form)
    column = START // PER_BYTE + tl.arange(0, SIZE // PER_BYTE)
    source = codes + slot[:, None] * (S.width // PER_BYTE) + column[None, :]
    wanted = used if VALUES else inside
    if S.form < Q8_0:
        x = _loaded(source, wanted[:, None], MASKED or VALUES)
        if x.dtype == S.dot:
            parts = (x,)
        else:
            parts = (from_float32(to_float32(x), S.dot),)
    else:
        x = _loaded(source, inside[:, None], MASKED)
        block = START // S.block + tl.arange(0, SIZE // S.block)
        at = scales + slot[:, None] * (S.width // S.block) + block[None, :]
        scale = _loaded(at, wanted[:, None], MASKED or VALUES)
        if S.form == Q8_0:
            parts = (_unpacked_bytes(x, scale, S.dot, PTX),)
        else:
            parts = _unpacked_nibbles(x, scale, S.form, S.dot, PTX)
    return parts


@triton.jit
def load_tile(
    codes,
    scales,
    slot,
    inside,
    used,
    S: tl.constexpr,
    PTX: tl.constexpr,
    MASKED: tl.constexpr,
    VALUES: tl.constexpr,
):
    """The parts of a tile of tokens, (N, width of the part) each, of dtype ``S.dot``.

    Args:
        codes, scales: pointers to where slots are counted from.
        slot: (N,) slots of the tokens.
        inside: (N,) whether a slot exists; looked at only if MASKED.
        used: (N,) whether a query may see the token; what is not used becomes 0 if VALUES.
    """
    parts = ()
    for i in tl.static_range(len(S.segments)):
        parts = parts + _segment(
            codes, scales, slot, inside, used, S, S.segments[i][0], S.segments[i][1], PTX, MASKED, VALUES
        )
    return parts
