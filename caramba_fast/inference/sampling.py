"""Temperature and nucleus sampling as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) divided by ``temperature``, of which less than 1e-5 counts as 1e-5.

    Raises:
        ValueError: the temperature is negative or no number.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; 0 or more is allowed")
    return logits / max(temperature, 1e-5)


def sample_top_p(probs: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Draws from the smallest set of likeliest tokens whose probability reaches ``p`` (arXiv:1904.09751).

    Each row is normalized by its own sum, so that a batch draws as its rows would alone.

    Args:
        probs: (..., V), 0 or more; rows need not add up to 1. It is not changed.
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
