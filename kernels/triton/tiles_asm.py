"""PTX that turns four bytes of codes into packed fp16 in registers.

fp16 numbers from 1024 to 2047 have their integer in the low ten bits of the mantissa, so a byte
below the byte 0x64 is the number 1024 + byte: ``prmt`` puts the two together for two values at once.
"""

from __future__ import annotations

import struct

from caramba_fast.formats import NF4_LEVELS

#: $2: four int8 -> $0, $1: their values.
Q8_HALF = """{
.reg .b32 t, a, b, c;
mov.b32 c, 0xE480E480;
xor.b32 t, $2, 0x80808080;
prmt.b32 a, t, 0x64646464, 0x4140;
prmt.b32 b, t, 0x64646464, 0x4342;
add.rn.f16x2 $0, a, c;
add.rn.f16x2 $1, b, c;
}"""

#: $4: four bytes of two codes -> $0, $1: 1024 + low codes, $2, $3: 1024 + high codes.
Q4_HALF = """{
.reg .b32 l, h;
and.b32 l, $4, 0x0F0F0F0F;
shr.u32 h, $4, 4;
and.b32 h, h, 0x0F0F0F0F;
prmt.b32 $0, l, 0x64646464, 0x4140;
prmt.b32 $1, l, 0x64646464, 0x4342;
prmt.b32 $2, h, 0x64646464, 0x4140;
prmt.b32 $3, h, 0x64646464, 0x4342;
}"""

#: fp16(1 + NF4_SPREAD * level) is looked up, and ``x * scale - scale`` is one exact-constant multiply-add.
#: Of all spreads this one has the smallest error (3.6e-4 of the levels' size, no bias to speak of) among
#: those for which codes c and c + 8 agree in the top bit of either byte: see `_table`.
NF4_SPREAD = 0.80884375
#: The levels times this are what comes out: the least-squares fit for normally distributed values.
NF4_HALF_GAIN = 0.8088674688669788


def nf4_halves() -> list[int]:
    """The bits of fp16(1 + NF4_SPREAD * level), by code."""
    numbers = [struct.pack("<e", 1 + NF4_SPREAD * level) for level in NF4_LEVELS]
    return [int.from_bytes(number, "little") for number in numbers]


def _table(byte: int) -> list[int]:
    """Four words: ``prmt`` tables of codes 0-7 and 8-15 for one byte of the fp16 number.

    Packed codes are their own ``prmt`` selector: bits 0-2 of a nibble pick a byte, and bit 3 picks the
    repeated sign of that byte instead. With the second selector's bit 3 flipped, one of two look-ups
    gives the byte and the other a sign, 0x00 or 0xFF; the second table makes up for the first one's.
    """
    column = [bits >> (8 * byte) & 0xFF for bits in nf4_halves()]
    low, high = column[:8], column[8:]
    if any((a ^ b) & 0x80 for a, b in zip(low, high, strict=True)):
        raise ValueError("NF4_SPREAD makes the top bits of codes c and c + 8 differ")
    high = [b ^ (0xFF if a & 0x80 else 0) for a, b in zip(low, high, strict=True)]
    return [
        int.from_bytes(bytes(part), "little") for part in (low[:4], low[4:], high[:4], high[4:])
    ]


def _nf4() -> str:
    lines = [".reg .b32 s, t, a, b, p, q;", "mov.b32 s, $4;", "xor.b32 t, $4, 0x88888888;"]
    for pair in (0, 1):
        if pair:
            lines += ["shr.u32 s, s, 16;", "shr.u32 t, t, 16;"]
        for byte, name in ((0, "p"), (1, "q")):
            w0, w1, w2, w3 = (f"0x{word:08X}" for word in _table(byte))
            lines += [
                f"prmt.b32 a, {w0}, {w1}, s;",
                f"prmt.b32 b, {w2}, {w3}, t;",
                f"xor.b32 {name}, a, b;",
            ]
        lines += [f"prmt.b32 ${pair}, p, q, 0x6240;", f"prmt.b32 ${2 + pair}, p, q, 0x7351;"]
    return "{\n" + "\n".join(lines) + "\n}"


#: $4: four bytes of two codes -> $0, $1: `nf4_halves` of the low codes, $2, $3: of the high codes.
NF4_HALF: str = _nf4()
