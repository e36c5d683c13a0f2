"""The main loop of a kernel in its machine code: its length, its matrix products, how it loads, where it waits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from caramba_fast.bench.kernels.binary import Binary

#: HMMA and IMMA (mma.sync), HGMMA, IGMMA and QGMMA (wgmma), UTCHMMA and its like (tcgen05); AMD's MFMA.
MATRIX = re.compile(r"\b(?:UTC)?[A-Z]{1,2}MMA\b|\bv_s?mfmac?_")
#: Copies from global to shared memory in the background.
COPY = re.compile(r"\bLDGSTS\b")
#: Bytes a thread by the suffix of a load; SASS without one is 4. ``LTC128B`` is a hint to the cache.
SASS_LOAD = re.compile(r"\bLDG(?:STS)?\b([.\w]*)")
SASS_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
AMD_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_)?(dword(?:x\d)?|u?short|[us]byte)")
#: Bytes a thread has to load at once where K or V is quantized; the tail's may be loaded one by one.
NARROWEST_LOAD = 8
AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2}
#: What costs more than a slot, by column of the table: all warps of a program wait for each other; a warp waits for its
#: own writes; lanes exchange registers; shared memory is read or written by less than a word a thread.
COSTLY = {
    "barriers": re.compile(r"\bBAR\b|\bs_barrier"),
    "fences": re.compile(r"\b(?:MEMBAR|FENCE)\b|\b(?:buffer|global)_(?:wbl2|inv|wb|gl0_inv)"),
    "shuffles": re.compile(r"\bSHFL\b|\bds_(?:bpermute|permute|swizzle)|_dpp\b"),
    "narrow_shared": re.compile(
        r"\b(?:LDS|STS)\.[US](?:8|16)\b|\bds_(?:read|write)_[uib]+(?:8|16)"
    ),
}


@dataclass(frozen=True)
class Loop:
    """The main loop of a kernel.

    Attributes:
        instructions: how many there are.
        matrix: how many of them multiply matrices.
        loads: bytes a thread gets from each load of global memory.
        costly: how many there are of each of `COSTLY`.
    """

    instructions: int
    matrix: int
    loads: tuple[int, ...]
    costly: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COSTLY, 0))

    def cover(self, needed: float) -> list[int]:
        """The widest loads that bring ``needed`` bytes a thread.

        A stream's scales, and what else a loop reads, are fewer bytes than its codes: among the widest loads
        that make up all codes is one of the narrowest that codes are read with.
        """
        found: list[int] = []
        for width in sorted(self.loads, reverse=True):
            if sum(found) >= needed:
                break
            found.append(width)
        return found


def main_loop(binary: Binary) -> Loop:
    """The longest loop that multiplies matrices; empty if none does.

    A loop is what lies between a backward branch and its target; one that holds another does not count. Of
    several (the codes', the tail's, the sinks') the longest that copies to shared memory in the background
    is taken, as only the codes' does; where none does (AMD), of those with wide loads before those without.
    """
    ends: dict[int, int] = {}  # by first instruction: a loop may go on from several places
    for at, target in binary.jumps:
        if target < at:
            ends[target] = max(at, ends.get(target, 0))
    loops = {
        (start, end): binary.lines[start : end + 1]
        for start, end in ends.items()
        if any(MATRIX.search(line) for line in binary.lines[start : end + 1])
    }
    inner = [
        body
        for (start, end), body in loops.items()
        if not any(start < other and last < end for other, last in loops)
    ]
    copying = [body for body in inner if any(COPY.search(line) for line in body)]
    body = max(
        copying or inner, key=lambda x: (_widest_load(x) >= NARROWEST_LOAD, len(x)), default=[]
    )
    return Loop(
        instructions=len(body),
        matrix=sum(bool(MATRIX.search(line)) for line in body),
        loads=tuple(width for line in body if (width := load_width(line))),
        costly={
            name: sum(bool(form.search(line)) for line in body) for name, form in COSTLY.items()
        },
    )


def _widest_load(body: Sequence[str]) -> int:
    return max((load_width(line) for line in body), default=0)


def allocations(ttgir: str) -> int:
    """How often Triton's GPU IR takes shared memory within loops, again for every tile.

    What is taken once, before a loop, is not counted.
    """
    found, loops = 0, list[int]()
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        goes_on = line.lstrip().startswith(("} do", "^"))  # the second part of a while
        while loops and line.strip() and indent <= loops[-1] and not goes_on:
            loops.pop()
        if re.search(r"\bscf\.(?:for|while)\b", line):
            loops.append(indent)
        found += bool(loops) and "ttg.local_alloc" in line
    return found


def load_width(line: str) -> int:
    """Bytes a thread loads from global memory; 0 for another instruction."""
    if sass := SASS_LOAD.search(line):
        return next((SASS_WIDTHS[x] for x in sass[1].split(".") if x in SASS_WIDTHS), 4)
    if amd := AMD_LOAD.match(line):
        return AMD_WIDTHS.get(amd[1], 1)
    return 0


def typical(widths: list[int]) -> int:
    """The width that brings the most bytes; 0 without loads."""
    bytes_by = Counter[int]()
    for width in widths:
        bytes_by[width] += width
    return max(bytes_by, key=lambda width: (bytes_by[width], width), default=0)
