"""Temperature and nucleus sampling of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) divided by ``temperature``, at least 1e-5.

    Raises:
        ValueError: the temperature is negative or NaN.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; 0 or more is allowed")
    return logits / max(temperature, 1e-5)


def sample_top_p(probs: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Samples from the smallest set of most likely tokens whose probability reaches ``p`` (arXiv:1904.09751).

    Args:
        probs: (..., V), 0 or more; each row is normalized by its sum. It is not changed.
        p: above 0, 1 for all tokens.

    Returns:
        (..., 1) int64.

    Raises:
        ValueError: p is not in (0, 1].
    """
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; above 0 and at most 1 is allowed")
    probs = probs.to(torch.float64)  # a sum that should reach p must not miss it by rounding
    probs = probs / probs.sum(-1, keepdim=True)
    ordered, index = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    keep = before < p
    keep[..., 0] = True
    kept = torch.where(keep, ordered, 0.0)
    flat = kept.reshape(-1, kept.shape[-1])
    place = torch.multinomial(flat, 1, generator=generator).view(*kept.shape[:-1], 1)
    return index.gather(-1, place)
