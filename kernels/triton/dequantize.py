"""dequantize in Triton: each byte of codes is read once, each value written once.

Bit-exact with the reference of `caramba_fast.ops.dequantize`. Kinds by channel have a kernel of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import Format, resolve

from .casts import from_float32
from .dequantize_by_channel import dequantize as dequantize_by_channel
from .formats import decode_bytes, decode_nibbles
from .launch import EXACT, as_rows, has_ptx, on_device

#: Values of one program: with 4 warps a thread reads 16 bytes of 4-bit codes (32 of 8-bit ones)
#: and writes 32 values, all in registers.
VALUES_PER_PROGRAM = 4096
NUM_WARPS = 4


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    codes_stride,
    scales_stride,
    n_blocks,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    PTX: tl.constexpr,
):
    """codes and scales by rows, with row strides -> out, contiguous; BLOCKS blocks a program."""
    WIDTH: tl.constexpr = BLOCK * BITS // 8
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    row = block // BLOCKS_PER_ROW
    column = block % BLOCKS_PER_ROW
    lane = tl.arange(0, WIDTH)[None, :]
    source = codes_ptr + (row * codes_stride + column * WIDTH)[:, None] + lane
    codes = tl.load(source, mask=inside[:, None], other=0)
    scale = tl.load(scales_ptr + row * scales_stride + column, mask=inside, other=0.0)
    scale = scale.to(tl.float32)[:, None]
    target = out_ptr + block[:, None] * BLOCK + lane
    if BITS == 8:
        value = decode_bytes(codes, FORMAT) * scale
    else:
        value, high = decode_nibbles(codes, FORMAT, PTX)
        value *= scale
        high = from_float32(high * scale, out_ptr.dtype.element_ty)
        tl.store(target + WIDTH, high, mask=inside[:, None])
    tl.store(target, from_float32(value, out_ptr.dtype.element_ty), mask=inside[:, None])


def constants(form: Format, dim: int, block: int, ptx: bool) -> dict[str, int | bool]:
    """The constexpr arguments for rows of ``dim`` values."""
    return {
        "BLOCKS_PER_ROW": dim // block,
        "BLOCK": block,
        "BLOCKS": VALUES_PER_PROGRAM // block,
        "FORMAT": form.index,
        "BITS": form.bits,
        "PTX": ptx,
    }


def dequantize(
    codes: Tensor, scales: Tensor, kind: str, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """codes (..., code width), scales (..., head_dim / block) -> (..., head_dim) of ``dtype``."""
    form = resolve(kind)
    if form.by_channel:
        return dequantize_by_channel(codes, scales, form.name, head_dim, dtype)
    out = torch.empty((*codes.shape[:-1], head_dim), dtype=dtype, device=codes.device)
    n_blocks = scales.numel()
    if n_blocks == 0:
        return out
    code_rows, scale_rows = as_rows(codes), as_rows(scales)
    fixed = constants(form, head_dim, head_dim // scales.shape[-1], has_ptx())
    grid = (triton.cdiv(n_blocks, int(fixed["BLOCKS"])),)
    strides = code_rows.stride(0), scale_rows.stride(0)
    with on_device(codes):
        dequantize_kernel[grid](
            code_rows, scale_rows, out, *strides, n_blocks, **fixed, num_warps=NUM_WARPS, **EXACT
        )
    return out
