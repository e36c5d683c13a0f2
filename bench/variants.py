"""The kernels that are compiled ahead of time: one row a specialization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from caramba_fast.formats import QUANTIZED_KINDS, resolve
from caramba_fast.kernels import dequantize, quantize

#: The width of rows; only an address calculation depends on it.
HEAD_DIM = 128
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "q8_0": "*i8", "q4_0": "*u8", "nf4": "*u8"}


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel.

    Attributes:
        op, kind, dtype, block, fit: what it serves; dtype is that of the unquantized side, fit empty for
            an op that finds no scales.
        kernel: the ``@triton.jit`` function.
        arguments: types of the run-time arguments, in Triton's spelling.
        constants: the constexpr arguments. ``PTX``, if there, becomes true on NVIDIA only.
        num_warps: warps of a program.
        values: values a program quantizes or restores; instructions are counted per value.
    """

    op: str
    kind: str
    dtype: str
    block: int
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    values: int
    fit: str = ""

    def on(self, backend: str) -> dict[str, Any]:
        """The constants for "cuda" or "hip"."""
        return self.constants | ({"PTX": backend == "cuda"} if "PTX" in self.constants else {})


def _quantize(kind: str, dtype: str, block: int, fit: str = "amax") -> Variant:
    return Variant(
        op="quantize",
        kind=kind,
        dtype=dtype,
        block=block,
        kernel=quantize.quantize_kernel,
        arguments={
            "x_ptr": POINTERS[dtype],
            "codes_ptr": POINTERS[kind],
            "scales_ptr": "*fp16",
            "row_stride": "i32",
            "n_blocks": "i32",
        },
        constants=quantize.constants(resolve(kind), HEAD_DIM, block, fit),
        num_warps=quantize.NUM_WARPS,
        values=quantize.VALUES_PER_PROGRAM[fit],
        fit=fit,
    )


def _dequantize(kind: str, dtype: str, block: int) -> Variant:
    return Variant(
        op="dequantize",
        kind=kind,
        dtype=dtype,
        block=block,
        kernel=dequantize.dequantize_kernel,
        arguments={
            "codes_ptr": POINTERS[kind],
            "scales_ptr": "*fp16",
            "out_ptr": POINTERS[dtype],
            "codes_stride": "i32",
            "scales_stride": "i32",
            "n_blocks": "i32",
        },
        constants=dequantize.constants(resolve(kind), HEAD_DIM, block, ptx=True),
        num_warps=dequantize.NUM_WARPS,
        values=dequantize.VALUES_PER_PROGRAM,
    )


def _table() -> Iterator[Variant]:
    for build in (_quantize, _dequantize):
        for kind in QUANTIZED_KINDS:
            yield build(kind, "fp16", 32)
            yield build(kind, "fp32", 32)
        yield build("q4_0", "fp16", 64)
    for kind in QUANTIZED_KINDS:
        yield _quantize(kind, "fp16", 32, "mse")
    yield _quantize("q4_0", "fp32", 128, "mse")


VARIANTS: tuple[Variant, ...] = tuple(_table())
