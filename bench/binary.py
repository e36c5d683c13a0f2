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
class Resources:
    """One kernel on one target.

    Attributes:
        registers: vector registers of a thread.
        spills: 0 if nothing was spilled (NVIDIA: bytes of local memory; AMD: registers).
        shared_bytes: shared memory (LDS) of a block.
        instructions: machine instructions of the whole kernel, padding excluded.
    """

    registers: int
    spills: int
    shared_bytes: int
    instructions: int


def resources(compiled: CompiledKernel) -> Resources:
    """Inspects what `triton.compile` returned."""
    if "cubin" in compiled.asm:
        return _nvidia(compiled.asm["cubin"], compiled.metadata.shared)
    return _amd(compiled.asm["amdgcn"], compiled.metadata.shared)


def sass(cubin: bytes) -> list[str]:
    """The machine instructions of an NVIDIA binary in order, padding after the end excluded."""
    lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", _dump(cubin, "-sass"), re.MULTILINE)
    while lines and (lines[-1] == "NOP" or lines[-1].startswith("BRA")):
        lines.pop()
    return lines


def loop_instructions(compiled: CompiledKernel) -> int:
    """Instructions of the main loop: the longest that multiplies matrices; 0 on AMD.

    A loop is what lies between a backward branch and its target. Of two nested ones the inner counts,
    and of several (the codes', the tail's, the sinks') the longest that copies to shared memory in
    the background, as only the codes' does.
    """
    if "cubin" not in compiled.asm:
        return 0
    found = re.findall(
        r"^\s*/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;", _dump(compiled.asm["cubin"], "-sass"), re.M
    )
    lines = [(int(address, 16), text) for address, text in found]
    bodies = []
    for address, text in lines:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            bodies.append([x for at, x in lines if int(target[1], 16) <= at <= address])
    wanted = [body for body in bodies if any("MMA" in x for x in body)]
    copying = [body for body in wanted if any("LDGSTS" in x for x in body)]
    return max((len(body) for body in copying or wanted), default=0)


def _nvidia(cubin: bytes, shared_bytes: int) -> Resources:
    usage = dict(re.findall(r"(\w+):(\d+)", _dump(cubin, "-res-usage")))
    return Resources(
        registers=int(usage["REG"]),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=shared_bytes,
        instructions=len(sass(cubin)),
    )


def _amd(assembly: str, shared_bytes: int) -> Resources:
    notes = dict(re.findall(r"\.(\w+):\s+(\d+)$", assembly, re.MULTILINE))
    body = assembly.split("s_endpgm", maxsplit=1)[0]
    return Resources(
        registers=int(notes["vgpr_count"]),
        spills=int(notes["vgpr_spill_count"]) + int(notes["sgpr_spill_count"]),
        shared_bytes=shared_bytes,
        instructions=len(re.findall(r"^\t(?:[vs]|ds|global|buffer|flat)_", body, re.MULTILINE)),
    )


def _dump(cubin: bytes, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), flag, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
