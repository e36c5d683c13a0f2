"""dequantize: codes and block scales back to values (the inverse of quantize, up to rounding)."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.formats import NF4_LEVELS, PACKED_TOGETHER, Format
from caramba_fast.ops import checks
from caramba_fast.ops.gradients import result_of
from caramba_fast.ops.quantize import low_masks
from caramba_fast.ops.registry import register

SCHEMA = "(Tensor codes, Tensor scales, str kind, int head_dim, ScalarType dtype) -> Tensor"


def unpack_nibbles(packed: Tensor) -> Tensor:
    """bytes (..., n/2) -> codes (..., n): the low nibbles, then the high ones."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1)


def decode(codes: Tensor, kind: str) -> Tensor:
    """codes (..., n) of one block, unpacked, -> float32 values before the scale."""
    if kind == "nf4":
        levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=codes.device)
        return levels.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    values = codes.to(torch.float32)
    return values - 8.0 if kind == "q4_0" else values


def reference(
    codes: Tensor, scales: Tensor, kind: str, head_dim: int, dtype: torch.dtype
) -> Tensor:
    form = checks.quantized_kind(kind)
    if form.by_channel:
        return _by_channel(codes, scales, form).to(dtype).contiguous()
    blocks = scales.shape[-1]
    packed = codes.unflatten(-1, (blocks, codes.shape[-1] // blocks))
    if form.bits == 4:
        packed = unpack_nibbles(packed)
    values = decode(packed, form.name) * scales.to(torch.float32).unsqueeze(-1)
    return values.flatten(-2).to(dtype).contiguous()


def _by_channel(codes: Tensor, scales: Tensor, form: Format) -> Tensor:
    """zero + |scale| * code, float32: codes (..., N * G, width) with scales (..., N, 2 * dim)."""
    count = scales.shape[-2]
    groups = codes.unflatten(-2, (count, codes.shape[-2] // max(1, count)))
    scale, zero = scales.unsqueeze(-2).chunk(2, dim=-1)
    counted = groups.float()
    if form.bits == 4:
        low = groups & low_masks(scale)
        parts = [
            x.unflatten(-1, (-1, PACKED_TOGETHER // 2)) for x in (low.float(), (groups ^ low) / 16)
        ]
        counted = torch.stack(parts, dim=-2).flatten(-3)
    return (zero.float() + scale.float().abs() * counted).flatten(-3, -2)


def fake(codes: Tensor, scales: Tensor, kind: str, head_dim: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], head_dim), dtype=dtype)


op = register("dequantize", SCHEMA, reference=reference, fake=fake)


def dequantize(
    codes: Tensor, scales: Tensor, kind: object, head_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decodes the result of `quantize`.

    Args:
        codes: (..., head_dim) int8 for q8_0, (..., head_dim / 2) uint8 for q4_0 and nf4; for per-channel kinds see
            `quantize`.
        scales: (..., head_dim / block) float16 with a block of 32, 64 or 128; for per-channel kinds
            (..., tokens / block, 2 * head_dim).
        kind: the kind the codes were made with.
        head_dim: values to restore in the last dimension; checked against the codes.
        dtype: float32, float16 or bfloat16.

    Returns:
        (..., head_dim) of ``dtype``.

    Raises:
        RuntimeError: in a backward pass through the result; the op has no derivative.
        TypeError, ValueError: dtypes or shapes that do not match.
    """
    form = checks.quantized_kind(kind)
    checks.codes_and_scales("dequantize", codes, scales, form.name)
    if form.value_width(codes.shape[-1]) != head_dim:
        raise ValueError(
            f"codes {tuple(codes.shape)} of {form.name} hold "
            f"{form.value_width(codes.shape[-1])} values, not head_dim={head_dim}"
        )
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"dtype is {dtype}; allowed are float32, float16, bfloat16")
    checks.same_device(codes=codes, scales=scales)
    found: Tensor = op(codes, scales, form.name, head_dim, dtype)
    return result_of("dequantize", found, scales)
