"""What is measured: one row a case (op, kind, dtype, shape, block).

An op's entry says how to make its inputs, how to call it, and what is compared: its backends, and a
plain torch copy that moves the same number of bytes, which is the bandwidth to reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba_fast.formats import QUANTIZED_KINDS
from caramba_fast.ops.dequantize import dequantize
from caramba_fast.ops.quantize import quantize
from caramba_fast.ops.registry import use_backend

from .parity import same_bits

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
#: (batch, kv heads, tokens, head_dim); the full sizes do not fit into any cache.
SHAPES = {
    ("cpu", False): ((1, 8, 4096, 128),),
    ("cpu", True): ((1, 8, 256, 128),),
    ("cuda", False): ((8, 8, 32768, 128), (1, 8, 4096, 128)),
    ("cuda", True): ((1, 8, 32768, 128),),
}
COPY = "copy"


@dataclass(frozen=True)
class Case:
    """One row: an op on one kind, dtype (of the unquantized side), shape and block."""

    op: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    block: int


@dataclass(frozen=True)
class Implementation:
    """One thing that is timed; ``graph``: whether a CUDA graph can record it."""

    name: str
    call: Callable[[], Any]
    graph: bool = True


@dataclass(frozen=True)
class Workload:
    """A case with its inputs made: ``call`` runs the op on the backend in force."""

    call: Callable[[], tuple[Tensor, ...]]
    moved_bytes: int


def _quantize(case: Case, device: torch.device) -> Workload:
    x = torch.randn(case.shape, device=device).to(DTYPES[case.dtype])
    codes, scales = quantize(x, case.kind, case.block)
    moved = x.nbytes + codes.nbytes + scales.nbytes
    return Workload(lambda: quantize(x, case.kind, case.block), moved)


def _dequantize(case: Case, device: torch.device) -> Workload:
    x = torch.randn(case.shape, device=device)
    codes, scales = quantize(x, case.kind, case.block)
    dtype, dim = DTYPES[case.dtype], case.shape[-1]
    moved = codes.nbytes + scales.nbytes + x.numel() * dtype.itemsize
    return Workload(lambda: (dequantize(codes, scales, case.kind, dim, dtype),), moved)


WORKLOADS: dict[str, Callable[[Case, torch.device], Workload]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
}


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The rows for a device; ``quick`` takes small shapes."""
    for op in WORKLOADS:
        for shape in SHAPES[device.type, quick]:
            for dtype in DTYPES:
                for kind in QUANTIZED_KINDS:
                    yield Case(op, kind, dtype, shape, block=32)


def differences(work: Workload, backends: list[str]) -> list[str]:
    """Backends whose results are not the reference's, bit for bit."""
    with use_backend("reference"):
        wanted = work.call()
    found = []
    for name in backends:
        with use_backend(name):
            pairs = zip(work.call(), wanted, strict=True)
            if not all(bool(same_bits(got, right).all()) for got, right in pairs):
                found.append(name)
    return found


def implementations(
    work: Workload, backends: list[str], device: torch.device
) -> list[Implementation]:
    """The backends and the copy that moves as many bytes (half read, half written)."""
    source = torch.randint(0, 256, (work.moved_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # The reference makes its tables on the host when called, which a graph cannot record.
    listed = [
        Implementation(name, _on_backend(name, work.call), graph=name != "reference")
        for name in backends
    ]
    return [*listed, Implementation(COPY, lambda: target.copy_(source))]


def _on_backend(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with use_backend(name):
            return call()

    return run
