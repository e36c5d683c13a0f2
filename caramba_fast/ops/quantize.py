"""quantize: values to codes and block scales (the formats of `caramba_fast.formats`).

Scales are computed in float32 and used unrounded for the codes; the fp16 that is stored is their
rounding. A block of zeros gets scale 0; a block with a NaN or an infinity gets a NaN scale, so
that damage stays visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.formats import NF4_LEVELS, SCALE_DTYPE, check_block
from caramba_fast.ops import checks
from caramba_fast.ops.registry import register

SCHEMA = "(Tensor x, str kind, int block) -> (Tensor codes, Tensor scales)"


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale; 0 for a scale of 0 or so small (below 3e-39) that its reciprocal overflows.

    The fp16 of such a scale is 0 anyway: the block decodes to zeros.
    """
    inverse = 1.0 / scale
    return torch.where(inverse.isinf(), torch.zeros_like(scale), inverse)


def encode_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks (..., n) fp32 -> codes (..., n) int8 and unrounded scale (..., 1)."""
    # By a tensor: CUDA multiplies by the reciprocal of a Python number, which rounds differently.
    scale = blocks.abs().amax(-1, keepdim=True) / blocks.new_full((), 127.0)
    scaled = blocks * _reciprocal(scale)
    whole = scaled.trunc()  # round half away from zero, without the double rounding of x + 0.5
    away = ((scaled - whole).abs() >= 0.5).to(scaled.dtype)
    return (whole + away.copysign(scaled)).clamp(-127, 127).to(torch.int8), scale


def encode_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks (..., n) fp32 -> codes (..., n) uint8 in 0..15 and unrounded scale (..., 1)."""
    first_largest = blocks.abs().argmax(-1, keepdim=True)
    scale = blocks.gather(-1, first_largest) / -8.0
    shifted = blocks * _reciprocal(scale) + 8.5
    return shifted.trunc().clamp(0, 15).to(torch.uint8), scale


def encode_nf4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks (..., n) fp32 -> level indices (..., n) uint8 and unrounded scale (..., 1)."""
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=blocks.device)
    midpoints = (levels[1:] + levels[:-1]) / 2
    scale = blocks.abs().amax(-1, keepdim=True)
    scaled = (blocks * _reciprocal(scale)).contiguous()
    return torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8), scale


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes (..., n) in 0..15 -> bytes (..., n/2): value j low, value j + n/2 high."""
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


_ENCODERS = {"q8_0": encode_q8_0, "q4_0": encode_q4_0, "nf4": encode_nf4}


def reference(x: Tensor, kind: str, block: int) -> tuple[Tensor, Tensor]:
    """The oracle: pure torch, any device."""
    form = checks.quantized_kind(kind)
    blocks = x.to(torch.float32).unflatten(-1, (x.shape[-1] // block, block))
    finite = blocks.isfinite().all(-1, keepdim=True)
    blocks = torch.where(finite, blocks, torch.zeros_like(blocks))
    codes, scale = _ENCODERS[form.name](blocks)
    if form.bits == 4:
        codes = pack_nibbles(codes)
    scale = torch.where(finite, scale, torch.full_like(scale, torch.nan))
    return codes.flatten(-2), scale.squeeze(-1).to(SCALE_DTYPE)


def fake(x: Tensor, kind: str, block: int) -> tuple[Tensor, Tensor]:
    form = checks.quantized_kind(kind)
    *lead, dim = x.shape
    codes = x.new_empty((*lead, form.code_width(dim)), dtype=form.dtype)
    return codes, x.new_empty((*lead, dim // block), dtype=SCALE_DTYPE)


op = register("quantize", SCHEMA, reference=reference, fake=fake)


def quantize(x: Tensor, kind: object, block: int = 32) -> tuple[Tensor, Tensor]:
    """Quantizes the last dimension of ``x`` in blocks.

    Args:
        x: (..., dim) float32, float16 or bfloat16; ``block`` must divide dim.
        kind: "q8_0" ("q8"), "q4_0" ("q4"), "nf4", or the `KVCacheKind`.
        block: 32, 64 or 128 values to a scale.

    Returns:
        codes (..., dim) int8 for q8_0, (..., dim / 2) uint8 for q4_0 and nf4; and scales
        (..., dim / block) float16.

    Raises:
        TypeError: ``x`` is not a tensor of an allowed dtype.
        ValueError: an unknown or unquantized kind, or a block that does not divide dim.
    """
    form = checks.quantized_kind(kind)
    checks.float_tensor("x", x)
    if x.ndim == 0:
        raise ValueError("x is a scalar; at least one dimension is needed")
    check_block(x.shape[-1], block)
    return op(x, form.name, block)
