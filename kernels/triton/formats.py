"""The storage formats as device functions: what `caramba_fast.formats` states, in Triton.

A kernel takes ``FORMAT`` (the index of the table's row) and ``BITS``; nothing here is a copy per
kernel, and a new format is a row of `CANDIDATES` and one more branch of `_encode`, `_values` and of a
decode function.
Formats of one code a byte work on a whole block, ``x (blocks, n)``; formats of two codes a byte on
its halves, ``low`` and ``high (blocks, n/2)``, because a byte holds one value of each.

Arithmetic is float32 in the order of the reference, sums included. Magnitudes are compared as
integers: for finite floats that is the same order, and one maximum also finds NaN and Inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from caramba_fast.formats import FORMATS, NF4_LEVELS
from caramba_fast.formats import WIDER as WIDER_TIMES

from .casts import from_float32, to_float32
from .nf4_asm import NF4_LOOKUP

Q8_0 = tl.constexpr(FORMATS["q8_0"].index)
Q4_0 = tl.constexpr(FORMATS["q4_0"].index)
NF4 = tl.constexpr(FORMATS["nf4"].index)

_levels = torch.tensor(NF4_LEVELS, dtype=torch.float32)
LEVELS = tl.constexpr(NF4_LEVELS)
#: Rounded in float32, like the reference's.
MIDPOINTS = tl.constexpr(tuple(((_levels[1:] + _levels[:-1]) / 2).tolist()))
LOOKUP = tl.constexpr(NF4_LOOKUP)

FITS = ("amax", "mse")
#: What fit "mse" divides a block's largest value by, a row for each format's index; "amax" takes the first.
CANDIDATES = tl.constexpr(
    ((), (), (), (127.0,), (8.0, 7.25, 8.5, 9.0, 9.5), (1.0, 1.0869565, 1.1904762, 1.3157895))
)
#: Of `caramba_fast.formats`: from how many times another channel's weight on one lends bits to it.
WIDER = tl.constexpr(WIDER_TIMES)
LARGEST_BLOCK_LOG2 = tl.constexpr(7)

INFINITY_BITS = tl.constexpr(0x7F800000)
#: 2^-128 as bits: the reciprocal of a scale up to here overflows float32.
NO_RECIPROCAL_BITS = tl.constexpr(0x00200000)


@triton.jit
def magnitude(x):
    """The bits of |x|: int32, ordered like the numbers, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _reciprocal(scale):
    """1 / scale, or 0 where that overflows; such scales are 0 in fp16."""
    usable = magnitude(scale) > NO_RECIPROCAL_BITS
    divisor = tl.where(usable, scale, 1.0)
    return tl.where(usable, tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor), 0.0)


@triton.jit
def _scale(top, CANDIDATE: tl.constexpr):
    """The unrounded scale that makes ``top`` the code (or level) CANDIDATE."""
    if CANDIDATE == 1.0:
        scale = top
    elif CANDIDATE == 8.0:
        scale = top * 0.125
    else:
        scale = tl.div_rn(top, tl.full(top.shape, CANDIDATE, tl.float32))
    return scale


@triton.jit
def _nearest_level(x):
    """Index of the nearest NF4 level: four comparisons; a midpoint belongs to the level below."""
    M: tl.constexpr = MIDPOINTS
    b3 = x > M[7]
    b2 = x > tl.where(b3, M[11], M[3])
    b1 = x > tl.where(b3, tl.where(b2, M[13], M[9]), tl.where(b2, M[5], M[1]))
    above = tl.where(b2, tl.where(b1, M[14], M[12]), tl.where(b1, M[10], M[8]))
    below = tl.where(b2, tl.where(b1, M[6], M[4]), tl.where(b1, M[2], M[0]))
    b0 = x > tl.where(b3, above, below)
    return (tl.where(b3, 8, 0) + tl.where(b2, 4, 0)) + (tl.where(b1, 2, 0) + tl.where(b0, 1, 0))


@triton.jit
def _encode(x, inverse, FORMAT: tl.constexpr):
    """x (blocks, w), inverse scale (blocks, 1) -> codes int32."""
    scaled = x * inverse
    if FORMAT == Q8_0:
        whole = scaled.to(tl.int32)
        rest = scaled - whole.to(tl.float32)
        # Half away from zero; adding 0.5 before truncating would round 0.49999997 up.
        code = whole + (rest >= 0.5).to(tl.int32) - (rest <= -0.5).to(tl.int32)
        code = tl.minimum(tl.maximum(code, -127), 127)
    elif FORMAT == Q4_0:
        code = tl.minimum(tl.maximum((scaled + 8.5).to(tl.int32), 0), 15)
    else:
        tl.static_assert(FORMAT == NF4)
        code = _nearest_level(scaled)
    return code


@triton.jit
def _values(code, FORMAT: tl.constexpr):
    """code int32 -> what the scale multiplies, float32."""
    if FORMAT == Q8_0:
        value = code.to(tl.float32)
    elif FORMAT == Q4_0:
        value = (code - 8).to(tl.float32)
    else:
        tl.static_assert(FORMAT == NF4)
        value = _level(code)
    return value


@triton.jit
def _halving_sum(x):
    """(blocks, w) -> (blocks,): the second half is added to the first until one is left.

    Bit-exact however elements lie in threads: each reduction is of two elements, one addition.
    """
    for _ in tl.static_range(LARGEST_BLOCK_LOG2):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), axis=1)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def _products(x, inverse, FORMAT: tl.constexpr):
    """x q and q q for the values q of the codes of x."""
    q = _values(_encode(x, inverse[:, None], FORMAT), FORMAT)
    return x * q, q * q


@triton.jit
def _choose(product, square, inverse, gain, best_scale, best_inverse):
    """The better of the best so far and the scale refitted to codes: sums of x q and q q, (blocks,)."""
    some = square > 0
    scale = tl.where(some, tl.div_rn(product, tl.where(some, square, 1.0)), 0.0)
    reached = product * scale
    better = reached > gain
    return (
        tl.where(better, reached, gain),
        tl.where(better, scale, best_scale),
        tl.where(better, inverse, best_inverse),
    )


@triton.jit
def _nothing(top):
    """gain, scale and inverse that any candidate betters."""
    zero = tl.zeros_like(top)
    return zero - 1.0, zero, zero


@triton.jit
def _first_key(x, bits, first: tl.constexpr):
    """The position (times 2, plus the sign) of the first element of magnitude ``bits``, a block."""
    position = first + tl.arange(0, x.shape[1])
    key = position[None, :] * 2 + (x.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    return tl.min(tl.where(magnitude(x) == bits[:, None], key, 0x7FFFFFFF), axis=1)


@triton.jit
def encode_bytes(x, FORMAT: tl.constexpr, FIT: tl.constexpr = "amax"):
    """x (blocks, n) float32 -> codes (blocks, n) int32 and scale (blocks,) float32."""
    C: tl.constexpr = CANDIDATES[FORMAT]
    bits = tl.max(magnitude(x), axis=1)
    finite = bits < INFINITY_BITS
    bits = tl.where(finite, bits, 0)
    x = tl.where(finite[:, None], x, 0.0)
    top = bits.to(tl.float32, bitcast=True)
    if FIT == "amax":
        scale = _scale(top, C[0])
        inverse = _reciprocal(scale)
    else:
        tl.static_assert(FIT == "mse")
        gain, scale, inverse = _nothing(top)
        for i in tl.static_range(len(C)):
            tried = _reciprocal(_scale(top, C[i]))
            product, square = _products(x, tried, FORMAT)
            product, square = _halving_sum(product), _halving_sum(square)
            gain, scale, inverse = _choose(product, square, tried, gain, scale, inverse)
    codes = _encode(x, inverse[:, None], FORMAT)
    return codes, tl.where(finite, scale, float("nan"))


@triton.jit
def encode_nibbles(low, high, FORMAT: tl.constexpr, FIT: tl.constexpr = "amax"):
    """low, high (blocks, n/2) float32 -> packed (blocks, n/2) int32 and scale (blocks,) float32."""
    C: tl.constexpr = CANDIDATES[FORMAT]
    bits = tl.maximum(tl.max(magnitude(low), axis=1), tl.max(magnitude(high), axis=1))
    finite = bits < INFINITY_BITS
    bits = tl.where(finite, bits, 0)
    low = tl.where(finite[:, None], low, 0.0)
    high = tl.where(finite[:, None], high, 0.0)
    top = bits.to(tl.float32, bitcast=True)
    if FORMAT == Q4_0:
        key = tl.minimum(_first_key(low, bits, 0), _first_key(high, bits, high.shape[1]))
        # Not -top: Triton negates as 0 - x, which would lose the scale -0.
        top = top * tl.where((key & 1) == 1, 1.0, -1.0)
    if FIT == "amax":
        scale = _scale(top, C[0])
        inverse = _reciprocal(scale)
    else:
        tl.static_assert(FIT == "mse")
        gain, scale, inverse = _nothing(top)
        for i in tl.static_range(len(C)):
            tried = _reciprocal(_scale(top, C[i]))
            product, square = _products(low, tried, FORMAT)
            products, squares = _products(high, tried, FORMAT)
            product, square = _halving_sum(product + products), _halving_sum(square + squares)
            gain, scale, inverse = _choose(product, square, tried, gain, scale, inverse)
    inverse = inverse[:, None]
    packed = _encode(low, inverse, FORMAT) | (_encode(high, inverse, FORMAT) << 4)
    return packed, tl.where(finite, scale, float("nan"))


@triton.jit
def channel_range(x, counted, BITS: tl.constexpr):
    """Of a group of tokens by channel, x (G, n) float32 and counted (G,), as (n,) each: zero, range, and whether all
    is finite."""
    bits = tl.max(tl.where(counted[:, None], magnitude(x), 0), axis=0)
    low = tl.min(tl.where(counted[:, None], x, float("inf")), axis=0)
    high = tl.max(tl.where(counted[:, None], x, float("-inf")), axis=0)
    none = low > high
    low, high = tl.where(none, 0.0, low), tl.where(none, 0.0, high)
    zero = (
        to_float32(from_float32(low, tl.float16)) + 0.0
    )  # of -0.0 and 0.0 either may be the least
    extent = (high - zero) + 0.0
    most = tl.full(low.shape, (1 << BITS) - 1, tl.float32)
    scale = to_float32(from_float32(tl.div_rn(extent, most), tl.float16))
    finite = tl.maximum(bits, tl.maximum(magnitude(zero), magnitude(scale))) < INFINITY_BITS
    return zero, extent, finite


@triton.jit
def lent_to(mine, other, finite):
    """Bits that channels of weight ``mine`` leave to those of weight ``other``: int32."""
    W: tl.constexpr = WIDER
    lent = (other > W[0] * mine).to(tl.int32) + (other > W[1] * mine).to(tl.int32)
    return tl.where(finite, lent, 0)


@triton.jit
def low_masks(low, high):
    """Of stored scales of the low and the high channels of bytes: the bits of the low ones, int32."""
    low, high = (
        low.to(tl.int16, bitcast=True).to(tl.int32),
        high.to(tl.int16, bitcast=True).to(tl.int32),
    )
    given = (low >> 15) & (8 | ((low & 1) << 2))
    taken = (high >> 15) & (16 | ((high & 1) << 5))
    return 15 ^ given ^ taken


@triton.jit
def channel_codes(x, zero, extent, finite, levels, unit, lent):
    """x (G, n) float32 -> codes (G, n) int32 of 0 to levels (n,), and fp16 scales that say what is lent.

    A code counts ``unit`` (n,) scales, a power of two."""
    scale = from_float32(tl.div_rn(extent, levels.to(tl.float32) * unit), tl.float16)
    bits = scale.to(tl.int16, bitcast=True)
    bits = tl.where(lent > 0, (bits & ~1) | (lent - 1).to(tl.int16), bits)
    step = to_float32(bits.to(tl.float16, bitcast=True)) * unit
    usable = step > 0
    one = tl.full(step.shape, 1.0, tl.float32)
    inverse = tl.where(usable, tl.div_rn(one, tl.where(usable, step, 1.0)), 0.0)
    scaled = (x - zero[None, :]) * inverse[None, :]
    scaled = tl.where(scaled > 0, scaled, 0.0)  # NaN becomes 0
    scaled = tl.minimum(scaled, levels.to(tl.float32)[None, :])
    bits = tl.where(lent > 0, bits | -0x8000, bits)
    bits = tl.where(finite, bits, 0x7E00)
    codes = tl.where(finite[None, :], (scaled + 0.5).to(tl.int32), 0)
    return codes, bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def store_zeros(target, zero, finite, keep):
    """Stores fp16 zeros, NaN where not all is finite."""
    tl.store(target, tl.where(finite, zero, float("nan")).to(tl.float16), mask=keep)


@triton.jit
def encode_channels(x, counted, scales, WIDTH: tl.constexpr, keep):
    """8 bits: x (G, n) -> codes (G, n) int32; stores scales (n,) where ``keep``, and zeros ``WIDTH`` behind."""
    zero, extent, finite = channel_range(x, counted, 8)
    lent, one = tl.zeros_like(finite.to(tl.int32)), tl.full(zero.shape, 1.0, tl.float32)
    codes, stored = channel_codes(x, zero, extent, finite, lent + 255, one, lent)
    tl.store(scales, stored, mask=keep)
    store_zeros(scales + WIDTH, zero, finite, keep)
    return codes


@triton.jit
def encode_channel_pairs(
    low,
    high,
    counted,
    scales,
    rms,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    FIT: tl.constexpr,
    keep,
):
    """4 bits: low, high (G, n) -> bytes (G, n) int32, divided with FIT "mse"; the high channels lie ``SIZE`` behind.

    Pointers: ``scales`` (n,) are stored there, ``rms`` (n,) or None has those of the queries.
    """
    zero, extent, finite = channel_range(low, counted, 4)
    other_zero, other_extent, other_finite = channel_range(high, counted, 4)
    if FIT == "mse":
        both = finite & other_finite
        weight, other_weight = extent, other_extent
        if rms is not None:
            weight *= tl.load(rms, mask=keep, other=0.0)
            other_weight *= tl.load(rms + SIZE, mask=keep, other=0.0)
        lent, taken = lent_to(weight, other_weight, both), lent_to(other_weight, weight, both)
    else:
        lent = tl.zeros_like(finite.to(tl.int32))
        taken = lent
    share = 4 - lent + taken
    size = 1 << share
    one = tl.full(zero.shape, 1.0, tl.float32)
    codes, stored = channel_codes(low, zero, extent, finite, size - 1, one, lent)
    tl.store(scales, stored, mask=keep)
    store_zeros(scales + WIDTH, zero, finite, keep)
    most, unit = (256 >> share) - 1, size.to(tl.float32) * 0.0625
    above, stored = channel_codes(high, other_zero, other_extent, other_finite, most, unit, taken)
    tl.store(scales + SIZE, stored, mask=keep)
    store_zeros(scales + (WIDTH + SIZE), other_zero, other_finite, keep)
    return codes | (above << share[None, :])


@triton.jit
def decode_bytes(codes, FORMAT: tl.constexpr):
    """codes (..., n) int8 -> float32 values before the scale."""
    tl.static_assert(FORMAT == Q8_0)
    return codes.to(tl.float32)


@triton.jit
def _level(code):
    """code int32 in 0..15 -> its NF4 level, a tree over the code's bits."""
    L: tl.constexpr = LEVELS
    b0 = (code & 1) != 0
    b1 = (code & 2) != 0
    b2 = (code & 4) != 0
    q0 = tl.where(b1, tl.where(b0, L[3], L[2]), tl.where(b0, L[1], L[0]))
    q1 = tl.where(b1, tl.where(b0, L[7], L[6]), tl.where(b0, L[5], L[4]))
    q2 = tl.where(b1, tl.where(b0, L[11], L[10]), tl.where(b0, L[9], L[8]))
    q3 = tl.where(b1, tl.where(b0, L[15], L[14]), tl.where(b0, L[13], L[12]))
    return tl.where((code & 8) != 0, tl.where(b2, q3, q2), tl.where(b2, q1, q0))


@triton.jit
def decode_nibbles(packed, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """packed (..., n/2) uint8 -> low, high (..., n/2) float32 values before the scale.

    ``PTX`` allows inline assembly; results are the same without.
    """
    if FORMAT == Q4_0:
        low = (packed & 0xF).to(tl.float32) - 8.0
        high = (packed >> 4).to(tl.float32) - 8.0
    elif PTX:
        tl.static_assert(FORMAT == NF4)
        low, high = tl.inline_asm_elementwise(
            LOOKUP, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [packed], (tl.int32, tl.int32), True, 4
        )
        low = low.to(tl.float32, bitcast=True)
        high = high.to(tl.float32, bitcast=True)
    else:
        tl.static_assert(FORMAT == NF4)
        low = _level((packed & 0xF).to(tl.int32))
        high = _level((packed >> 4).to(tl.int32))
    return low, high
