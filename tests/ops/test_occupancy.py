"""How many programs an SM runs at once follows from what the compiled kernel uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from caramba_fast.kernels import occupancy
from caramba_fast.kernels.occupancy import Multiprocessor, resident

#: 228 KiB (H100) and 164 (A100) of shared memory and 2048 threads; sm_89 has 100 and 1536.
H100, A100 = Multiprocessor(228 * 1024, 2048), Multiprocessor(164 * 1024, 2048)
ADA = Multiprocessor(100 * 1024, 1536)


@pytest.mark.parametrize(("registers", "shared", "warps", "sm", "programs"), [
    (168, 57344, 4, H100, 3), (176, 57344, 4, H100, 2), (168, 57344, 4, A100, 2), (168, 106496, 4, H100, 2),
    (189, 106496, 4, H100, 2), (128, 0, 8, H100, 2), (32, 0, 4, H100, 16), (32, 0, 4, ADA, 12), (255, 0, 4, ADA, 2),
    (168, 36864, 2, H100, 6), (168, 90 * 1024, 4, ADA, 1), (255, 0, 16, A100, 1),
])  # fmt: skip
def test_programs_by_registers_shared_memory_and_threads(registers, shared, warps, sm, programs):
    """As CUDA's occupancy calculator has it."""
    assert resident(registers, shared, warps, sm) == programs


class Kernel:
    """Stands in for one that Triton compiles."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def warmup(self, *args: Any, **options: Any) -> Any:
        self.compiled.append((args, options))
        loaded = SimpleNamespace(
            n_regs=168, metadata=SimpleNamespace(shared=57344, num_warps=4), __getitem__=None
        )
        return type("Compiled", (SimpleNamespace,), {"__getitem__": lambda *_: None})(
            **vars(loaded)
        )


def test_a_kernel_is_compiled_once_for_each_key(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(occupancy.Multiprocessor, "of", lambda _: H100)
    monkeypatch.setattr(occupancy, "_known", {})
    kernel, gpu = Kernel(), torch.device("cuda")
    for key in ("a", "a", "b"):
        assert occupancy.resident_of(key, gpu, kernel, lambda: (1, 2), num_warps=4) == 3
    assert kernel.compiled == [((1, 2), {"grid": (1,), "num_warps": 4})] * 2


def test_where_nothing_is_compiled_it_is_assumed():
    kernel = Kernel()
    assert (
        occupancy.resident_of("a", torch.device("cpu"), kernel, tuple) == occupancy.ASSUMED_RESIDENT
    )
    assert not kernel.compiled


def test_what_is_compiled_to_be_asked_is_what_is_launched():
    """Otherwise each layer's first step would compile twice; with Triton itself, and a stand-in for its driver."""
    tests = str(Path(__file__).parents[1])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "support.residency"], env={**environment, "PYTHONPATH": tests},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0: partials_kernel compiled 1, 1584 at once, launched",
        "-1: balanced_kernel compiled 1, 1584 at once, launched",
    ]
