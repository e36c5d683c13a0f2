"""What a compiled Triton kernel uses: registers, spills, shared memory, instructions.

Read from the binary itself (NVIDIA: ``cuobjdump``, which Triton ships) or from the assembly's own
notes (AMD), so no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Binary:
    """One kernel on one target.

    Attributes:
        registers: vector registers of a thread.
        spills: 0 if nothing was spilled (NVIDIA: bytes of local memory; AMD: registers).
        shared_bytes: shared memory (LDS) of a block.
        lines: machine instructions in order, padding after the end excluded.
        jumps: (index of a branch, index of the instruction it goes to).
    """

    registers: int
    spills: int
    shared_bytes: int
    lines: list[str]
    jumps: list[tuple[int, int]]


def inspect(compiled: CompiledKernel) -> Binary:
    """Takes apart what `triton.compile` returned."""
    if "cubin" in compiled.asm:
        return nvidia(_dump(compiled.asm["cubin"]), compiled.metadata.shared)
    return amd(compiled.asm["amdgcn"], compiled.metadata.shared)


def nvidia(listing: str, shared_bytes: int) -> Binary:
    """Reads the resource usage and the SASS that cuobjdump prints."""
    usage = dict(re.findall(r"(\w+):(\d+)", listing))
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;", listing, re.MULTILINE)
    at = {int(address, 16): i for i, (address, _) in enumerate(found)}
    lines = [text for _, text in found]
    while lines and (lines[-1] == "NOP" or lines[-1].startswith("BRA")):
        lines.pop()
    targets = ((i, re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) for i, text in enumerate(lines))
    return Binary(
        registers=int(usage["REG"]),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=shared_bytes,
        lines=lines,
        jumps=[(i, at[int(target[1], 16)]) for i, target in targets if target],
    )


def amd(assembly: str, shared_bytes: int) -> Binary:
    """Reads AMD assembly and the notes after it."""
    notes = dict(re.findall(r"\.(\w+):\s+(\d+)$", assembly, re.MULTILINE))
    body = assembly.split(".Lfunc_end", maxsplit=1)[0]
    lines: list[str] = []
    labels: dict[str, int] = {}
    for label, text in re.findall(
        r"^(?:(\.LBB\w+):|\t((?:[vs]|ds|global|buffer|flat)_.*))", body, re.M
    ):
        if label:
            labels[label] = len(lines)
        else:
            lines.append(text)
    while lines and lines[-1].startswith("s_nop"):
        lines.pop()
    targets = ((i, re.match(r"s_c?branch\w*\s+(\.LBB\w+)", text)) for i, text in enumerate(lines))
    return Binary(
        registers=int(notes["vgpr_count"]),
        spills=int(notes["vgpr_spill_count"]) + int(notes["sgpr_spill_count"]),
        shared_bytes=shared_bytes,
        lines=lines,
        jumps=[(i, labels[target[1]]) for i, target in targets if target],
    )


def _dump(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
