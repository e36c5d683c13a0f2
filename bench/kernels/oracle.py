"""Decode attention in float64 on the stored bytes: every kernel has to agree with it before it is timed.

Shares no code with the kernels or with the reference op; only the 16 levels of NF4 are the package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.kernels.registry import LAYOUTS
from caramba_fast.formats import NF4_LEVELS
from caramba_fast.ops import KVView
from caramba_fast.ops.view import group_of

#: Relative L2 error allowed, by format: the rounding a kernel may add to the stored values.
BY_KIND = {
    "fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-3, "q8": 1e-3, "q4": 1e-2, "q8_0": 1e-4, "q4_0": 1e-2, "nf4": 1e-2,
}  # fmt: skip
#: The same by dtype of queries and output, which are rounded themselves.
BY_DTYPE = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 6e-3}
#: Added for keys by channel with half-precision queries: queries are multiplied by the scales, then rounded to fp16.
#: In all 6.6e-4 to 1.2e-3 for q8, both interpreted and on an H200; the reference has 2e-4.
FOLDED = 1e-3
#: (row, kv head) pairs that are compared, spread evenly over all of them.
PAIRS = 16


def tolerance(kind: str, dtype: torch.dtype) -> float:
    """Relative L2 error allowed for a format and a dtype."""
    folded = FOLDED if kind in LAYOUTS and dtype != torch.float32 else 0.0
    return max(BY_KIND[kind], BY_DTYPE[dtype] + folded)


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64."""
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def decoded(codes: Tensor, scales: Tensor | None, kind: str) -> Tensor:
    """Codes (S, width) and scales of one lane -> values (S, lane_dim) in float64."""
    if scales is None:
        return codes.double()
    if kind in ("q8_channel", "q4_channel"):
        blocks = codes.unflatten(-1, (scales.shape[1] // 64, -1)).long()
        scale, zero = scales.repeat_interleave(len(codes) // len(scales), 0).chunk(2, 1)
        if kind == "q4_channel":
            lent = scale.view(torch.int16).long()
            low, high = torch.where(lent < 0, 1 + lent % 2, 0).unflatten(-1, (-1, 2, 16)).unbind(-2)
            unit = 2 ** (4 - low + high)
            blocks = torch.cat((blocks % unit, blocks // unit * unit / 16), dim=-1)
        return blocks.flatten(-2) * scale.double().abs() + zero.double()
    blocks = codes.unflatten(-1, (scales.shape[-1], -1)).long()
    if kind != "q8_0":
        blocks = torch.cat((blocks % 16, blocks // 16), dim=-1)
    if kind == "nf4":
        numbers = torch.tensor(NF4_LEVELS, dtype=torch.float64, device=codes.device)[blocks]
    else:
        numbers = blocks.double() - (8 if kind == "q4_0" else 0)
    return (numbers * scales.double()[..., None]).flatten(-2)


def _head(view: KVView, row: int, head: int, dim: int, begins: int) -> Tensor:
    """(S, dim) float64 of one kv head; tokens from ``begins`` on are taken from the ring."""
    lane, place = divmod(head, view.lane_dim // dim)
    scales = None if view.scales is None else view.scales[row, lane]
    values = decoded(view.codes[row, lane], scales, view.kind)
    if view.tail is not None:
        tokens = torch.arange(begins, len(values), device=values.device)
        values[tokens] = view.tail[row, lane, tokens % view.tail.shape[2]].double()
    return values[:, place * dim : (place + 1) * dim]


def _attended(
    q: Sequence[Tensor], views: Sequence[KVView], row: int, head: int, seen: Tensor, begins: int
) -> Tensor:
    """(g, T, D) of queries (g, T, D) of each key stream; ``seen`` is (T, S)."""
    logits: Any = 0.0
    for x, view in zip(q, views[:-1], strict=True):
        keys = _head(view, row, head, x.shape[2], begins)
        logits = logits + x.double() @ keys.T * x.shape[2] ** -0.5
    dim = views[-1].lane_dim // (views[0].lane_dim // q[0].shape[2])
    values = _head(views[-1], row, head, dim, begins)
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def error(
    out: Tensor,
    queries: Sequence[Tensor],
    views: Sequence[KVView],
    *,
    kv_heads: int,
    window: int = 0,
    pairs: int = PAIRS,
    short: int = 0,
) -> float:
    """Relative L2 error of ``out`` (B, H_q, T, D).

    Args:
        queries: (B, H_q, T, D) of each key stream; scores are scaled by D^-1/2 of each and added.
        views: stored keys, then values; all slots are filled, the T newest are the queries' own.
        window: tokens a query sees, itself included; 0 for all.
        pairs: (row, kv head) pairs compared.
        short: filled slots of every row but the first; 0 for all. A multiple of the group by channel.
    """
    share = out.shape[1] // kv_heads
    everything = [(row, head) for row in range(out.shape[0]) for head in range(kv_heads)]
    step = max(1, len(everything) // pairs)
    actual, expected = [], []
    by_step, whole = group_of(views) > 1, views
    steps = [slice(t, t + 1) for t in range(out.shape[2])] if by_step else [slice(None)]
    for row, head in everything[::step][:pairs]:
        heads = slice(head * share, (head + 1) * share)
        views = [view.slice(short) for view in whole] if short and row else whole
        slots = views[0].codes.shape[2]
        seen = _visible((out.shape[2], slots), window, out.device)
        parts = []
        for t, step in enumerate(
            steps
        ):  # by channel the group that is not full is read from the ring
            begins = (slots - out.shape[2] + t + 1) // group_of(views) * group_of(views)
            given = [q[row, heads, step] for q in queries]
            parts.append(_attended(given, views, row, head, seen[step], begins))
        expected.append(torch.cat(parts, dim=1))
        actual.append(out[row, heads])
    return relative_l2(torch.stack(actual), torch.stack(expected))


def _visible(shape: Sequence[int], window: int, device: torch.device) -> Tensor:
    """(T, S): which keys each of the T newest tokens sees."""
    tokens, slots = shape
    positions = torch.arange(slots - tokens, slots, device=device)[:, None]
    distance = positions - torch.arange(slots, device=device)
    return (distance >= 0) & ((distance < window) if window else True)
