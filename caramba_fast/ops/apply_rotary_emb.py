"""apply_rotary_emb: queries and keys turned to their positions in one call, as Hugging Face's models turn them.

Pairs (d, d + D / 2) are rotated against each other (RoFormer, arXiv:2104.09864, in the layout of Hugging Face's
checkpoints). Products and sums are rounded to the dtype one by one, as torch does it: every backend gives the bits of
the reference, which takes some sixteen ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.ops import checks
from caramba_fast.ops.registry import register

SCHEMA = "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor q_out, Tensor k_out)"


def rotated_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The oracle: x (B, H, T, D), cos and sin (B or 1, T, D or D / 2) -> (B, H, T, D)."""
    first, second = x.chunk(2, dim=-1)
    half = first.shape[-1]
    (cos_a, cos_b), (sin_a, sin_b) = (
        (t[:, None, :, :half], t[:, None, :, -half:]) for t in (cos, sin)
    )
    turned = (first * cos_a - second * sin_a, second * cos_b + first * sin_b)
    return torch.cat(turned, dim=-1).contiguous()


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pure torch, any device."""
    return rotated_heads(q, cos, sin), rotated_heads(k, cos, sin)


def fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


rotary_op = register("apply_rotary_emb", SCHEMA, reference=reference, fake=fake)


def apply_rotary_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by the angles of their positions.

    Args:
        q: (B, H_q, T, D), any strides; float32, float16 or bfloat16.
        k: (B, H_kv, T, D) of the same dtype.
        cos, sin: (B or 1, T, D), or (B or 1, T, D / 2) where both halves of a head have the same angles; of the same
            dtype.

    Returns:
        Both, contiguous, of their shapes and dtype. No gradient flows.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not belong together.
    """
    given = {"q": q, "k": k, "cos": cos, "sin": sin}
    for name, x in given.items():
        checks.float_tensor(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; {q.dtype}, that of q, is needed")
        if x.ndim != (4 if name in "qk" else 3):
            shape = "(B, H, T, D)" if name in "qk" else "(B or 1, T, D or D / 2)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {shape} is needed")
    batch, _, tokens, dim = q.shape
    if dim % 2 or (k.shape[0], *k.shape[2:]) != (batch, tokens, dim):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they may differ in heads alone, and D must be even"
        )
    if cos.shape != sin.shape or cos.shape not in {
        (rows, tokens, width) for rows in (batch, 1) for width in (dim, dim // 2)
    }:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; "
            f"({batch} or 1, {tokens}, {dim} or {dim // 2}) is needed"
        )
    checks.same_device(**given)
    return rotary_op(q, k, cos, sin)
