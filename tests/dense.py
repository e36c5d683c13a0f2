"""Attention written out densely in float64, independent of the package: the second opinion.

It shares no code with the reference op: positions, windows and padding are loops over tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: list[int],
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    leftpad: list[int] | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """q (B, H_q, T, D), k and v (B, H_kv, S, D) -> out (B, H_q, T, D_v), lse (B, H_q, T)."""
    batch, heads, queries, dim = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    factor = dim**-0.5 if scale is None else scale
    for b in range(batch):
        for t in range(queries):
            position = seqlens[b] - queries + t
            seen = [
                j
                for j in range(k.shape[2])
                if visible(position, j, window, (leftpad or [0] * batch)[b])
            ]
            if not seen:
                continue
            for h in range(heads):
                logits = (k[b, h // group, seen].double() @ q[b, h, t].double()) * factor
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                lse[b, h, t] = torch.logsumexp(logits, 0)
                out[b, h, t] = torch.softmax(logits, 0) @ v[b, h // group, seen].double()
    return out, lse


def visible(position: int, key: int, window: tuple[int, int], leftpad: int) -> bool:
    """Whether a query at ``position`` may see ``key``."""
    if key > position or key < leftpad:
        return False
    return window[0] < 0 or position - key <= window[0]
