"""Attention over plain tensors with what ``sdpa`` has not: capped logits, sinks, and the weights themselves.

For prompts (the cache is empty, keys and values are at hand) and stock caches of Gemma 2 and gpt-oss, a few queries
at a time, so that the weights of a long prompt exist at once only where they are asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements of one piece's weights.
MOST_WEIGHTS = 2**24


def soft_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    *,
    causal: bool,
    dropout: float = 0.0,
    keep_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(B, H_q, T, D) over (B, H_kv, L, D) and (B, H_kv, L, D_v) -> (B, T, H_q, D_v), and the weights (B, H_q, T, L).

    Args:
        mask: (B, 1, T, L), bool or additive; None for none.
        scaling: multiplies q·k; default 1 / sqrt(D).
        softcap: logits become ``softcap * tanh(logits / softcap)``; None or 0 for none.
        s_aux: (H_q,), a logit each head's softmax has besides.
        causal: without a mask, whether a query sees no key after its own; the newest query is the last key's.
        dropout: share of the weights that is dropped.
        keep_weights: whether to return the weights, which are None otherwise.
    """
    batch, heads, tokens, dim = query.shape
    keys, groups = key.shape[2], heads // key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    columns = torch.arange(keys, device=query.device)
    step = max(1, MOST_WEIGHTS // (batch * heads * keys))
    parts, kept = [], []
    for first in range(0, tokens, step):
        piece = query[:, :, first : first + step].unflatten(1, (key.shape[1], groups))
        logits = torch.matmul(piece, key[:, :, None].transpose(-1, -2)) * scale
        logits = logits.flatten(1, 2)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            logits = _masked(logits, mask[:, :, first : first + step, :keys])
        elif causal:
            rows = torch.arange(first, first + piece.shape[3], device=query.device)
            logits = _masked(logits, (columns <= rows[:, None] + keys - tokens)[None, None])
        weights = _softmax(logits, s_aux).to(value.dtype)
        if keep_weights:
            kept.append(weights)
        if dropout:
            weights = torch.dropout(weights, dropout, train=True)
        grouped = weights.unflatten(1, (key.shape[1], groups))
        parts.append(torch.matmul(grouped, value[:, :, None]).flatten(1, 2))
    out = torch.cat(parts, dim=2).transpose(1, 2).contiguous()
    return out, torch.cat(kept, dim=2) if keep_weights else None


def _masked(logits: Tensor, seen: Tensor) -> Tensor:
    if seen.dtype == torch.bool:
        return logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    return logits + seen


def _softmax(logits: Tensor, s_aux: Tensor | None) -> Tensor:
    """Over the keys, in float32, and the sinks if there are any, whose share is left out."""
    if s_aux is None:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    sinks = s_aux.reshape(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], -1)
    whole = torch.cat((logits, sinks.to(logits.dtype)), dim=-1)
    return torch.softmax(whole, dim=-1, dtype=torch.float32)[..., :-1]
