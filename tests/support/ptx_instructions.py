"""The instructions that compute on registers alone: a table by name, one function each.

An operand is an array with one value for each thread (two, one after the other, of a pair of halves).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: A function, the type of its result, and those of its operands.
Pure = tuple[Callable[..., Array], str, tuple[str, ...]]

TYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_, "f16": np.float16, "f16x2": np.float16, "f32": np.float32,
    **{f"{k}{n}": getattr(np, f"{'' if k == 's' else 'u'}int{n}") for k in "usb" for n in (8, 16, 32, 64)},
}  # fmt: skip
BITS = {name: np.dtype(kind).itemsize * 8 for name, kind in TYPES.items()}
BITS |= {"pred": 1, "f16x2": 32}
LANE = np.arange(32)
#: A lane's row, or column of B, and the first of its two columns, in an 8 by 8 matrix.
ROW, PAIR = LANE // 4, LANE % 4 * 2
WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def flushed(x: Array) -> Array:
    """ftz: subnormal numbers are zeros."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once."""
    return _fused(a, b, c).astype(a.dtype)


def _fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64, rounded to odd if inexact, so that rounding it again gives the nearest number."""
    product, added = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + added
    rest = total - product
    lost = (product - (total - rest)) + (added - rest)
    inexact = np.isfinite(total) & (lost != 0) & (total.view(np.int64) % 2 == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total)


def power(x: Array) -> Array:
    """ex2.approx.ftz, here the nearest number; a GPU may be off by 2 units in the last place."""
    return flushed(np.exp2(flushed(x).astype(np.float64)).astype(np.float32))


def rounded(run: Callable[..., Array], x: Array) -> Array:
    """ex2.approx and lg2.approx, here the nearest number; a GPU may be off by some units in the last place."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return run(x.astype(np.float64)).astype(np.float32)


def bits_set(x: Array) -> Array:
    """popc: number of bits that are 1."""
    return np.unpackbits(x.view(np.uint8).reshape(-1, 4), axis=1).sum(1).astype(x.dtype)


def largest(a: Array, b: Array) -> Array:
    """max: a NaN loses, and -0 is less than 0."""
    if a.dtype.kind != "f":
        return np.maximum(a, b)
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def largest_or_nan(a: Array, b: Array) -> Array:
    """max.NaN: a NaN stays."""
    return np.where(np.isnan(a) | np.isnan(b), a + b, largest(a, b))


def smallest(a: Array, b: Array) -> Array:
    """min, likewise."""
    return -largest(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b)


def quotient(a: Array, b: Array) -> Array:
    """div of integers: towards zero."""
    by = np.where(b == 0, 1, b).astype(b.dtype)
    return a // by if a.dtype.kind == "u" else (a - np.fmod(a, by)) // by


def left(a: Array, by: Array) -> Array:
    """shl: 0 after as many bits as a has."""
    return np.where(by < a.dtype.itemsize * 8, a << by.astype(a.dtype), 0).astype(a.dtype)


def right(a: Array, by: Array) -> Array:
    """shr: only the sign remains after as many bits as a has."""
    most = a.dtype.itemsize * 8 - 1
    once = a >> np.minimum(by, most).astype(a.dtype)
    return np.where(by > most, once >> 1, once).astype(a.dtype)


def bit_field(a: Array, start: Array, count: Array) -> Array:
    """bfe of a field within a: sign-extended if a is signed."""
    return right(left(a, 32 - start - count), 32 - count)


def funnel(a: Array, b: Array, by: Array) -> Array:
    """shf.l.wrap: the upper half of b:a, shifted left."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    return (both << (by % 32).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes of a and b by four indices; bit 3 of one repeats the byte's sign."""
    both, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for shift in range(0, 16, 4):
        index = selector >> shift & 15
        byte = (both >> (index % 8 * 8).astype(np.uint64) & np.uint64(255)).astype(a.dtype)
        byte = np.where(index > 7, (byte >> 7) * 255, byte)
        result |= (byte << 2 * shift).astype(a.dtype)
    return result


def lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Any logic function of three bits, given by its truth table."""
    result = np.zeros_like(a)
    for row in range(8):
        x, y, z = (v if row & bit else ~v for v, bit in ((a, 4), (b, 2), (c, 1)))
        result |= np.where(table >> row & 1, x & y & z, 0).astype(a.dtype)
    return result


def paired(high: Array, low: Array) -> Array:
    """Two halves of a register: the first operand is the upper one."""
    return np.stack([low, high], axis=1).ravel()


def unpacked(bits: Array, kind: str) -> Array:
    """Raw bits as numbers; numpy has no bf16 and no tf32, which ignores the lowest 13 bits."""
    if kind == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return (bits >> 13 << 13).view(np.float32) if kind == "tf32" else bits.view(TYPES[kind])


def bf16(x: Array) -> Array:
    """float32 -> bits of the nearest bf16, ties to even."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def fused_bf16(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.bf16 and fma.rn.bf16x2 of raw bits."""
    total = _fused(*(unpacked(x, "bf16") for x in (a, b, c)))
    with np.errstate(over="ignore"):
        near = total.astype(np.float32)
    lost = total - near
    odd = np.isfinite(near) & (lost != 0) & (near.view(np.int32) % 2 == 0)
    near = np.where(odd, np.nextafter(near, np.copysign(np.float32(np.inf), lost)), near)
    return bf16(near.astype(np.float32)).view(a.dtype)


def tf32(x: Array) -> Array:
    """float32 -> bits of the nearest with ten bits of mantissa, ties away from zero."""
    bits = x.view(np.uint32)
    return np.where(np.isfinite(x), bits + np.uint32(0x1000) >> 13 << 13, bits)


def to_integer(x: Array, kind: type[np.generic]) -> Array:
    """cvt.rzi: towards zero, within the range; NaN becomes 0."""
    limits = np.iinfo(kind)  # type: ignore[type-var]
    inside = np.clip(np.trunc(x.astype(np.float64)), limits.min, limits.max)
    return np.where(np.isnan(x), 0, inside).astype(kind)


def distributed(rows: Array, transposed: bool) -> Array:
    """ldmatrix: (warps, matrices, 8, 8) halves -> (warps, 32, matrices, 2), as lanes hold them."""
    if transposed:
        rows = rows.transpose(0, 1, 3, 2)
    return np.stack([rows[:, :, ROW, PAIR], rows[:, :, ROW, PAIR + 1]], axis=-1).transpose(0, 2, 1, 3)  # fmt: skip


def multiplied(a: Array, b: Array, c: Array) -> Array:
    """mma.m16n8: a (warps, 32, 4, n) and b (warps, 32, 2, n), n values a register; c (warps, 32, 4) -> as c, float32.

    Products are summed exactly and rounded once; tensor cores round in between, in an undocumented order.
    """
    warps, each = len(a), a.shape[3]
    left, right = np.zeros((warps, 16, 8 * each)), np.zeros((warps, 8 * each, 8))
    for i in range(each):
        column = LANE % 4 * each + i
        for j in range(4):
            left[:, ROW + 8 * (j % 2), column + 4 * each * (j // 2)] = a[:, :, j, i]
        for j in range(2):
            right[:, column + 4 * each * j, ROW] = b[:, :, j, i]
    found = left @ right
    result = [found[:, ROW + 8 * (j // 2), PAIR + j % 2] + c[:, :, j] for j in range(4)]
    return np.stack(result, axis=-1).astype(np.float32)


#: By name with or without its type: functions of two operands of that type.
BINARY: dict[str, Callable[..., Array]] = {
    "add": np.add, "add.rn": np.add, "sub": np.subtract, "sub.rn": np.subtract,
    **dict.fromkeys(("mul", "mul.rn", "mul.lo", "mul.wide"), np.multiply), "max": largest,
    "max.NaN": largest_or_nan, "min": smallest,
    **dict.fromkeys(("div.s32", "div.u32", "div.s64", "div.u64"), quotient),
    **dict.fromkeys(("rem.s32", "rem.u32", "rem.s64", "rem.u64"), np.fmod),
    "div.rn": np.divide, "div.full.f32": np.divide,  # the latter may be off by 2 units in the last place
    "mul.hi.u32": lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
#: Others, with the types of their operands (t: the instruction's own, w: twice as wide).
TABLE: dict[str, tuple[Callable[..., Array], str]] = {
    "mad.lo": (lambda a, b, c: a * b + c, "t t t"), "mad.wide": (lambda a, b, c: a * b + c, "t t w"),
    "fma.rn": (fused, "t t t"), "fma.rn.ftz.f32": (lambda *x: flushed(fused(*map(flushed, x))), "t t t"),
    "neg": (np.negative, "t"), "abs": (np.abs, "t"), "not": (np.invert, "t"), "mov": (lambda x: x, "t"),
    "ex2.approx.ftz.f32": (power, "t"), "ex2.approx.f32": (lambda x: rounded(np.exp2, x), "t"),
    "popc.b32": (bits_set, "t"),
    "sqrt.approx.ftz.f32": (lambda x: rounded(np.sqrt, x), "t"),
    "lg2.approx.f32": (lambda x: rounded(np.log2, x), "t"), "selp": (lambda a, b, p: np.where(p, a, b), "t t pred"),
    "shl": (left, "t u32"), "shr": (right, "t u32"),
    "bfe.u32": (bit_field, "t u32 u32"), "bfe.s32": (bit_field, "t u32 u32"),
    "shf.l.wrap.b32": (funnel, "t t u32"), "prmt.b32": (prmt, "t t t"), "lop3.b32": (lop3, "t t t u32"),
    **{name: (run, "t t") for name, run in BINARY.items()},
}  # fmt: skip
COMPARED: dict[str, Callable[..., Array]] = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "neu": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "num": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
}  # fmt: skip
#: Conversions to and from types that numpy lacks.
SPECIAL: dict[str, Pure] = {
    "cvt.rn.f16x2.f32": (lambda *x: paired(*(v.astype(np.float16) for v in x)), "f16x2", ("f32", "f32")),
    "cvt.rn.bf16x2.f32": (lambda *x: paired(*map(bf16, x)).view(np.uint32), "b32", ("f32", "f32")),
    "fma.rn.bf16x2": (fused_bf16, "b32", ("b32", "b32", "b32")),
    "fma.rn.bf16": (fused_bf16, "b16", ("b16", "b16", "b16")),
    "cvt.rpi.ftz.f32.f32": (np.ceil, "f32", ("f32",)),
    "cvt.rn.bf16.f32": (bf16, "b16", ("f32",)),
    "cvt.f32.bf16": (lambda x: unpacked(x, "bf16"), "f32", ("b16",)),
    "cvt.rna.tf32.f32": (tf32, "b32", ("f32",)),
}  # fmt: skip


def converted(mode: str, to: str, source: str) -> Pure | None:
    """cvt: between integers, from integers to floats, between floats, from floats to integers."""
    kind, whole = TYPES[to], [TYPES[x](0).dtype.kind in "iu" for x in (to, source)]
    if mode == "rzi" and whole == [True, False] and BITS[to] < 64:
        return lambda x: to_integer(x, kind), to, (source,)
    exact = all(whole) or (not any(whole) and BITS[to] > BITS[source])
    if "pred" in (to, source) or mode != ("" if exact else "rn") or whole == [True, False]:
        return None
    return lambda x: x.astype(kind), to, (source,)


def pure(name: str) -> Pure | None:
    """The function of an instruction; None if it is not in these tables."""
    stem, _, kind = name.rpartition(".")
    if name in SPECIAL or kind not in TYPES:
        return SPECIAL.get(name)
    if stem.startswith("cvt."):
        mode, _, to = stem[4:].rpartition(".")
        return converted(mode, to, kind) if to in TYPES and to != "f16x2" else None
    if stem.startswith("setp.") and stem[5:] in COMPARED:
        return COMPARED[stem[5:]], "pred", (kind, kind)
    run, wanted = TABLE.get(name) or TABLE.get(stem) or (None, "")
    if run is None:
        return None
    wide = WIDE.get(kind, kind) if stem.endswith(".wide") else kind
    types = tuple({"t": kind, "w": wide}.get(x, x) for x in wanted.split())
    if wide == kind:
        return run, kind, types
    return lambda *x: run(*(v.astype(TYPES[wide]) for v in x)), wide, types
