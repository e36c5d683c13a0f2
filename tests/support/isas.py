"""Instruction sets of the C++ extension: which are available, and runs under another."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from caramba_fast.ops import registry

ISA_VARIABLE = "CARAMBA_FAST_CPU_ISA"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def isa_in_use() -> str | None:
    library = ctypes.CDLL(str(registry.library()))
    library.caramba_fast_cpu_isa.restype = ctypes.c_char_p
    name = library.caramba_fast_cpu_isa()
    return name.decode() if name else None


def multiplies_integers() -> bool:
    """Whether products with a quantized stream are computed with integers."""
    return isa_in_use() not in (None, "portable", "neon")


def in_subprocess(isa: str, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {ISA_VARIABLE: isa}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def expected_isas() -> list[str]:
    """The sets this CPU supports according to torch, narrowest first."""
    if platform.machine() in ("aarch64", "arm64"):
        return ["neon"]
    known = ["portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni"]
    isas = known[: {"AVX2": 3, "AVX512": 5}.get(torch.backends.cpu.get_cpu_capability(), 1)]
    cpuinfo = Path("/proc/cpuinfo")  # torch does not report AVX-VNNI
    lacking = set() if torch.cpu._is_vnni_supported() else {"avx512_vnni"}
    if not cpuinfo.exists() or "avx_vnni" not in cpuinfo.read_text().split():
        lacking.add("avx2_vnni")
    return [isa for isa in isas if isa not in lacking]
