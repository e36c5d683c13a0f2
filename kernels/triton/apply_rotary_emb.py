"""apply_rotary_emb in Triton: a program turns some heads of one token, of queries or of keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .casts import from_float32, to_float32
from .launch import EXACT, dense, made, on_device, returned, start

#: Heads of one program, and its warps.
HEADS = 8
NUM_WARPS = 1


@triton.jit
def _rounded(x, like):
    """x as ``like``'s type holds it, in float32."""
    return to_float32(from_float32(x, like.dtype.element_ty))


@triton.jit
def apply_rotary_emb_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_row,
    x_head,
    x_token,
    cos_row,
    heads,
    tokens,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """x (B, H, T, 2 * HALF), last dimension contiguous; cos and sin rows of WIDTH -> contiguous out."""
    token = tl.program_id(0).to(tl.int64)
    row, here = token // tokens, token % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    mask = (head < heads) & (d < HALF)
    table = row * cos_row + here * WIDTH + d
    cos_a = to_float32(tl.load(cos_ptr + table, mask=d < HALF, other=0.0))
    sin_a = to_float32(tl.load(sin_ptr + table, mask=d < HALF, other=0.0))
    cos_b = to_float32(tl.load(cos_ptr + table + (WIDTH - HALF), mask=d < HALF, other=0.0))
    sin_b = to_float32(tl.load(sin_ptr + table + (WIDTH - HALF), mask=d < HALF, other=0.0))
    source = x_ptr + row * x_row + head * x_head + here * x_token + d
    a = to_float32(tl.load(source, mask=mask, other=0.0))
    b = to_float32(tl.load(source + HALF, mask=mask, other=0.0))
    target = out_ptr + ((row * heads + head) * tokens + here) * (2 * HALF) + d
    first = _rounded(a * cos_a, out_ptr) - _rounded(b * sin_a, out_ptr)
    second = _rounded(b * cos_b, out_ptr) + _rounded(a * sin_b, out_ptr)
    tl.store(target, from_float32(first, out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF, from_float32(second, out_ptr.dtype.element_ty), mask=mask)


def constants(dim: int, width: int) -> dict[str, int]:
    """The constexpr arguments for heads of ``dim`` values and tables of ``width``."""
    half = dim // 2
    return {"HALF": half, "PADDED": triton.next_power_of_2(half), "WIDTH": width, "HEADS": HEADS}


def apply_rotary_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (B, H, T, D); cos, sin (B or 1, T, D or D / 2) -> both rotated, contiguous."""
    cos, sin = dense(cos), dense(sin)
    found = tuple(_turned(x, cos, sin) for x in (q, k))
    returned(*found)
    return found


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = made(x, x.shape)
    if out.numel() == 0:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, heads, tokens, dim = x.shape
    cos_row = cos.stride(0) if cos.shape[0] > 1 else 0
    with on_device(x):
        start(
            apply_rotary_emb_kernel, (rows * tokens, triton.cdiv(heads, HEADS)),
            x, cos, sin, out, *x.stride()[:3], cos_row, heads, tokens,
            **constants(dim, cos.shape[-1]), num_warps=NUM_WARPS, **EXACT,
        )  # fmt: skip
    return out
