"""Causal attention among the tokens of one pass, by torch's SDPA: how a prompt attends to its exact K and V."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    leading: int = 0,
) -> Tensor:
    """Attention of T tokens to themselves and those before them.

    What is not finite stays visible: torch's causal SDPA answers a query, or a key, of NaN with finite
    numbers on some devices; here all that such a one reaches is NaN.

    Args:
        q: (B, H_q, T, D).
        k, v: (B, H_kv, leading + T, D) and (..., D_v), H_q a multiple of H_kv.
        window: tokens a query reaches back, itself included; None for all.
        scale: of the scores; by default D ** -0.5.
        leading: keys in front that every query sees. With a window there are none.

    Returns:
        (B, H_q, T, D_v).
    """
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    spoilt = _spoilt(q, k, window, leading, groups)
    if groups > 1:  # SDPA's own enable_gqa leaves the flash kernel on CPU
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = None
    if window is not None and length > window:
        row = torch.arange(length, device=q.device)
        distance = row[:, None] - row
        mask = (distance >= 0) & (distance < window)
    elif leading:
        mask = torch.ones(length, leading + length, dtype=torch.bool, device=q.device).tril(leading)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.masked_fill(spoilt[..., None], torch.nan)


def _spoilt(q: Tensor, k: Tensor, window: int | None, leading: int, groups: int) -> Tensor:
    """(B, H_q, T) bool: queries that are not finite, or reach a key that is not."""
    seen = _unsound(k).cumsum(-1)
    here = seen[..., leading:]
    if window is not None and q.shape[2] > window:
        here = here - F.pad(here, (window, 0))[..., : q.shape[2]]
    return _unsound(q) | (here > 0).repeat_interleave(groups, 1)


def _unsound(x: Tensor) -> Tensor:
    """(...) bool for x (..., D): NaN or infinity among its values; a sum is one pass, looking at each is four."""
    return ~x.sum(-1, dtype=torch.float32).isfinite()
