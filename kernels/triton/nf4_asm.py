"""PTX that turns four bytes of NF4 codes into eight float32 levels without touching memory.

``prmt`` picks four bytes out of eight by four 3-bit indices. The levels are held as four planes,
one for each byte of a float32, of 16 entries each; a plane is looked up for four codes with two
``prmt`` (entries 0-7 and 8-15) and a bitwise choice by the codes' high bit. Eight more ``prmt``
transpose four planes into four floats. That is 6.5 instructions a value, all in registers; a tree
of selects needs 19.
"""

from __future__ import annotations

import struct

from caramba_fast.formats import NF4_LEVELS

#: ``lop3`` table of ``c ? b : a``, bit by bit.
CHOOSE = 0xD8


def plane_words(plane: int) -> list[int]:
    """The 16 levels' byte ``plane`` (0 the lowest) as four little-endian 32-bit words."""
    column = bytes(struct.pack("<f", level)[plane] for level in NF4_LEVELS)
    return list(struct.unpack("<4I", column))


def _selectors(high: bool) -> list[str]:
    """$8 -> ``s``: four 3-bit indices, a nibble each; ``m``: 0xFF in each byte with code >= 8."""
    # prmt with bit 3 of an index set repeats the sign of the byte it picks.
    if high:
        masks = ["prmt.b32 m, $8, $8, 0xBA98;", "shr.u32 t, $8, 4;", "and.b32 t, t, 0x0F0F0F0F;"]
    else:
        masks = ["shl.b32 t, $8, 4;", "prmt.b32 m, t, t, 0xBA98;", "and.b32 t, $8, 0x0F0F0F0F;"]
    return [
        *masks,
        "shr.u32 s, t, 4;",
        "or.b32 s, s, t;",
        "prmt.b32 s, s, s, 0x0020;",
        "and.b32 s, s, 0x7777;",
    ]


def _look_up(plane: int) -> list[str]:
    w0, w1, w2, w3 = (f"0x{word:08X}" for word in plane_words(plane))
    return [
        f"prmt.b32 a, {w0}, {w1}, s;",
        f"prmt.b32 b, {w2}, {w3}, s;",
        f"lop3.b32 p{plane}, a, b, m, 0x{CHOOSE:02X};",
    ]


def _transpose(first_output: int) -> list[str]:
    """Planes p0..p3, byte i of each -> output i."""
    lines = []
    for pair, interleave in ((0, "0x5140"), (2, "0x7362")):
        lines += [
            f"prmt.b32 a, p0, p1, {interleave};",
            f"prmt.b32 b, p2, p3, {interleave};",
            f"prmt.b32 ${first_output + pair}, a, b, 0x5410;",
            f"prmt.b32 ${first_output + pair + 1}, a, b, 0x7632;",
        ]
    return lines


def _program() -> str:
    lines = [".reg .b32 t, s, m, a, b, p0, p1, p2, p3;"]
    for high in (False, True):
        lines += _selectors(high)
        for plane in range(4):
            lines += _look_up(plane)
        lines += _transpose(4 if high else 0)
    return "{\n" + "\n".join(lines) + "\n}"


#: Input $8: four packed bytes. Outputs $0-$3: the levels of their low codes, $4-$7: of the high.
NF4_LOOKUP: str = _program()
