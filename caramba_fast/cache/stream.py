"""CacheTensor: the buffers of one cached stream (K or V of a layer): codes, scales, fp16 tail and fp16 sinks.

The tail is a ring of residual_len + tail_slack slots; position j is in slot j modulo that. More tokens than tail_slack
at once (a chunk of a prompt) would overwrite what their first queries still have to read: they are written to a
`WideRing` that lives from the append until they have been attended to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.formats import SCALE_DTYPE, check_block
from caramba_fast.ops import KVView, Transform
from caramba_fast.ops.memory import empty
from caramba_fast.ops.view import Lanes, load


class WideRing:
    """A ring for ``tokens`` new tokens and the residual_len before them, in place of a stream's own.

    Args:
        ring: (B, lanes, R, lane_dim), the stream's ring.
        start: (B,) integer, tokens held before the append.
        tokens: tokens appended.
        residual_len: tokens behind a query that are read from the ring.
    """

    def __init__(self, ring: Tensor, start: Tensor, tokens: int, residual_len: int) -> None:
        self.ring, self.start = ring, start.to(torch.int64)
        shape = (*ring.shape[:2], residual_len + tokens, ring.shape[3])
        self.wide = ring.new_empty(shape)
        back = torch.arange(1, residual_len + 1, device=ring.device)
        _copy(ring, self.wide, self.start[:, None] - back)

    def narrowed(self, end: Tensor) -> Tensor:
        """The stream's ring again, with the newest of the tokens up to ``end`` (B,) in it."""
        position = end.to(torch.int64)[:, None] - torch.arange(
            1, self.ring.shape[2] + 1, device=self.ring.device
        )
        _copy(self.wide, self.ring, position, position >= self.start[:, None])
        return self.ring


def _copy(source: Tensor, target: Tensor, position: Tensor, keep: Tensor | None = None) -> None:
    """Moves positions (B, N) from ring to ring; where ``keep`` is false the target stays as it is."""
    row = torch.arange(len(position), device=position.device)[:, None]
    slot = position % target.shape[2]
    values = source[row, :, position % source.shape[2]]
    if keep is not None:
        values = torch.where(keep[..., None, None], values, target[row, :, slot])
    target[row, :, slot] = values


#: Capacity is rounded up to this many slots, so that kernels load codes without masks.
SLOT_MULTIPLE = 128
SIDE_DTYPE = torch.float16


def capacity(max_seq_len: int) -> int:
    """Slots allocated for ``max_seq_len`` tokens."""
    return -(-max_seq_len // SLOT_MULTIPLE) * SLOT_MULTIPLE


class CacheTensor:
    """Codes, scales, fp16 tail and fp16 sinks of one stream.

    The buffers are uninitialised: slots at or past a row's length hold anything. What rows go through is asked of the
    stream here, so that how tokens are stored is known to it alone.

    Args:
        batch_size: rows, which tail and sinks have each their own of.
        blocks: (rows, slots) of a contiguous cache or (pages, slots of a page) of a paged one.
        lanes: how kv heads are put side by side.
        head_dim: values of one kv head.
        config: how the stream is stored.
        device: where.

    Attributes:
        granularity: tokens that are stored together; rows lose tokens in front in multiples of it.
    """

    granularity = 1

    def __init__(
        self,
        batch_size: int,
        blocks: tuple[int, int],
        lanes: Lanes,
        head_dim: int,
        config: KVCacheTensorConfig,
        device: torch.device,
    ) -> None:
        self.config, self.lanes, self.head_dim = config, lanes, head_dim
        form, dim = config.kind.storage, lanes.heads_per_lane * head_dim
        lead = (blocks[0], lanes.count, blocks[1])
        self.scales: Tensor | None = None
        if form.quantized:
            check_block(dim, config.qblock, "qblock")
            self.scales = empty((*lead, dim // config.qblock), SCALE_DTYPE, device)
        self.codes = empty((*lead, form.code_width(dim)), form.dtype, device)

        def side(size: int) -> Tensor | None:
            shape = (batch_size, lanes.count, size, dim)
            return torch.empty(shape, dtype=SIDE_DTYPE, device=device) if size else None

        self.tail, self.sink = side(config.tail_len), side(config.sink_len)
        self._wide: WideRing | None = None
        self._view: KVView | None = None
        self.transform = Transform(rotate=config.rotate)

    # -- what it is -----------------------------------------------------------------------

    @property
    def token_buffers(self) -> list[Tensor]:
        """Codes and scales: (rows or pages, lanes, slots, width) each."""
        return [x for x in (self.codes, self.scales) if x is not None]

    @property
    def buffers(self) -> list[Tensor]:
        """Everything allocated."""
        return [*self.token_buffers, *(x for x in (self.tail, self.sink) if x is not None)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales, tail, sinks and unused slots included."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def view(self) -> KVView:
        """What the ops read and write: all slots. The same object while nothing of it is replaced."""
        known = self._view
        if known is None or known.tail is not self.tail or known.transform is not self.transform:
            known = self._view = KVView(
                self.codes, self.scales, self.config.kind.value, self.tail, self.sink, self.transform,
                self.config.fit,
            )  # fmt: skip
        return known

    def values(self, pages: Tensor | None, length: int) -> Tensor:
        """The first ``length`` tokens of every row, (B, H_kv, length, D) float32, from codes, in the stored basis.

        Args:
            pages: (B, pages) int64 that cover them, of a paged cache.
        """
        parts = [self.codes, self.scales]
        if pages is not None:
            parts = [None if x is None else x[pages].transpose(1, 2).flatten(2, 3) for x in parts]
        codes, scales = (None if x is None else x[:, :, :length] for x in parts)
        assert codes is not None
        return self.lanes.unpack(load(codes, scales, self.config.kind.value, torch.float32))

    # -- the fp16 ring --------------------------------------------------------------------

    def widen_tail(self, start: Tensor, tokens: int) -> None:
        """Makes room for ``tokens`` at once behind the ``start`` (B,) held, until `narrow_tail`."""
        assert self.tail is not None
        self._wide = WideRing(self.tail, start, tokens, self.config.residual_len)
        self.tail = self._wide.wide

    def narrow_tail(self, end: Tensor) -> None:
        """Goes back to the ring of usual size; ``end`` (B,) are the tokens held now."""
        if self._wide is not None:
            self.tail, self._wide = self._wide.narrowed(end), None

    def put_in_tail(self, row: int, start: int, packed: Tensor) -> None:
        """Writes packed (lanes, n, lane_dim) values of positions from ``start`` on into the ring of a row."""
        assert self.tail is not None
        position = torch.arange(start, start + packed.shape[1], device=self.tail.device)
        self.tail[row, :, position % self.tail.shape[2]] = packed.to(self.tail.dtype)

    # -- what rows go through -------------------------------------------------------------

    def permute(self, order: Tensor, used: int | None) -> None:
        """Row b becomes what row ``order[b]`` was, as far as ``used`` slots; None leaves the pages as they are."""
        parts = [] if used is None else [x[:, :, :used] for x in self.token_buffers]
        for part in (*parts, *(x for x in (self.tail, self.sink) if x is not None)):
            part.copy_(part.index_select(0, order))

    def select_rows(self, rows: Tensor, used: int | None) -> CacheTensor:
        """The stream of a cache whose row b is what row ``rows[b]`` (int64, on the device) is here.

        Args:
            used: slots of codes and scales that are copied; None keeps them, a pool of pages, in common.
        """
        other = self._copied(lambda x: x.index_select(0, rows))
        if used is not None:
            other.replace_buffers(*self._changed(lambda x: _rows_of(x, rows, used)))
        return other

    def to(self, device: torch.device) -> CacheTensor:
        """A copy on another device."""
        other = self._copied(lambda x: x.to(device))
        other.transform = self.transform.to(device)
        other.replace_buffers(*self._changed(lambda x: x.to(device)))
        return other

    def _copied(self, change: Callable[[Tensor], Tensor]) -> CacheTensor:
        """Another stream with its own tail and sinks."""
        other = copy.copy(self)
        other._view = None
        other.tail = None if self.tail is None else change(self.tail)
        other.sink = None if self.sink is None else change(self.sink)
        return other

    def resize(self, slots: int, start: int, kept: int) -> None:
        """Room for ``slots`` tokens a row, the ``kept`` ones from ``start`` on at the front."""
        self.replace_buffers(*self._changed(lambda x: _front(x, start, kept, slots)))

    def roomy(self, slots: int) -> tuple[Tensor, Tensor | None]:
        """Codes and scales with room for so many slots: the stream's own where they have it, else empty ones."""
        return self._changed(lambda x: x if x.shape[2] >= slots else _with_slots(x, slots))

    def with_pages(
        self, count: int, target: Tensor, source: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Codes and scales of a pool of ``count`` pages, its pages ``target`` as ``source`` are here."""

        def moved(buffer: Tensor) -> Tensor:
            new = empty((count, *buffer.shape[1:]), buffer.dtype, buffer.device)
            new[target] = buffer[source]
            return new

        return self._changed(moved)

    def replace_buffers(self, codes: Tensor, scales: Tensor | None) -> None:
        """Takes other buffers for codes and scales."""
        self.codes, self.scales, self._view = codes, scales, None

    def _changed(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        return change(self.codes), None if self.scales is None else change(self.scales)

    def state(self, used: int) -> dict[str, Any]:
        """Copies of what is stored in the first ``used`` slots, and how, as plain values."""
        transform = {f.name: getattr(self.transform, f.name) for f in fields(Transform)}
        return {
            "head_dim": self.head_dim,
            "config": self.config.model_dump(mode="json"),
            "codes": self.codes[:, :, :used].clone(),
            "scales": None if self.scales is None else self.scales[:, :, :used].clone(),
            "tail": None if self.tail is None else self.tail.clone(),
            "sink": None if self.sink is None else self.sink.clone(),
            "transform": {
                k: x.clone() if isinstance(x, Tensor) else x for k, x in transform.items()
            },
        }

    def load(self, part: dict[str, Any], transform: Transform, used: int) -> None:
        """Copies in what `state` gave, stored in ``transform``; there is room for it."""
        self.codes[:, :, :used] = part["codes"]
        if self.scales is not None:
            self.scales[:, :, :used] = part["scales"]
        for name, side in (("tail", self.tail), ("sink", self.sink)):
            if side is not None:
                side.copy_(part[name])
        self.transform = transform


def _rows_of(buffer: Tensor, rows: Tensor, used: int) -> Tensor:
    """A new buffer with the first ``used`` slots of some rows; the others hold anything."""
    new = empty((len(rows), *buffer.shape[1:]), buffer.dtype, buffer.device)
    if used:
        new[:, :, :used] = buffer[:, :, :used].index_select(0, rows)
    return new


def _front(buffer: Tensor, start: int, kept: int, slots: int) -> Tensor:
    """The slots from ``start`` on at the front, of the same buffer or of one of another size."""
    moving = buffer[:, :, start : start + kept]
    if buffer.shape[2] == slots:
        if start:
            buffer[:, :, :kept] = moving.clone()
        return buffer
    new = _with_slots(buffer, slots)
    new[:, :, :kept] = moving
    return new


def _with_slots(buffer: Tensor, slots: int) -> Tensor:
    return empty((*buffer.shape[:2], slots, buffer.shape[3]), buffer.dtype, buffer.device)
