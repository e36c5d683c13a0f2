"""Decode attention in float64 on the stored bytes: what every timed kernel has to agree with first.

Shares no code with the kernels or with the reference op; only the 16 levels of NF4 are the package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.formats import NF4_LEVELS
from caramba_fast.ops import KVView

#: Relative L2 error allowed, by format: the rounding a kernel may add to what is stored.
BY_KIND = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-3, "q8_0": 1e-4, "q4_0": 1e-2, "nf4": 1e-2}
#: ... and by the dtype of queries and output, which are rounded themselves.
BY_DTYPE = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 6e-3}
#: (row, kv head) pairs that are compared, spread evenly over all of them.
PAIRS = 16


def tolerance(kind: str, dtype: torch.dtype) -> float:
    """Relative L2 error allowed."""
    return max(BY_KIND[kind], BY_DTYPE[dtype])


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64."""
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def decoded(codes: Tensor, scales: Tensor | None, kind: str) -> Tensor:
    """Codes (S, width) and block scales of one lane -> values (S, lane_dim) in float64."""
    if scales is None:
        return codes.double()
    blocks = codes.unflatten(-1, (scales.shape[-1], -1)).long()
    if kind != "q8_0":
        blocks = torch.cat((blocks % 16, blocks // 16), dim=-1)
    if kind == "nf4":
        numbers = torch.tensor(NF4_LEVELS, dtype=torch.float64, device=codes.device)[blocks]
    else:
        numbers = blocks.double() - (8 if kind == "q4_0" else 0)
    return (numbers * scales.double()[..., None]).flatten(-2)


def _head(view: KVView, row: int, head: int, dim: int) -> Tensor:
    """(S, dim) float64 of one kv head."""
    lane, place = divmod(head, view.lane_dim // dim)
    scales = None if view.scales is None else view.scales[row, lane]
    values = decoded(view.codes[row, lane], scales, view.kind)
    return values[:, place * dim : (place + 1) * dim]


def error(
    out: Tensor,
    queries: Sequence[Tensor],
    views: Sequence[KVView],
    *,
    kv_heads: int,
    window: int = 0,
    pairs: int = PAIRS,
) -> float:
    """Relative L2 error of ``out`` (B, H_q, T, D).

    Args:
        queries: (B, H_q, T, D) of each key stream; scores are scaled by D^-1/2 of each and added.
        views: stored keys, then values; all slots are filled, the T newest are the queries' own.
        window: tokens a query reaches back, itself included; 0 for all.
        pairs: (row, kv head) pairs compared.
    """
    group = out.shape[1] // kv_heads
    dims = [q.shape[3] for q in queries]
    everything = [(row, head) for row in range(out.shape[0]) for head in range(kv_heads)]
    step = max(1, len(everything) // pairs)
    actual, expected = [], []
    for row, head in everything[::step][:pairs]:
        heads = slice(head * group, (head + 1) * group)
        logits: Any = 0.0
        for q, view, dim in zip(queries, views[:-1], dims, strict=True):
            keys = _head(view, row, head, dim)
            logits = logits + q[row, heads].double() @ keys.T * dim**-0.5
        logits = logits.masked_fill(~_visible(logits.shape[1:], window, out.device), -torch.inf)
        values = _head(views[-1], row, head, out.shape[3])
        expected.append(logits.softmax(-1) @ values)
        actual.append(out[row, heads])
    return relative_l2(torch.stack(actual), torch.stack(expected))


def _visible(shape: Sequence[int], window: int, device: torch.device) -> Tensor:
    """(T, S): which key each of the T newest tokens may see."""
    tokens, slots = shape
    positions = torch.arange(slots - tokens, slots, device=device)[:, None]
    distance = positions - torch.arange(slots, device=device)
    return (distance >= 0) & ((distance < window) if window else True)
