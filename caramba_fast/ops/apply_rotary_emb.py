"""apply_rotary_emb: RoPE for queries and keys in one call, as in Hugging Face models.

Rotates pairs (d, d + D / 2) (RoFormer, arXiv:2104.09864, in the layout of Hugging Face checkpoints). Each product and
sum is rounded to the dtype, as in torch, so every backend is bit-identical to the reference of about sixteen torch ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from caramba_fast.ops import checks
from caramba_fast.ops.gradients import results_of
from caramba_fast.ops.registry import register

#: RoPE options of another op (`ops.append_`): queries, angles, and the output for the rotated queries.
ROTARY = ("rotary_q", "rotary_cos", "rotary_sin", "rotary_out")


def rotary_problems(options: Mapping[str, Any], keys: Tensor) -> list[str]:
    """Problems of the options ROTARY for ``keys`` (B, H_kv, T, D); TypeError unless fp32, fp16 or bf16 tensors."""
    given = {name: x for name in ROTARY if (x := options.get(name)) is not None}
    for name, x in given.items():
        checks.float_tensor(name, x)
    missing = [name for name in ROTARY if name not in given]
    if missing:
        return [f"{missing[0]} is missing; {', '.join(ROTARY[:3])} are given together"]
    q, cos, sin, out = (options[name] for name in ROTARY)
    problems = [
        f"{name} has dtype {options[name].dtype}; {keys.dtype}, that of the keys, is needed"
        for name in ROTARY
        if options[name].dtype != keys.dtype
    ]
    problems += _problems({"rotary_q": q, "keys": keys}, {"rotary_cos": cos, "rotary_sin": sin})
    if out.shape != q.shape or not out.is_contiguous():
        problems.append(
            f"rotary_out has shape {tuple(out.shape)} and strides {out.stride()}; {tuple(q.shape)}, contiguous, "
            "is needed"
        )
    return problems


def _problems(heads: Mapping[str, Tensor], angles: Mapping[str, Tensor]) -> list[str]:
    (q_name, q), (k_name, k) = heads.items()
    (cos_name, cos), (sin_name, sin) = angles.items()
    if q.ndim != 4 or k.ndim != 4 or q.shape[3] % 2 or (q.shape[0], *q.shape[2:]) != (
        k.shape[0], *k.shape[2:],
    ):  # fmt: skip
        return [
            f"{q_name} has shape {tuple(q.shape)} and {k_name} {tuple(k.shape)}; (B, H, T, D) that differ in heads "
            "alone, D even, are needed"
        ]
    batch, _, tokens, dim = q.shape
    shapes = {(rows, tokens, width) for rows in (batch, 1) for width in (dim, dim // 2)}
    if cos.shape == sin.shape and cos.shape in shapes:
        return []
    return [
        f"{cos_name} has shape {tuple(cos.shape)} and {sin_name} {tuple(sin.shape)}; "
        f"({batch} or 1, {tokens}, {dim} or {dim // 2}) is needed"
    ]


SCHEMA = "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor q_out, Tensor k_out)"


def rotated_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The reference: x (B, H, T, D), cos and sin (B or 1, T, D or D / 2) -> (B, H, T, D)."""
    first, second = x.chunk(2, dim=-1)
    half = first.shape[-1]
    (cos_a, cos_b), (sin_a, sin_b) = (
        (t[:, None, :, :half], t[:, None, :, -half:]) for t in (cos, sin)
    )
    turned = (first * cos_a - second * sin_a, second * cos_b + first * sin_b)
    return torch.cat(turned, dim=-1).contiguous()


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if problems := _problems({"q": q, "k": k}, {"cos": cos, "sin": sin}):
        raise ValueError("; ".join(problems))
    return rotated_heads(q, cos, sin), rotated_heads(k, cos, sin)


def fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


rotary_op = register("apply_rotary_emb", SCHEMA, reference=reference, fake=fake)


def apply_rotary_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by the angles of their positions.

    Args:
        q: (B, H_q, T, D), D even, any strides; float32, float16 or bfloat16.
        k: (B, H_kv, T, D) of the same dtype.
        cos, sin: (B or 1, T, D), or (B or 1, T, D / 2) if both halves of a head have the same angles; same dtype.

    Returns:
        The rotated q and k, same shapes and dtype, contiguous.

    Raises:
        RuntimeError: in a backward pass through the results; the op has no derivative.
        TypeError, ValueError: dtypes, shapes or devices that do not match.
    """
    given = {"q": q, "k": k, "cos": cos, "sin": sin}
    for name, x in given.items():
        checks.float_tensor(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; {q.dtype}, that of q, is needed")
    problems = _problems({"q": q, "k": k}, {"cos": cos, "sin": sin})
    if problems:
        raise ValueError("; ".join(problems))
    checks.same_device(**given)
    return results_of("apply_rotary_emb", rotary_op(q, k, cos, sin), *given.values())
