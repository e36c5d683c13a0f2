"""PTX that turns four bytes of codes into packed fp16 in registers.

fp16 numbers from 1024 to 2047 have their integer in the low ten bits of the mantissa, so a byte
below the byte 0x64 is the number 1024 + byte: ``prmt`` puts the two together for two values at once.
"""

from __future__ import annotations

import struct

from caramba_fast.formats import NF4_LEVELS

#: $1: two int8 -> $0: their values; 0x80 makes them unsigned, and 1152 is 1024 + 128.
Q8_PAIR = """{
.reg .b32 t, c;
mov.b32 c, 0xE480E480;
prmt.b32 t, $1, 0x64646464, 0x4140;
xor.b32 t, t, 0x00800080;
add.rn.f16x2 $0, t, c;
}"""

#: $2: four int8 -> $0, $1: their values.
Q8_WORD = """{
.reg .b32 t, a, b, c;
mov.b32 c, 0xE480E480;
xor.b32 t, $2, 0x80808080;
prmt.b32 a, t, 0x64646464, 0x4140;
prmt.b32 b, t, 0x64646464, 0x4342;
add.rn.f16x2 $0, a, c;
add.rn.f16x2 $1, b, c;
}"""


#: $2: four bytes -> $0, $1: the fp16 numbers 2^-24 times them. A byte needs no exponent, for subnormal operands are
#: numbers like any other (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ CS 7:e330, 2021). Four,
#: because before `mma.sync` a thread holds four neighbours.
CODES_8_WORD = """{
prmt.b32 $0, $2, 0, 0x4140;
prmt.b32 $1, $2, 0, 0x4342;
}"""

#: $1, $2: four stored scales of low channels, $3, $4: of high ones -> $0: the bits of bytes that are the low ones'
#: (`formats.low_masks`).
MASKS_WORD = """{
.reg .b32 a, b, c, d;
prmt.b32 a, $1, $2, 0x6420;
prmt.b32 b, $1, $2, 0xFDB9;
prmt.b32 c, $3, $4, 0x6420;
prmt.b32 d, $3, $4, 0xFDB9;
shl.b32 a, a, 2;
shl.b32 c, c, 5;
lop3.b32 a, a, 0x04040404, 0x08080808, 0xEA;
lop3.b32 c, c, 0x20202020, 0x10101010, 0xEA;
lop3.b32 a, a, b, 0x0F0F0F0F, 0x6A;
lop3.b32 $0, c, d, a, 0x6A;
}"""

#: $2, $3: four fp16 numbers -> $0, $1: the same, or'ed with a 0 that the assembler does not see through: it would pair
#: them again in every round of a loop.
HELD_FOUR = """{
.reg .b32 a, b;
mov.u32 a, %lanemask_lt;
mov.u32 b, %lanemask_eq;
and.b32 a, a, b;
or.b32 $0, $2, a;
or.b32 $1, $3, a;
}"""

#: $2, $3: four fp16 numbers, $4, $5: four stored scales -> $0, $1: each number times the size of its scale.
FOLDED_FOUR = """{
.reg .b32 a, b;
abs.f16x2 a, $4;
abs.f16x2 b, $5;
mul.rn.f16x2 $0, $2, a;
mul.rn.f16x2 $1, $3, b;
}"""

#: $4: four bytes of two codes, $5: masks of the low ones -> $0, $1: 2^-24 times the low codes, $2, $3: 2^-24 times the
#: high ones, which stay above the low ones.
CODES_4_WORD = """{
.reg .b32 t, u;
and.b32 t, $4, $5;
xor.b32 u, $4, t;
prmt.b32 $0, t, 0, 0x4140;
prmt.b32 $1, t, 0, 0x4342;
prmt.b32 $2, u, 0, 0x4140;
prmt.b32 $3, u, 0, 0x4342;
}"""


def _q4(source: str, selector: str, low: str, high: str, other: str | None = None) -> list[str]:
    """Two bytes of ``source``, or one of it and one of ``other`` -> code - 8 of their low and of their high codes.

    Each byte is doubled, so that one ``lop3`` takes a nibble and puts 0x64 above it. A high nibble stays
    where it is: 1024 + 16 * code, and the multiply-add divides by 16.
    """
    return [
        f"prmt.b32 t, {source}, {other or source}, {selector};",
        "lop3.b32 a, t, 0x000F000F, 0x64006400, 0xEA;",
        "lop3.b32 b, t, 0x00F000F0, 0x64006400, 0xEA;",
        f"add.rn.f16x2 {low}, a, c;",
        f"fma.rn.f16x2 {high}, b, d, e;",
    ]


def _program(*lines: str) -> str:
    return "{\n" + "\n".join(lines) + "\n}"


_Q4_CONSTANTS = (
    ".reg .b32 t, a, b, c, d, e;",
    "mov.b32 c, 0xE408E408;",  # -1032
    "mov.b32 d, 0x2C002C00;",  # 1 / 16
    "mov.b32 e, 0xD480D480;",  # -72
)
#: $2: two bytes of two codes -> $0: code - 8 of the low codes, $1: of the high codes.
Q4_PAIR: str = _program(*_Q4_CONSTANTS, *_q4("$2", "0x1100", "$0", "$1"))
#: $4: four bytes of two codes -> $0, $1: code - 8 of the low codes, $2, $3: of the high codes.
Q4_WORD: str = _program(
    *_Q4_CONSTANTS, *_q4("$4", "0x1100", "$0", "$2"), *_q4("$4", "0x3322", "$1", "$3")
)

#: $8, $9: two words of four bytes of two codes -> $0 to $3: code - 8 of the low codes of their first to fourth bytes,
#: $4 to $7: of the high codes.
Q4_WORDS: str = _program(
    *_Q4_CONSTANTS,
    *(
        line
        for i in range(4)
        for line in _q4("$8", f"0x{4 + i}{4 + i}{i}{i}", f"${i}", f"${4 + i}", other="$9")
    ),
)
#: $4, $5: two words of four int8 -> $0 to $3: the values of their first to fourth bytes.
Q8_WORDS: str = _program(
    ".reg .b32 t, a, b, c;",
    "mov.b32 c, 0xE480E480;",
    "xor.b32 a, $4, 0x80808080;",
    "xor.b32 b, $5, 0x80808080;",
    *(
        line
        for i in (0, 2)
        for line in (
            f"prmt.b32 t, a, b, 0x{5 + i}{1 + i}{4 + i}{i};",
            f"prmt.b32 ${i}, t, 0x64646464, 0x4140;",
            f"prmt.b32 ${i + 1}, t, 0x64646464, 0x4342;",
            f"add.rn.f16x2 ${i}, ${i}, c;",
            f"add.rn.f16x2 ${i + 1}, ${i + 1}, c;",
        )
    ),
)

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


def _nf4(source: str, low: str, high: str) -> list[str]:
    """Two bytes of ``source`` -> `nf4_halves` of their low and of their high codes."""
    lines = [f"xor.b32 t, {source}, 0x8888;"]
    for byte, name in ((0, "p"), (1, "q")):
        w0, w1, w2, w3 = (f"w{4 * byte + i}" for i in range(4))
        lines += [
            f"prmt.b32 a, {w0}, {w1}, {source};",
            f"prmt.b32 b, {w2}, {w3}, t;",
            f"xor.b32 {name}, a, b;",
        ]
    return [*lines, f"prmt.b32 {low}, p, q, 0x6240;", f"prmt.b32 {high}, p, q, 0x7351;"]


#: The table's words, or'ed with a 0 that the assembler does not see through: it would move plain constants
#: into registers at every look-up (8 instructions a token).
_NF4_CONSTANTS = (
    ".reg .b32 t, a, b, p, q, s, z, w<8>;",
    "mov.u32 a, %lanemask_lt;",
    "mov.u32 b, %lanemask_eq;",
    "and.b32 z, a, b;",
    *(f"or.b32 w{i}, z, 0x{word:08X};" for i, word in enumerate([*_table(0), *_table(1)])),
)
#: $2: two bytes of two codes -> $0: `nf4_halves` of the low codes, $1: of the high codes.
NF4_PAIR: str = _program(*_NF4_CONSTANTS, *_nf4("$2", "$0", "$1"))
#: $4: four bytes of two codes -> $0, $1: `nf4_halves` of the low codes less 1, $2, $3: of the high codes.
NF4_WORD: str = _program(
    *_NF4_CONSTANTS,
    *_nf4("$4", "$0", "$2"),
    "shr.u32 s, $4, 16;",
    *_nf4("s", "$1", "$3"),
    "mov.b32 t, 0xBC00BC00;",
    *(f"add.rn.f16x2 ${i}, ${i}, t;" for i in range(4)),
)
#: $8, $9: two words of four bytes of NF4 codes -> $0 to $3: `nf4_halves` of the low codes of their first to fourth
#: bytes, $4 to $7: of the high codes.
NF4_WORDS: str = _program(
    *_NF4_CONSTANTS,
    *(
        line
        for i, selector in ((0, "0x5140"), (2, "0x7362"))
        for line in (
            f"prmt.b32 s, $8, $9, {selector};",
            *_nf4("s", f"${i}", f"${4 + i}"),
            "shr.u32 s, s, 16;",
            *_nf4("s", f"${i + 1}", f"${5 + i}"),
        )
    ),
)
