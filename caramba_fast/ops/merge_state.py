"""merge_state: combines two attentions over disjoint keys into the attention over both, exactly.

This is the online softmax (arXiv:1805.02867): outputs are averaged with weights ``exp(lse)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.ops import checks
from caramba_fast.ops.gradients import results_of
from caramba_fast.ops.registry import register

SCHEMA = "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)"


def reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: pure torch, any device. Two empty sides give 0 and -inf."""
    largest = torch.maximum(lse_a, lse_b)
    base = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
    weight_a, weight_b = (lse_a - base).exp(), (lse_b - base).exp()
    total = weight_a + weight_b
    divisor = torch.where(total == 0, torch.ones_like(total), total)  # NaN stays NaN
    share, other = (weight_a / divisor).unsqueeze(-1), (weight_b / divisor).unsqueeze(-1)
    out = out_a.to(torch.float32) * share + out_b.to(torch.float32) * other
    return out.to(out_a.dtype).contiguous(), (base + total.log()).contiguous()


def fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


_op = register("merge_state", SCHEMA, reference=reference, fake=fake)


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Combines two partial attentions of the same queries over disjoint sets of keys.

    Args:
        out_a, out_b: (..., T, D) float32, float16 or bfloat16, same shape and dtype.
        lse_a, lse_b: (..., T) float32, natural log of the sums of exponentials; -inf for an empty side, whose output
            must be finite (0 by convention).

    Returns:
        out and lse of the same shapes, contiguous; two empty sides give 0 and -inf.

    Raises:
        RuntimeError: in a backward pass through the results; the op has no derivative.
        TypeError, ValueError: dtypes, shapes or devices that do not match.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        checks.float_tensor(f"out_{name}", out)
        if lse.dtype != torch.float32:
            raise TypeError(f"lse_{name} has dtype {lse.dtype}; allowed is torch.float32")
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lse_{name} has shape {tuple(lse.shape)}; {tuple(out.shape[:-1])} is needed"
            )
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(
            f"out_a ({tuple(out_a.shape)}, {out_a.dtype}) and out_b ({tuple(out_b.shape)}, "
            f"{out_b.dtype}) must agree"
        )
    checks.same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    given = (out_a, lse_a, out_b, lse_b)
    return results_of("merge_state", _op(*given), *given)
