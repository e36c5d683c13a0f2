"""quantize in Triton: one read of the values, one write of codes and scales.

Bit-exact with the reference of `caramba_fast.ops.quantize`. Kinds by channel have a kernel of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import SCALE_DTYPE, Format, resolve

from .casts import to_float32
from .formats import FITS, encode_bytes, encode_nibbles
from .launch import EXACT, as_rows, on_device
from .quantize_by_channel import quantize as quantize_by_channel

#: Values of one program: with 4 warps 32 a thread, so four 16-byte loads of fp16 in flight each,
#: and the whole tile in registers (no loop, no second read). "mse" is bound by arithmetic, and holds codes
#: and products beside the values: with 16 a thread nothing spills.
VALUES_PER_PROGRAM = {"amax": 4096, "mse": 2048}
NUM_WARPS = 4


@triton.jit
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    row_stride,
    n_blocks,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    FIT: tl.constexpr,
):
    """x (rows, dim) with ``row_stride`` -> contiguous codes and scales; BLOCKS blocks a program."""
    WIDTH: tl.constexpr = BLOCK * BITS // 8
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    start = block // BLOCKS_PER_ROW * row_stride + block % BLOCKS_PER_ROW * BLOCK
    lane = tl.arange(0, WIDTH)[None, :]
    source = x_ptr + start[:, None] + lane
    x = to_float32(tl.load(source, mask=inside[:, None], other=0.0))
    if BITS == 8:
        codes, scale = encode_bytes(x, FORMAT, FIT)
    else:
        high = to_float32(tl.load(source + WIDTH, mask=inside[:, None], other=0.0))
        codes, scale = encode_nibbles(x, high, FORMAT, FIT)
    target = codes_ptr + block[:, None] * WIDTH + lane
    tl.store(target, codes.to(codes_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(scales_ptr + block, scale.to(scales_ptr.dtype.element_ty), mask=inside)


def constants(form: Format, dim: int, block: int, fit: str) -> dict[str, int | str]:
    """The constexpr arguments for rows of ``dim`` values."""
    return {
        "BLOCKS_PER_ROW": dim // block,
        "BLOCK": block,
        "BLOCKS": VALUES_PER_PROGRAM[fit] // block,
        "FORMAT": form.index,
        "BITS": form.bits,
        "FIT": fit,
    }


def quantize(x: Tensor, kind: str, block: int, fit: str = "amax") -> tuple[Tensor, Tensor]:
    """x (..., dim) fp32, fp16 or bf16 -> codes (..., code width) and scales (..., dim / block)."""
    form = resolve(kind)
    if fit not in FITS:
        raise ValueError(f"fit is {fit!r}; allowed are {', '.join(FITS)}")
    if form.by_channel:
        return quantize_by_channel(x, form.name, block, fit)
    *lead, dim = x.shape
    codes = torch.empty((*lead, form.code_width(dim)), dtype=form.dtype, device=x.device)
    scales = torch.empty((*lead, dim // block), dtype=SCALE_DTYPE, device=x.device)
    n_blocks = scales.numel()
    if n_blocks == 0:
        return codes, scales
    rows = as_rows(x)
    fixed = constants(form, dim, block, fit)
    grid = (triton.cdiv(n_blocks, VALUES_PER_PROGRAM[fit] // block),)
    with on_device(x):
        quantize_kernel[grid](
            rows, codes, scales, rows.stride(0), n_blocks, **fixed, num_warps=NUM_WARPS, **EXACT
        )
    return codes, scales
