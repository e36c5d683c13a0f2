"""Partial attentions of all ranks become the attention: one collective a layer, then an exact merge.

Each rank sends its output and its lse as one run of bytes, and every rank merges what it received in the order of the
ranks (`merge_state`), so that all of them hold the same bits. One ``all_gather`` of ``n`` bytes brings ``(W - 1) n``
bytes to each of W ranks. Sums of exp-weighted outputs through ``all_reduce`` would bring ``2 (W - 1) / W * n``, less
from four ranks on, but need the largest lse first, a second collective that waits for the first; a decode step
moves kilobytes, where a collective costs its latency, not its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.distributed.group import RankGroup
from caramba_fast.ops import merge_state

State = tuple[Tensor, Tensor]
LSE_BYTES = 4


def gather_and_merge(out: Tensor, lse: Tensor, group: RankGroup) -> State:
    """The attention over the keys of all ranks.

    Args:
        out: (B, H_q, T, D_v) float32, float16 or bfloat16, this rank's part.
        lse: (B, H_q, T) float32, -inf where this rank holds no key a query sees.

    Returns:
        out and lse of the same shapes and dtypes, bit for bit the same on every rank.
    """
    if group.size == 1:
        return out, lse
    parts = group.all_gather(packed(out, lse))
    width = out.shape[-1] * out.element_size()
    outs = parts[..., :width].contiguous().view(out.dtype).float()
    lses = parts[..., width:].contiguous().view(torch.float32).squeeze(-1)
    merged, total = merge_all(outs, lses)
    return merged.to(out.dtype), total


def packed(out: Tensor, lse: Tensor) -> Tensor:
    """(B, H_q, T, bytes) uint8: the bytes of an output and, behind them, of its lse."""
    parts = (out.contiguous().view(torch.uint8), lse.contiguous()[..., None].view(torch.uint8))
    return torch.cat(parts, dim=-1)


def merge_all(outs: Tensor, lses: Tensor) -> State:
    """Merges partial attentions (N, ..., T, D) and (N, ..., T) float32, halves with halves."""
    while len(outs) > 1:
        half = len(outs) // 2
        out, lse = merge_state(
            outs[:half], lses[:half], outs[half : 2 * half], lses[half : 2 * half]
        )
        rest = slice(2 * half, None)
        outs, lses = torch.cat((out, outs[rest])), torch.cat((lse, lses[rest]))
    return outs[0], lses[0]


def with_extras(
    state: State,
    queries: Sequence[Tensor],
    scales: Sequence[float],
    extras: dict[str, Any],
    softcap: float,
) -> State:
    """Adds what every query sees besides the cached keys, once and after the ranks' parts.

    Args:
        state: out (B, H_q, T, D_v) and lse (B, H_q, T).
        queries: (B, H_q, T, D) of each key stream; ``scales`` multiply their products with keys.
        extras: ``null_...`` (H_kv, D) of each key stream in order and of v, and ``s_aux`` (H_q,), those given.
        softcap: of logits, 0 for none.
    """
    out, lse = state[0].float(), state[1]
    nulls = [x for name, x in extras.items() if name.startswith("null_") and x is not None]
    if nulls:
        groups = queries[0].shape[1] // len(nulls[0])
        per_head = [x.float().repeat_interleave(groups, 0) for x in nulls]
        logits = torch.stack([
            (q.float() * key[:, None]).sum(-1) * scale
            for q, key, scale in zip(queries, per_head[:-1], scales, strict=True)
        ]).sum(0)  # fmt: skip
        logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
        out, lse = merge_state(out, lse, per_head[-1][:, None].expand_as(out).contiguous(), logits)
    s_aux = extras.get("s_aux")
    if s_aux is not None:
        sink = s_aux.float()[None, :, None].expand_as(lse).contiguous()
        out, lse = merge_state(out, lse, torch.zeros_like(out), sink)
    return out.to(state[0].dtype), lse


def default_scale(q: Tensor) -> float:
    """``1 / sqrt(D)``."""
    return 1 / math.sqrt(q.shape[-1])
