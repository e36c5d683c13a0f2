"""Stored K and V for tests of the attention ops: poisoned, then written."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.formats import FORMATS, SCALE_DTYPE
from caramba_fast.ops import KVView, append_, dequantize
from caramba_fast.ops.view import Lanes


def poisoned(batch: int, slots: int, lanes: Lanes, dim: int, kind: str, block: int = 32) -> KVView:
    """Buffers poisoned with NaN values or scales, so that reading any slot shows in the result."""
    form = FORMATS[kind]
    width = form.code_width(lanes.heads_per_lane * dim)
    lead = (batch, lanes.count, slots)
    if not form.quantized:
        return KVView(torch.full((*lead, width), torch.nan, dtype=form.dtype), None, kind)
    codes = torch.randint(0, 120, (*lead, width)).to(form.dtype)
    if form.by_channel:
        lead = (batch, lanes.count, slots // block)
    scales = form.scales_width(lanes.heads_per_lane * dim, block)
    return KVView(codes, torch.full((*lead, scales), torch.nan, dtype=SCALE_DTYPE), kind)


def fit_of(kind: str) -> str:
    """The most general fit: by channel it divides bytes unevenly."""
    return "mse" if FORMATS[kind].by_channel else "amax"


def spread(x: Tensor, kind: str) -> Tensor:
    """x (..., D), for a kind by channel scaled so that bytes are divided in every way."""
    if not FORMATS[kind].by_channel:
        return x
    return x * 2.0 ** -torch.randint(0, 5, (x.shape[-1],)).to(x.dtype)


def write(k: KVView, v: KVView, k_new: Tensor, v_new: Tensor, lengths: list[int]) -> None:
    """Row b gets its first ``lengths[b]`` tokens; all others stay poisoned."""
    for b, length in enumerate(lengths):
        row = slice(b, b + 1)
        pick = [
            KVView(x.codes[row], None if x.scales is None else x.scales[row], x.kind, fit=x.fit)
            for x in (k, v)
        ]
        if length:
            start = torch.zeros(1, dtype=torch.int32)
            append_(*pick, k_new[row, :, :length], v_new[row, :, :length], start)


def values(view: KVView, lanes: Lanes) -> Tensor:
    """(B, H_kv, S, D) float32, poison included."""
    if view.scales is None:
        return lanes.unpack(view.codes.float())
    return lanes.unpack(dequantize(view.codes, view.scales, view.kind, view.lane_dim))
