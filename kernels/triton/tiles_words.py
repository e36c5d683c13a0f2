"""Values of a program of one warp: words of four bytes, in the registers from which they are multiplied.

The product V^T · P sums over tokens, so a register of its first operand holds two tokens' numbers. Codes of a token lie
beside each other, though: unpacked by themselves they would pass through shared memory, twice their size, to meet their
neighbours. Here a thread loads the same word of two tokens and takes both apart at once, and every byte (or half of a
byte) of the words is a product of its own: columns of the output in another order, which nothing has to undo.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .casts import from_float32
from .formats import NF4, Q8_0, decode_bytes, decode_nibbles
from .tiles_asm import NF4_WORDS, Q4_WORDS, Q8_WORDS
from .tiles_layout import FORMATS_OF_NIBBLES

#: By the format's index.
WORDS = tl.constexpr((None, None, None, Q8_WORDS, Q4_WORDS, NF4_WORDS))


@triton.constexpr_function
def each_word(stream):
    """Values of a word, and parts of a segment."""
    return 8 if stream.form in FORMATS_OF_NIBBLES else 4


@triton.jit
def word_columns(part: tl.constexpr, S: tl.constexpr):
    """The positions in the lane of a part's values, one of each word."""
    EACH: tl.constexpr = each_word(S)
    which: tl.constexpr = part % EACH
    byte = tl.arange(0, S.segments[part // EACH][1] // EACH) * 4 + which % 4
    if EACH == 8:
        byte = byte // (S.block // 2) * S.block + byte % (S.block // 2)
        byte += which // 4 * (S.block // 2)
    return S.segments[part // EACH][0] + byte


@triton.jit
def loaded(pointers, mask, MASKED: tl.constexpr):
    """What is there, or 0; looked at ``mask`` only if MASKED."""
    if MASKED:
        x = tl.load(pointers, mask=mask, other=0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def _in_pairs(words, FORMAT: tl.constexpr):
    """Words (w, N) -> fp16 values before the scale, (w, N) for each byte, then for its high half: PTX."""
    if FORMAT == Q8_0:
        parts = tl.inline_asm_elementwise(
            WORDS[FORMAT], "=&r,=&r,=&r,=&r,r,r", [words],
            (tl.float16, tl.float16, tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    else:
        parts = tl.inline_asm_elementwise(
            WORDS[FORMAT], "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    return parts


@triton.jit
def _one_by_one(words, FORMAT: tl.constexpr):
    """The same in float32, by plain operations."""
    low, high = (), ()
    for i in tl.static_range(4):
        byte = (words >> (8 * i)).to(tl.uint8)
        if FORMAT == Q8_0:
            low += (decode_bytes(byte.to(tl.int8, bitcast=True), FORMAT),)
        else:
            a, b = decode_nibbles(byte, FORMAT, False)
            low += (a,)
            high += (b,)
    return low + high


@triton.jit
def load_words(
    codes, scales, slot, inside, used, S: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The parts of a tile of values, transposed: (words of a segment, N) fp16 each; 0 where no query may look.

    Args:
        as of `tiles.load_tile`.
    """
    EACH: tl.constexpr = each_word(S)
    WIDTH: tl.constexpr = S.width // EACH
    BLOCKS: tl.constexpr = S.width // S.block
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    parts = ()
    for i in tl.static_range(len(S.segments)):
        START: tl.constexpr = S.segments[i][0]
        COUNT: tl.constexpr = S.segments[i][1] // S.block
        word = START // EACH + tl.arange(0, S.segments[i][1] // EACH)
        words = loaded(codes + (slot[None, :] * WIDTH + word[:, None]), inside[None, :], MASKED)
        block = START // S.block + tl.arange(0, COUNT)
        scale = tl.load(
            scales + (slot[None, :] * BLOCKS + block[:, None]), mask=used[None, :], other=0.0
        )
        shape: tl.constexpr = (COUNT, words.shape[0] // COUNT, words.shape[1])
        scale = tl.reshape(tl.broadcast_to(scale[:, None, :], shape), words.shape)
        if C.ptx:
            raw = _in_pairs(words, S.form)
            for j in tl.static_range(EACH):
                # What is looked up for NF4 is 1 more; a multiply-add takes the scale away again.
                parts += (tl.fma(raw[j], scale, -scale) if S.form == NF4 else raw[j] * scale,)
        else:
            raw = _one_by_one(words, S.form)
            for j in tl.static_range(EACH):
                parts += (from_float32(raw[j] * scale.to(tl.float32), S.dot),)
    return parts
