"""Casts between float32 and storage dtypes that round the same way compiled and interpreted.

Triton's interpreter truncates float32 to bfloat16 and misreads subnormal bfloat16; compiled code
does neither. Here the interpreter gets the same result from the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_float32(x):
    """float32, float16 or bfloat16 -> float32, exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def from_float32(x, dtype: tl.constexpr):
    """float32 -> ``dtype``, rounding to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # The carry would turn some NaN into zeros.
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        narrow = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow
