"""A tile of cached tokens as operands of ``tl.dot``: loading, unpacking and scaling, per format.

A lane of W values is cut into *segments*, powers of two that add up to W (160 = 128 + 32), and a
segment of a 4-bit format into two *parts*: the low nibbles and the high nibbles, so that a byte is
loaded once and meets two halves of the query. Everything that holds a lane's values (queries, keys,
values, accumulators) is a tuple of such parts; `part_columns` says which values a part holds.

Codes of slots nobody has written are loaded and unpacked like any other: keys are masked in the
scores, values by a scale (or a value) of 0.

Where fp16 is enough and PTX can be used, codes are unpacked in packed registers (tiles_asm): keys two
bytes at a time, because in the layout in which they enter the product a thread holds two neighbours;
values as words of four bytes, because bytes would be taken apart and put together again on their way
through registers (docs/kernels.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .casts import from_float32, to_float32
from .formats import NF4, Q8_0, decode_bytes, decode_nibbles
from .tiles_asm import (
    NF4_HALF_GAIN,
    NF4_PAIR,
    NF4_WORD,
    Q4_PAIR,
    Q4_WORD,
    Q8_PAIR,
    Q8_WORD,
)
from .tiles_layout import FORMATS_OF_NIBBLES, LEAST_ROWS, by_words
from .tiles_words import each_word, load_words, loaded, word_columns

#: By the format's index.
PAIR = tl.constexpr((None, None, None, Q8_PAIR, Q4_PAIR, NF4_PAIR))
WORD = tl.constexpr((None, None, None, Q8_WORD, Q4_WORD, NF4_WORD))

# Triton 3.6 makes a tensor of a number that a jitted function returns; these stay numbers.


@triton.constexpr_function
def halves(form):
    """Parts of one segment; values of one byte."""
    return 2 if form in FORMATS_OF_NIBBLES else 1


@triton.constexpr_function
def parts_of(stream):
    """Parts of a lane."""
    return len(stream.segments) * halves(stream.form)


@triton.constexpr_function
def lean(shape):
    """Whether a tile is read in the way that takes the fewest instructions where there is PTX.

    It takes more on AMD, and spills on Blackwell (two warps) with a Triton before 3.9.
    """
    return shape.ptx and (LEAST_ROWS == 8 or shape.warps != 2)


@triton.constexpr_function
def joined(stream, shape):
    """Whether both halves of a segment's values are one operand: where they are unpacked as words, in decode."""
    return (
        lean(shape)
        and not shape.extend
        and shape.rows <= 32
        and shape.warps > 1
        and stream.dot == tl.float16
        and stream.group == 1
        and halves(stream.form) == 2
    )


@triton.constexpr_function
def value_parts_of(stream, shape):
    """Parts of a lane's values: segments where halves are `joined`, and more of them by words."""
    if by_words(stream, shape):
        return len(stream.segments) * each_word(stream)
    return len(stream.segments) if joined(stream, shape) else parts_of(stream)


@triton.constexpr_function
def gain(stream, ptx):
    """What unpacked values are multiplied by besides their scale; the caller divides it out."""
    return NF4_HALF_GAIN if ptx and stream.dot == tl.float16 and stream.form == NF4.value else 1.0


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
def value_columns(part: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """The positions in the lane of a part's values where halves may be `joined`, the high one first."""
    if by_words(S, C):
        column = word_columns(part, S)
    elif joined(S, C):
        HALF: tl.constexpr = S.segments[part][1] // 2
        place = tl.arange(0, 2 * HALF)
        byte = place % HALF
        column = byte // (S.block // 2) * S.block + byte % (S.block // 2)
        column = S.segments[part][0] + (1 - place // HALF) * (S.block // 2) + column
    else:
        column = part_columns(part, S)
    return column


# -- unpacking ----------------------------------------------------------------------------------


@triton.jit
def _scaled(x, scale, OFFSET: tl.constexpr):
    """x (N, w), less 1 if OFFSET, times scale (N, blocks of the segment)."""
    blocks: tl.constexpr = scale.shape[1]
    wide = tl.reshape(x, (x.shape[0], blocks, x.shape[1] // blocks))
    factor = scale.to(x.dtype)[:, :, None]
    if OFFSET:
        # One multiply-add, for the constant is the scale itself.
        factor = tl.broadcast_to(factor, wide.shape)
        wide = tl.fma(wide, factor, -factor)
    else:
        wide = wide * factor
    return tl.reshape(wide, x.shape)


@triton.jit
def _pairs(a, b):
    """Words of two fp16 each, (N, w) twice -> (N, 4 w): a's two, b's two, and so on."""
    x = tl.join(a, b)
    first = x.to(tl.int16).to(tl.float16, bitcast=True)
    second = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(first, second), (a.shape[0], a.shape[1] * 4))


@triton.jit
def _from_words(words, FORMAT: tl.constexpr):
    """words (N, w) of four bytes -> fp16 values before the scale, a tuple of parts (N, 4 w)."""
    if FORMAT == Q8_0:
        a, b = tl.inline_asm_elementwise(
            WORD[FORMAT], "=&r,=&r,r", [words], (tl.int32, tl.int32), True, 1
        )
        parts = (_pairs(a, b),)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            WORD[FORMAT],
            "=&r,=&r,=&r,=&r,r",
            [words],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            True,
            1,
        )
        parts = (_pairs(a, b), _pairs(c, d))
    return parts


@triton.jit
def _from_bytes(codes, FORMAT: tl.constexpr):
    """codes (N, w) -> fp16 values before the scale, a tuple of parts (N, w)."""
    if FORMAT == Q8_0:
        parts = (tl.inline_asm_elementwise(PAIR[FORMAT], "=r,r", [codes], tl.float16, True, 2),)
    else:
        low, high = tl.inline_asm_elementwise(
            PAIR[FORMAT], "=&r,=&r,r", [codes], (tl.float16, tl.float16), True, 2
        )
        parts = (low, high)
    return parts


@triton.jit
def _joined(low, high):
    """(N, w) twice -> (N, 2 w), the high one first."""
    both = tl.permute(tl.join(high, low), (0, 2, 1))
    return tl.reshape(both, (low.shape[0], 2 * low.shape[1]))


@triton.jit
def _plain(codes, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """codes (N, w) -> float32 values before the scale, a tuple of parts (N, w)."""
    if FORMAT == Q8_0:
        parts = (decode_bytes(codes, FORMAT),)
    else:
        low, high = decode_nibbles(codes, FORMAT, PTX)
        parts = (low, high)
    return parts


# -- loading ------------------------------------------------------------------------------------


@triton.jit
def _at(start, slot, WIDTH: tl.constexpr, column, C: tl.constexpr):
    """Pointers to columns of slots. NVIDIA's assembler adds an offset of 32 bits to a pointer in one instruction."""
    if lean(C) and not C.extend:
        pointers = start + (slot[:, None] * WIDTH + column[None, :])
    else:
        pointers = start + slot[:, None] * WIDTH + column[None, :]
    return pointers


@triton.jit
def codes_of(
    codes, slot, inside, S, START, SIZE, BYTES: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A segment's codes, BYTES of them an element."""
    WIDTH: tl.constexpr = S.width // halves(S.form) // BYTES
    column = START // halves(S.form) // BYTES + tl.arange(0, SIZE // halves(S.form) // BYTES)
    if BYTES == 4:
        codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    return loaded(_at(codes, slot, WIDTH, column, C), inside[:, None], MASKED)


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
    MASKED: tl.constexpr,
    VALUES: tl.constexpr,
    C: tl.constexpr,
):
    """One segment of a tile: a tuple of its parts."""
    wanted = used if VALUES else inside
    if S.form < Q8_0:
        x = codes_of(codes, slot, wanted, S, START, SIZE, 1, MASKED or VALUES, C)
        if x.dtype == S.dot:
            parts = (x,)
        else:
            parts = (from_float32(to_float32(x), S.dot),)
    else:
        HALF: tl.constexpr = C.ptx and S.dot == tl.float16
        x = codes_of(codes, slot, inside, S, START, SIZE, 4 if HALF and VALUES else 1, MASKED, C)
        block = START // S.block + tl.arange(0, SIZE // S.block)
        at = _at(scales, slot, S.width // S.block, block, C)
        scale = loaded(at, wanted[:, None], MASKED or VALUES)
        parts = ()
        if HALF:
            raw = _from_words(x, S.form) if VALUES else _from_bytes(x, S.form)
            for i in tl.static_range(len(raw)):
                parts += (_scaled(raw[i], scale, S.form == NF4 and not VALUES),)
        else:
            raw = _plain(x, S.form, C.ptx)
            for i in tl.static_range(len(raw)):
                parts += (from_float32(_scaled(raw[i], scale, False), S.dot),)
        if VALUES and joined(S, C):
            parts = (_joined(parts[0], parts[1]),)
    return parts


@triton.jit
def load_tile(
    codes,
    scales,
    slot,
    inside,
    used,
    S: tl.constexpr,
    MASKED: tl.constexpr,
    VALUES: tl.constexpr,
    C: tl.constexpr,
):
    """The parts of a tile of tokens, (N, width of the part) each, of dtype ``S.dot``; values by words as `load_words`.

    Args:
        codes, scales: pointers to where slots are counted from.
        slot: (N,) slots of the tokens.
        inside: (N,) whether a slot exists; looked at only if MASKED.
        used: (N,) whether a query may see the token; what is not used becomes 0 if VALUES.
    """
    if VALUES and by_words(S, C):
        parts = load_words(codes, scales, slot, inside, used, S, MASKED, C)
    else:
        parts = ()
        for i in tl.static_range(len(S.segments)):
            parts += _segment(
                codes,
                scales,
                slot,
                inside,
                used,
                S,
                S.segments[i][0],
                S.segments[i][1],
                MASKED,
                VALUES,
                C,
            )
    return parts
