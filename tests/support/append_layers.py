"""Layers with buffers of noise and new tokens, and the result of an append by each backend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support import cases, stored
from support.blocks import same_bits
from torch import Tensor

from caramba_fast.formats import FORMATS, SCALE_DTYPE
from caramba_fast.ops import KVView, append_, decoupled_append_, use_backend
from caramba_fast.ops.registry import DECOUPLED, STANDARD
from caramba_fast.ops.view import Lanes

OPS = {2: append_, 3: decoupled_append_}
SLOTS = 64


def noise(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Finite numbers that no kernel would write twice."""
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 127, tuple(shape)).to(dtype)


@dataclass
class Layer:
    """Buffers of a layer, new tokens and their positions; ``queries`` are those rotated by the last append."""

    views: dict[str, KVView]
    new: dict[str, Tensor]
    start: Tensor
    place: dict[str, Any] = field(default_factory=dict)
    queries: Any = None

    def append(self) -> Layer:
        views, new = self.views.values(), self.new.values()
        self.queries = OPS[len(views)](*views, *new, self.start, **self.place)
        return self

    def to(self, device: torch.device) -> Layer:
        moved = copy.deepcopy(self)
        for name, view in moved.views.items():
            parts = {n: getattr(view, n) for n in ("codes", "scales", "tail", "sink", "query_rms")}
            parts = {n: x if x is None else x.to(device) for n, x in parts.items()}
            moved.views[name] = replace(view, **parts)
            # deepcopy and .to() do not keep unusual strides
            moved.new[name] = placed(self.new[name], device)
        moved.start = moved.start.to(device)
        moved.place = {n: x.to(device) for n, x in moved.place.items()}
        return moved


def placed(x: Tensor, device: torch.device) -> Tensor:
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((size,), (1,)).clone().to(device)
    return flat.as_strided(x.shape, x.stride())


def layer(
    kinds: Sequence[str] = ("q8_0", "q4_0"),
    dims: Sequence[int] = (32, 32),
    *,
    heads: int = 1,
    tokens: int = 3,
    start: Sequence[int] = (5, 30),
    pages: Sequence[Sequence[int]] | None = None,
    ring: int = 0,
    sink: int = 0,
    block: int = 32,
    fit: str = "amax",
    rotate: str = "",
    dtype: torch.dtype = torch.float32,
    per_lane: int = 0,
    **place: Sequence[int],
) -> Layer:
    """Noise in every buffer; ``pages`` is the block table over a pool of 5 pages of 32 slots.

    ``rotate`` has the first letters of the streams that are rotated.
    """
    names = STANDARD if len(kinds) == 2 else DECOUPLED
    batch, lanes = len(start), Lanes(heads, per_lane) if per_lane else Lanes.of(heads, *dims)
    views, new = {}, {}
    for name, kind, dim in zip(names, kinds, dims, strict=True):
        form, width = FORMATS[kind], lanes.heads_per_lane * dim
        lead = (batch, lanes.count, SLOTS) if pages is None else (5, lanes.count, 32)
        codes = noise((*lead, form.code_width(width)), form.dtype)
        scales = None
        if form.quantized:
            rows = (*lead[:2], lead[2] // block) if form.by_channel else lead
            scales = noise((*rows, form.scales_width(width, block)), SCALE_DTYPE)
        side = [
            noise((batch, lanes.count, n, width), torch.float16) if n else None
            for n in (ring, sink)
        ]
        rms = torch.rand(lanes.count, width) * 8 if name[0] == "k" else None
        views[name] = KVView(
            codes, scales, kind, *side, rotate=name[0] in rotate, fit=fit, query_rms=rms
        )
        new[name] = stored.spread(torch.randn(batch, heads, tokens, dim), kind).to(dtype)
    given = {n: cases.rows(*values) for n, values in place.items()}
    if pages is not None:
        given["block_table"] = torch.tensor(pages, dtype=torch.int32)
    return Layer(views, new, cases.rows(*start), given)


def both(given: Layer, device: torch.device) -> tuple[Layer, Layer]:
    """The layer after an append by Triton, and by the reference."""
    with use_backend("reference"):
        wanted = copy.deepcopy(given).append()
    there = given.to(device)
    with use_backend("triton"):
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            there.append()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return there.to(torch.device("cpu")), wanted


def buffers(of: Layer) -> dict[str, Tensor]:
    parts = ("codes", "scales", "tail", "sink")
    found = {f"{n} {p}": getattr(v, p) for n, v in of.views.items() for p in parts}
    return {name: x for name, x in found.items() if x is not None}


def differing(given: Layer, device: torch.device) -> list[str]:
    """Names of the buffers whose bits differ; asserts that something was written."""
    got, wanted = map(buffers, both(given, device))
    before = buffers(given)
    assert any(not same_bits(before[name], wanted[name]) for name in wanted)
    return [name for name in wanted if not same_bits(got[name], wanted[name])]
