"""Attention over plain tensors with what ``sdpa`` has not: capped logits and sinks.

For prompts (the cache is empty, keys and values are at hand) of Gemma 2 and gpt-oss, a few queries at a time, so
that the weights of a long prompt never exist at once.
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
) -> Tensor:
    """(B, H_q, T, D) over (B, H_kv, L, D) and (B, H_kv, L, D_v) -> (B, T, H_q, D_v).

    Args:
        mask: (B, 1, T, L), bool or additive; None for causal from the first key on.
        scaling: multiplies q·k; default 1 / sqrt(D).
        softcap: logits become ``softcap * tanh(logits / softcap)``; None or 0 for none.
        s_aux: (H_q,), a logit each head's softmax has besides.
    """
    batch, heads, tokens, dim = query.shape
    keys, groups = key.shape[2], heads // key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    columns = torch.arange(keys, device=query.device)
    step = max(1, MOST_WEIGHTS // (batch * heads * keys))
    parts = []
    for first in range(0, tokens, step):
        piece = query[:, :, first : first + step].unflatten(1, (key.shape[1], groups))
        logits = torch.matmul(piece, key[:, :, None].transpose(-1, -2)) * scale
        logits = logits.flatten(1, 2)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            seen = mask[:, :, first : first + step, :keys]
        else:
            rows = torch.arange(first, first + piece.shape[3], device=query.device)
            seen = (columns <= rows[:, None])[None, None]
        weights = _softmax(_masked(logits, seen), s_aux).to(value.dtype)
        grouped = weights.unflatten(1, (key.shape[1], groups))
        parts.append(torch.matmul(grouped, value[:, :, None]).flatten(1, 2))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


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
