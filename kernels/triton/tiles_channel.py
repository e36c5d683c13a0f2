"""A tile of tokens by channel: keys whose scales are folded into the queries, values that are dequantized.

A channel of a group of tokens has a scale and a zero of its own, so q . k = q . zero + (q scale) . code. What is
multiplied for every token is then a small integer, exact in half precision, and nothing is dequantized in the loop.

Groups may be shorter than a tile, so its tokens are cut into as many products as there are warps, each with queries
folded for its own group: Triton gives every warp one of them (a batched ``tl.dot``), and folds them in the registers in
which they enter it.

Operands are fp16 (a float32 query takes keys that are dequantized, `channel_values`). Queries come divided by a power
of two (`tiles_query`), so that times a scale they stay finite for every scale that fp16 keys can lead to (13,319 in 4
bits: a channel of 2 bits beside one of 6; 131,008 / 255 in 8). They lose bits only where scales are near the subnormal
ones: channels that vary by less than 5e-4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .casts import from_float32
from .formats import low_masks
from .tiles import codes_of, halves, lean, loaded, part_columns, parts_of
from .tiles_asm import CODES_4_WORD, CODES_8_WORD, FOLDED_FOUR, HELD_FOUR, MASKS_WORD
from .tiles_layout import LEAST_ROWS

#: Rows of the product of queries and zeros, the fewest that ``tl.dot`` takes: more than a tile has groups.
ZERO_ROWS = tl.constexpr(16)
FOUR_8, FOUR_4 = tl.constexpr(CODES_8_WORD), tl.constexpr(CODES_4_WORD)
FOLDED, HELD = tl.constexpr(FOLDED_FOUR), tl.constexpr(HELD_FOUR)
MASKS = tl.constexpr(MASKS_WORD)
#: Whether queries are folded as assembly: a Triton before 3.9 would bring what comes out through shared memory.
ASSEMBLY = tl.constexpr(LEAST_ROWS == 8)


@triton.constexpr_function
def unit(stream, ptx):
    """What a code of 1 is as an operand: the least fp16 number where PTX makes it; above another in a byte 16 times."""
    return 2.0**-24 if ptx and stream.dot == tl.float16 and stream.group > 1 else 1.0


@triton.constexpr_function
def products_of(stream, shape):
    """Products that a tile of keys is cut into; without PTX one, where the tile lies within a group."""
    if shape.warps == 1:
        return max(1, shape.tile // stream.group)
    if stream.group >= shape.tile and not shape.ptx:
        return 1
    return shape.tile // max(16, shape.tile // shape.warps)


@triton.jit
def _of_groups(scales, origin, slots, part: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr,
               MASKED: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """(COUNT, columns): what is stored for the groups of every (tile / COUNT)-th token of a tile.

    Args:
        part: whose columns.
        FIRST: 0 for their scales, the width of a lane for their zeros.
    """
    # A tile holds whole groups or lies within one: what is added for a token does not depend on the tile.
    offset = FIRST + part_columns(part, S)
    at = scales + (origin // S.group) * (2 * S.width)
    if COUNT > 1:
        first = tl.arange(0, COUNT) * (C.tile // COUNT)
        offset = (first // S.group)[:, None] * (2 * S.width) + offset[None, :]
        inside = (origin + first < slots)[:, None]
    else:
        inside = origin < slots
    found = loaded(at + offset, inside, MASKED)
    if COUNT == 1:
        found = found[None, :]
    return found


@triton.constexpr_function
def whole_row(stream, shape):
    """Whether all that is stored for a group is loaded at once: its parts are too short for loads of their own.

    Of lanes of 32 values Triton 3.6 takes the words apart wrongly.
    """
    single = len(stream.segments) == 1 and stream.width >= 64 and shape.tile <= stream.group
    return shape.warps == 1 and single and halves(stream.form) == 2 and stream.dot == tl.float16


@triton.jit
def _two_halves(words, COUNT: tl.constexpr):
    """Words of two fp16 -> (1, COUNT)."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (COUNT,))[None, :]


@triton.jit
def _of_row(scales, origin, slots, S: tl.constexpr, MASKED: tl.constexpr):
    """Scales and zeros of the group that a tile lies in: two tuples of (1, w)."""
    HALF: tl.constexpr = S.width // 2
    at = (scales + (origin // S.group) * (2 * S.width)).to(tl.pointer_type(tl.int32), bitcast=True)
    words = loaded(at + tl.arange(0, S.width), origin < slots, MASKED)
    words = tl.reshape(words, (2, S.width // S.block, 2, S.block // 4))
    scale, zero = tl.split(tl.permute(words, (1, 3, 2, 0)))
    low, high = tl.split(scale)
    low_zero, high_zero = tl.split(zero)
    steps = (_two_halves(low, HALF), _two_halves(high, HALF))
    return steps, (_two_halves(low_zero, HALF), _two_halves(high_zero, HALF))


@triton.jit
def _repeated(x, tokens: tl.constexpr):
    """(COUNT, n), a row for equal stretches of a tile -> (tokens, n)."""
    COUNT: tl.constexpr = x.shape[0]
    wide = tl.broadcast_to(x[:, None, :], (COUNT, tokens // COUNT, x.shape[1]))
    return tl.reshape(wide, (tokens, x.shape[1]))


@triton.jit
def _low_masks(low, high, C: tl.constexpr):
    """`formats.low_masks` as bytes."""
    if C.ptx:
        return tl.inline_asm_elementwise(MASKS, "=r,r,r,r,r", [low, high], tl.uint8, True, 4)
    return low_masks(low, high).to(tl.uint8)


@triton.jit
def _from_four(x, masks, S: tl.constexpr):
    """Codes (N, w), four at a time, as the fp16 numbers of `unit`: a tuple of parts."""
    if halves(S.form) == 1:
        parts = (tl.inline_asm_elementwise(FOUR_8, "=&r,=&r,r", [x], tl.float16, True, 4),)
    else:
        low, high = tl.inline_asm_elementwise(
            FOUR_4, "=&r,=&r,=&r,=&r,r,r", [x, masks], (tl.float16, tl.float16), True, 4
        )
        parts = (low, high)
    return parts


@triton.jit
def _codes(x, masks, S: tl.constexpr):
    """Codes (N, w) in scales, float32: a tuple of parts; of two codes a byte the low one has the bits of ``masks``."""
    if halves(S.form) == 1:
        parts = (x.to(tl.float32),)
    else:
        low = x & masks
        parts = (low.to(tl.float32), (x ^ low).to(tl.float32) * 0.0625)
    return parts


@triton.jit
def _numbers(x, masks, S: tl.constexpr, HALF: tl.constexpr):
    """Codes (N, w) as operands: a tuple of parts."""
    if HALF:
        parts = _from_four(x, masks, S)
    else:
        parts = ()
        found = _codes(x, masks, S)
        for i in tl.static_range(len(found)):
            parts += (found[i].to(S.dot),)
    return parts


@triton.jit
def _of_parts(
    scales, origin, slots, COUNT: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The scales of all parts, as `_of_groups` has them."""
    found = ()
    for part in tl.static_range(parts_of(S)):
        found += (_of_groups(scales, origin, slots, part, 0, COUNT, S, MASKED, C),)
    return found


@triton.jit
def _masks(steps, S: tl.constexpr, C: tl.constexpr):
    """Of 4-bit codes which bits are the low ones': (N, w) for each segment."""
    masks = ()
    for i in tl.static_range(len(S.segments)):
        masks += (_repeated(_low_masks(steps[2 * i], steps[2 * i + 1], C), C.tile),)
    return masks


@triton.jit
def _product(q, k, scale, total, C: tl.constexpr):
    """k (N, w) times q (R, w) folded with scale (COUNT, w), plus ``total``: (COUNT, N / COUNT, R), or (N, R)."""
    COUNT: tl.constexpr = scale.shape[0]
    if COUNT == 1 and C.warps > 1:
        found = tl.dot(k, tl.trans(q * scale), total, input_precision=C.precision)
    else:
        folded = tl.permute(q[None, :, :] * scale[:, None, :], (0, 2, 1))
        wide = tl.reshape(k, (COUNT, k.shape[0] // COUNT, k.shape[1]))
        found = tl.dot(wide, folded, total, input_precision=C.precision)
    return found


@triton.jit
def _four_folded(turned, step, C: tl.constexpr):
    """Queries (w, R) times the sizes of stored scales (COUNT, w): (COUNT, w, R)."""
    shape: tl.constexpr = (step.shape[0], turned.shape[0], C.rows)
    held = tl.inline_asm_elementwise(
        HELD, "=&r,=&r,r,r", [tl.broadcast_to(turned[None, :, :], shape)], tl.float16, True, 4
    )
    both = [held, tl.broadcast_to(step[:, :, None], shape)]
    return tl.inline_asm_elementwise(FOLDED, "=&r,=&r,r,r,r,r", both, tl.float16, True, 4)


@triton.jit
def _folded(q, turned, k, step, total, S: tl.constexpr, C: tl.constexpr):
    """`_product` in half precision, of scales as they are stored."""
    COUNT: tl.constexpr = step.shape[0]
    if ASSEMBLY:
        folded = _four_folded(turned, step, C)
        wide = tl.reshape(k, (COUNT, k.shape[0] // COUNT, k.shape[1]))
        found = tl.dot(wide, folded, total, input_precision=C.precision)
    else:
        found = _product(q, k, _scale(step, S), total, C)
    return found


@triton.jit
def _scale(step, S: tl.constexpr):
    """What a stored scale multiplies: of 4-bit codes its sign says something else (`_low_masks`)."""
    if halves(S.form) == 2:
        step = tl.abs(step)
    return step.to(S.dot)


@triton.jit
def channel_scores(
    q, turned, codes, scales, origin, slot, inside, slots, S: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """(N, R) scores of a tile, before their factor.

    Args:
        q, turned: parts of the queries, and the same transposed.
        codes, scales: pointers to where slots of the tile, and groups of the page, are counted from.
        origin: slot of the page that the tile begins with, a multiple of its tokens.
        slot, inside: (N,) slots of the tokens from there, and whether they exist.
        slots: those a contiguous cache has.
    """
    HALF: tl.constexpr = C.ptx and S.dot == tl.float16
    COUNT: tl.constexpr = products_of(S, C)
    EACH: tl.constexpr = halves(S.form)
    found = ()
    for i in tl.static_range(len(S.segments)):
        found += (
            codes_of(codes, slot, inside, S, S.segments[i][0], S.segments[i][1], 1, MASKED, C),
        )
    zeros = None
    if whole_row(S, C):
        steps, zeros = _of_row(scales, origin, slots, S, MASKED)
    else:
        steps = _of_parts(scales, origin, slots, COUNT, S, MASKED, C)
    masks = None
    if EACH == 2:
        masks = _masks(steps, S, C)
    k = ()
    for i in tl.static_range(len(S.segments)):
        k += _numbers(found[i], masks[i] if EACH == 2 else None, S, HALF)
    if HALF and lean(C):
        total = _from_zeros(turned, zeros, scales, origin, slots, COUNT, S, MASKED, C)
        total = _all_folded(q, turned, k, steps, total, S, C)
        total = tl.reshape(total, (C.tile, C.rows))
    else:
        total, high, base = None, None, None
        for part in tl.static_range(parts_of(S)):
            if EACH == 2 and HALF and part % 2 == 1:
                high = _product(q[part], k[part], _scale(steps[part], S), high, C)
            else:
                total = _product(q[part], k[part], _scale(steps[part], S), total, C)
            zero = _of_groups(scales, origin, slots, part, S.width, ZERO_ROWS, S, MASKED, C)
            base = tl.dot(zero.to(S.dot), turned[part], base, input_precision=C.precision)
        if EACH == 2 and HALF:
            total += high * 0.0625
        base *= unit(S, C.ptx)
        total = tl.reshape(total, (C.tile, C.rows)) + _repeated(base, C.tile)
    return total


@triton.jit
def _from_zeros(
    turned, zeros, scales, origin, slots, COUNT: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Zeros times queries, where the products of a tile begin: (COUNT, N / COUNT, R).

    The rows of one product for the tile are shared out as its tokens are: 16 to each warp, all of them the zeros of its
    group, so that every thread already has what it needs.
    """
    base = None
    for part in tl.static_range(parts_of(S)):
        if zeros is None:  # one after the other, for all at once are more registers
            zero = _of_groups(scales, origin, slots, part, S.width, COUNT, S, MASKED, C)
        else:
            zero = zeros[part]
        zero = zero.to(S.dot)
        rows = tl.broadcast_to(zero[:, None, :], (COUNT, 16, zero.shape[1]))
        rows = tl.reshape(rows, (COUNT * 16, zero.shape[1]))
        base = tl.dot(rows, turned[part], base, input_precision=C.precision)
    EACH: tl.constexpr = C.tile // COUNT
    base = tl.reshape(base * unit(S, C.ptx), (COUNT, 1, 16, C.rows))
    base = tl.broadcast_to(base, (COUNT, EACH // 16, 16, C.rows))
    return tl.reshape(base, (COUNT, EACH, C.rows))


@triton.jit
def _all_folded(q, turned, k, steps, total, S: tl.constexpr, C: tl.constexpr):
    """``total`` plus the products of all parts; of two codes a byte the high ones, 16 times too large, first."""
    EACH: tl.constexpr = halves(S.form)
    if EACH == 2:
        high = None
        for part in tl.static_range(1, parts_of(S), 2):
            high = _folded(q[part], turned[part], k[part], steps[part], high, S, C)
        total += high * 0.0625
    for part in tl.static_range(0, parts_of(S), EACH):
        total = _folded(q[part], turned[part], k[part], steps[part], total, S, C)
    return total


@triton.jit
def channel_values(
    codes, scales, origin, slot, inside, used, slots, S: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The parts of a tile of values, zero + scale * code, as `load_tile` has them; 0 where no query may look."""
    COUNT: tl.constexpr = 1 if S.group >= C.tile else C.tile // S.group
    EACH: tl.constexpr = halves(S.form)
    steps, masks = _of_parts(scales, origin, slots, COUNT, S, MASKED, C), None
    if EACH == 2:
        masks = _masks(steps, S, C)
    numbers = ()
    for i in tl.static_range(len(S.segments)):
        x = codes_of(codes, slot, inside, S, S.segments[i][0], S.segments[i][1], 1, MASKED, C)
        numbers += _codes(x, masks[i] if EACH == 2 else None, S)
    parts = ()
    for part in tl.static_range(parts_of(S)):
        scale = steps[part].to(tl.float32)
        if EACH == 2:
            scale = tl.abs(scale)
        zero = _of_groups(scales, origin, slots, part, S.width, COUNT, S, MASKED, C)
        zero = _repeated(zero.to(tl.float32), C.tile)
        value = numbers[part] * _repeated(scale, C.tile) + zero
        parts += (from_float32(tl.where(used[:, None], value, 0.0), S.dot),)
    return parts
