"""Reference writing: tokens into codes, scales, tail and sinks, without data-dependent shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.ops.quantize import op as quantize_op
from caramba_fast.ops.transform import apply_to_key, apply_to_value
from caramba_fast.ops.view import KVView, stored_lanes


class Destination:
    """Where each of T new tokens of B rows goes, the same for every stream of a layer.

    Args:
        start: (B,) int32, tokens each row holds already.
        tokens: T.
        query_lens: (B,) int32, how many of the T tokens are real; the rest is not written.
        leftpad: (B,) int32, leading slots that hold padding.
        block_table: (B, pages) int32 for paged buffers, -1 where there is no page.
    """

    def __init__(
        self,
        start: Tensor,
        tokens: int,
        query_lens: Tensor | None,
        leftpad: Tensor | None,
        block_table: Tensor | None,
    ) -> None:
        index = torch.arange(tokens, device=start.device)
        self.position = start.to(torch.int64)[:, None] + index
        self.real = torch.ones_like(self.position, dtype=torch.bool)
        self.count = torch.full_like(start, tokens, dtype=torch.int64)
        if query_lens is not None:
            self.count = query_lens.to(torch.int64)
            self.real = index < self.count[:, None]
        self.index = index
        self.t = self.position if leftpad is None else self.position - leftpad[:, None]
        self.block_table = block_table

    def write(self, view: KVView, new: Tensor, *, is_key: bool) -> None:
        """new (B, H_kv, T, D), any float dtype."""
        change = apply_to_key(new.float(), self.t, view.transform) if is_key else None
        stored = apply_to_value(new.float(), view.transform) if change is None else change
        lanes = stored_lanes(view.codes, view.kind, new.shape[1], new.shape[3])
        packed = lanes.pack(stored)
        self._write_codes(view, packed)
        rows = torch.arange(new.shape[0], device=new.device)[:, None].expand_as(self.position)
        if view.tail is not None:
            ring = view.tail.shape[2]
            newest = self.real & (self.index >= self.count[:, None] - ring)
            scatter(view.tail, packed, rows, self.position % ring, newest)
        if view.sink is not None:
            first = self.real & (self.t >= 0) & (self.t < view.sink.shape[2])
            scatter(view.sink, packed, rows, self.t.clamp(0, view.sink.shape[2] - 1), first)

    def _write_codes(self, view: KVView, packed: Tensor) -> None:
        slots = view.codes.shape[2]
        if self.block_table is None:
            row = torch.arange(packed.shape[0], device=packed.device)[:, None]
            place, keep = row.expand_as(self.position), self.real & (self.position < slots)
            slot = self.position.clamp(max=slots - 1)
        else:
            pages = self.block_table.shape[1]
            page = (self.position // slots).clamp(max=pages - 1)
            place = self.block_table.to(torch.int64).gather(1, page)
            exists = (place >= 0) & (place < view.codes.shape[0])
            keep = self.real & (self.position < pages * slots) & exists
            place, slot = place.clamp(0, view.codes.shape[0] - 1), self.position % slots
        if view.scales is None:
            scatter(view.codes, packed, place, slot, keep)
            return
        block = packed.shape[-1] // view.scales.shape[-1]
        codes, scales = quantize_op(packed, view.kind, block, view.fit)
        scatter(view.codes, codes, place, slot, keep)
        scatter(view.scales, scales, place, slot, keep)


def scatter(buffer: Tensor, values: Tensor, place: Tensor, slot: Tensor, keep: Tensor) -> None:
    """buffer[place[b, t], :, slot[b, t]] = values[b, :, t] wherever keep[b, t].

    What is not kept is sent to the place of the first token that is, with that token's value, so that
    no index list depends on data; if none is kept, the first place gets what it holds.
    """
    place, slot, keep = place.reshape(-1), slot.reshape(-1), keep.reshape(-1)
    flat = values.transpose(1, 2).flatten(0, 1).to(buffer.dtype)  # (B * T, lanes, width)
    first = keep.to(torch.int32).argmax()[None]
    old = buffer[place[first], :, slot[first]]
    spare = torch.where(keep.any(), flat[first], old)
    flat = torch.where(keep[:, None, None], flat, spare)
    buffer[torch.where(keep, place, place[first]), :, torch.where(keep, slot, slot[first])] = flat
