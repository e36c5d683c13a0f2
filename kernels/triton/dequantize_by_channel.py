"""dequantize of kinds by channel in Triton: a program restores some channels of one group of tokens.

Bit-exact with the reference of `caramba_fast.ops.dequantize`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import resolve

from .casts import from_float32
from .formats import low_masks
from .launch import EXACT, as_rows, on_device
from .quantize_by_channel import constants, num_warps, programs

#: Values of one program: with 4 warps a thread reads 16 bytes of 4-bit codes and writes 32 values.
VALUES_PER_PROGRAM, THREAD_VALUES = 4096, 32


@triton.jit
def _restored(codes, scale, zeros, column, inside, dtype: tl.constexpr):
    """codes (G, n) float32 -> zero + |scale| * code."""
    step = tl.abs(scale.to(tl.float32))
    zero = tl.load(zeros + column, mask=inside, other=0.0).to(tl.float32)
    return from_float32(zero[None, :] + step[None, :] * codes, dtype)


@triton.jit
def dequantize_channel_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    codes_stride,
    scales_stride,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    PACKED: tl.constexpr,
    BITS: tl.constexpr,
):
    """codes (rows, width) and scales (groups, 2 DIM), with row strides -> out (rows, DIM), contiguous."""
    SIZE: tl.constexpr = PACKED * BITS // 8
    PARTS: tl.constexpr = (DIM + BLOCKS * PACKED - 1) // (BLOCKS * PACKED)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    group = tl.program_id(0).to(tl.int64) // PARTS
    byte = tl.program_id(0) % PARTS * (BLOCKS * SIZE) + tl.arange(0, BLOCKS * SIZE)
    column = byte // SIZE * PACKED + byte % SIZE
    token = group * GROUP + tl.arange(0, GROUP)
    inside = column < DIM
    codes = tl.load(
        codes_ptr + token[:, None] * codes_stride + byte[None, :], mask=inside[None, :], other=0
    )
    scales = scales_ptr + group * scales_stride
    target = out_ptr + token[:, None] * DIM + column[None, :]
    scale = tl.load(scales + column, mask=inside, other=0.0)
    codes = codes.to(tl.int32)
    if BITS == 4:
        other = tl.load(scales + column + SIZE, mask=inside, other=0.0)
        masks = low_masks(scale, other)[None, :]
        above = (codes & ~masks).to(tl.float32) * 0.0625
        high = _restored(above, other, scales + DIM, column + SIZE, inside, dtype)
        tl.store(target + SIZE, high, mask=inside[None, :])
        codes = codes & masks
    tl.store(
        target,
        _restored(codes.to(tl.float32), scale, scales + DIM, column, inside, dtype),
        mask=inside[None, :],
    )


def dequantize(
    codes: Tensor, scales: Tensor, kind: str, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """codes (..., tokens, width) and scales (..., groups, 2 head_dim) -> (..., tokens, head_dim) of ``dtype``."""
    form = resolve(kind)
    out = torch.empty((*codes.shape[:-1], head_dim), dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    code_rows, scale_rows = as_rows(codes), as_rows(scales)
    group = code_rows.shape[0] // scale_rows.shape[0]
    fixed = constants(form, head_dim, group, VALUES_PER_PROGRAM)
    with on_device(codes):
        dequantize_channel_kernel[(programs(fixed, scale_rows.shape[0]),)](
            code_rows, scale_rows, out, code_rows.stride(0), scale_rows.stride(0), **fixed,
            num_warps=num_warps(fixed, THREAD_VALUES), **EXACT,
        )  # fmt: skip
    return out
