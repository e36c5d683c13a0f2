"""CacheTensor: the buffers of one cached stream (K or V of a layer): codes, scales, fp16 tail and fp16 sinks.

Position j of the tail is in slot ``j % ring_size`` of a ring. More than tail_slack tokens at once (a prompt chunk)
would overwrite values that their first queries still read, so they are written to a `WideRing` that lives from the
append until they have been attended to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.formats import SCALE_DTYPE, check_block
from caramba_fast.ops import KVView
from caramba_fast.ops.memory import empty
from caramba_fast.ops.view import Lanes, load

ALL = slice(None)


class WideRing:
    """A temporary larger ring with room for ``tokens`` new tokens and the ones before them.

    Args:
        ring: (B, lanes, R, lane_dim), the stream's ring.
        start: (B,) integer, tokens held before the append.
        tokens: tokens appended.
        before: number of earlier tokens that are kept.
    """

    def __init__(self, ring: Tensor, start: Tensor, tokens: int, before: int) -> None:
        self.ring, self.start = ring, start.to(torch.int64)
        shape = (*ring.shape[:2], before + tokens, ring.shape[3])
        self.wide = ring.new_empty(shape)
        back = torch.arange(1, before + 1, device=ring.device)
        _copy(ring, self.wide, self.start[:, None] - back)

    def narrowed(self, end: Tensor) -> Tensor:
        """The stream's own ring, updated with the newest of the tokens up to ``end`` (B,)."""
        position = end.to(torch.int64)[:, None] - torch.arange(
            1, self.ring.shape[2] + 1, device=self.ring.device
        )
        _copy(self.wide, self.ring, position, position >= self.start[:, None])
        return self.ring


def _copy(source: Tensor, target: Tensor, position: Tensor, keep: Tensor | None = None) -> None:
    """Copies positions (B, N) from ring to ring; where ``keep`` is false the target is unchanged."""
    row = torch.arange(len(position), device=position.device)[:, None]
    slot = position % target.shape[2]
    values = source[row, :, position % source.shape[2]]
    if keep is not None:
        values = torch.where(keep[..., None, None], values, target[row, :, slot])
    target[row, :, slot] = values


#: Capacity is rounded up to this many slots, so that kernels load codes without masks.
SLOT_MULTIPLE = 128
SIDE_DTYPE = torch.float16
#: The largest magnitude of a value in units of its block's scale, for kinds that have one for each block of a token.
LARGEST_CODES = {"q8_0": 127, "q4_0": 8, "nf4": 1}


def capacity(max_seq_len: int) -> int:
    """Slots allocated for ``max_seq_len`` tokens."""
    return -(-max_seq_len // SLOT_MULTIPLE) * SLOT_MULTIPLE


class CacheTensor:
    """Codes, scales, fp16 tail and fp16 sinks of one stream.

    The buffers are uninitialised: slots at or past a row's length hold arbitrary values.

    Args:
        batch_size: rows of the tail and sinks.
        blocks: (rows, slots) of a contiguous cache or (pages, slots per page) of a paged one.
        lanes: how kv heads are concatenated.
        head_dim: values of one kv head.
        config: how the stream is stored.
        device: device of the buffers.
        ring: slots of the fp16 ring, given by `ring_size` of all streams of the layer.

    Attributes:
        group: tokens that are encoded together; tokens can be dropped from the front only in multiples of it.
        last_view: the `view`; None before the first use, and from before a buffer is replaced: plans rely on it, also
            after an interrupt.
    """

    def __init__(
        self,
        batch_size: int,
        blocks: tuple[int, int],
        lanes: Lanes,
        head_dim: int,
        config: KVCacheTensorConfig,
        device: torch.device,
        ring: int,
    ) -> None:
        self.config, self.lanes, self.head_dim = config, lanes, head_dim
        self.group = config.group
        form, dim = config.kind.storage, lanes.heads_per_lane * head_dim
        lead = (blocks[0], lanes.count)
        self.scales: Tensor | None = None
        if form.quantized:
            if form.by_channel and blocks[1] % config.qblock:
                raise ValueError(
                    f"qblock is {config.qblock} and pages have {blocks[1]} tokens; {form.name} needs a page_size that "
                    "is a multiple of qblock"
                )
            check_block(blocks[1] if form.by_channel else dim, config.qblock, "qblock")
            rows = blocks[1] // self.group
            self.scales = empty(
                (*lead, rows, form.scales_width(dim, config.qblock)), SCALE_DTYPE, device
            )
        self.codes = empty((*lead, blocks[1], form.code_width(dim)), form.dtype, device)

        def side(size: int) -> Tensor | None:
            shape = (batch_size, lanes.count, size, dim)
            return torch.empty(shape, dtype=SIDE_DTYPE, device=device) if size else None

        self.tail, self.sink = side(ring), side(config.sink_len)
        self._wide: WideRing | None = None
        self.last_view: KVView | None = None
        self._query_rms: Tensor | None = None

    @property
    def weighs(self) -> bool:
        """Whether `set_query_rms` has an effect."""
        config = self.config
        return config.divides_bytes and not config.rotate and not self.codes.is_meta

    def set_query_rms(self, rms: Tensor) -> None:
        """Sets the RMS of the queries per channel, (H_kv, D), which weights the encoding of tokens from now on.

        Raises ValueError for a wrong shape.
        """
        shape = (self.lanes.n_kv_heads, self.head_dim)
        if rms.shape != shape:
            raise ValueError(f"query_rms is {tuple(rms.shape)}; {shape} is needed")
        if self.weighs:
            packed = self.lanes.pack(rms.to(self.codes.device, torch.float32)[None, :, None])
            self._query_rms, self.last_view = packed[0, :, 0].contiguous(), None

    @property
    def largest(self) -> float:
        """The largest magnitude of a value, in the stored basis, that is never read as infinite or NaN."""
        form = self.config.kind.storage
        half = torch.finfo(SIDE_DTYPE).max
        if self.tail is not None or self.sink is not None or form.by_channel:  # zeros are fp16, too
            return half
        return half * LARGEST_CODES[form.name] if form.quantized else torch.finfo(form.dtype).max

    @property
    def token_buffers(self) -> list[Tensor]:
        """Codes and scales: (rows or pages, lanes, slots, width) each; per-channel scales have one slot per group."""
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
        """The view that ops read and write, with all slots. The same object until a buffer is replaced."""
        if self.last_view is None:
            config = self.config
            self.last_view = KVView(
                self.codes,
                self.scales,
                config.kind.value,
                self.tail,
                self.sink,
                config.rotate,
                config.fit,
                self._query_rms,
            )
        return self.last_view

    def values(
        self, pages: Tensor | None, length: int, start: int = 0, rows: slice = ALL
    ) -> Tensor:
        """Tokens from ``start`` to ``length`` of rows, (B, H_kv, tokens, D) float32, from codes, in the stored basis.

        ``pages``, for a paged cache, is (B, pages) int64: those of these rows that cover everything up to ``length``.
        ``rows`` selects rows of a contiguous one.
        """
        codes, scales = self.codes, self.scales
        if pages is None:
            codes, scales = codes[rows], None if scales is None else scales[rows]
        else:
            codes = codes[pages].transpose(1, 2).flatten(2, 3)
            scales = None if scales is None else scales[pages].transpose(1, 2).flatten(2, 3)
        first, last = start // self.group, -(-length // self.group)
        base = first * self.group
        codes = codes[:, :, base : last * self.group]
        scales = None if scales is None else scales[:, :, first:last]
        found = load(codes, scales, self.config.kind.value, torch.float32)
        return self.lanes.unpack(found[:, :, start - base : length - base])

    def overlay(self, values: Tensor, begin: Tensor, first: int, leftpad: Tensor | None) -> Tensor:
        """Result of `values`, (B, H_kv, N, D), with sinks and tail replacing the decoded codes.

        Args:
            begin: (B,) integer, the position in each row from which the tail is read.
            first: the smallest of them, clamped to 0.
            leftpad: (B,) integer, leading tokens that are padding.
        """
        position = torch.arange(values.shape[2], device=values.device)
        if self.tail is not None:
            newest = position[first:]
            ring = self.lanes.unpack(self.tail[:, :, newest % self.tail.shape[2]].float())
            read = (newest >= begin[:, None])[:, None, :, None]
            ring = torch.where(read, ring, values[:, :, first:])
            values = torch.cat((values[:, :, :first], ring), dim=2)
        if self.sink is not None:
            t = position - (0 if leftpad is None else leftpad.to(torch.int64)[:, None])
            t = t.expand(len(values), -1)
            size = self.sink.shape[2]
            index = t.clamp(0, size - 1)[:, None, :, None]
            held = self.lanes.unpack(self.sink.float())
            held = held.gather(2, index.expand(-1, held.shape[1], -1, held.shape[3]))
            values = torch.where(((t >= 0) & (t < size))[:, None, :, None], held, values)
        return values

    def widen_tail(self, start: Tensor, tokens: int, before: int) -> None:
        """Until `narrow_tail`, makes room for ``tokens`` after ``start`` (B,) held, of which ``before`` are kept."""
        assert self.tail is not None
        self._wide = WideRing(self.tail, start, tokens, before)
        self.replace_sides(self._wide.wide, self.sink)

    def narrow_tail(self, end: Tensor) -> None:
        """Returns to the ring of normal size; ``end`` (B,) is the number of tokens held now."""
        if self._wide is not None:
            # In one call: an interrupt comes before or after it.
            vars(self).update(last_view=None, tail=self._wide.narrowed(end), _wide=None)

    def drop_wide_tail(self) -> None:
        """Returns to the ring as it was before `widen_tail`."""
        if self._wide is not None:
            vars(self).update(last_view=None, tail=self._wide.ring, _wide=None)

    def replace_sides(self, tail: Tensor | None, sink: Tensor | None) -> None:
        """Replaces the ring and the sinks."""
        self.last_view, self.tail, self.sink = None, tail, sink

    def put_in_tail(self, row: int, start: int, packed: Tensor) -> None:
        """Writes packed values (lanes, n, lane_dim) into a row's ring, from position ``start`` on."""
        assert self.tail is not None
        position = torch.arange(start, start + packed.shape[1], device=self.tail.device)
        self.tail[row, :, position % self.tail.shape[2]] = packed.to(self.tail.dtype)

    def from_tail(self, row: int, position: Tensor) -> Tensor:
        """The packed values (lanes, n, lane_dim) that a row's ring has of ``position`` (n,) int64."""
        assert self.tail is not None
        return self.tail[row][:, position % self.tail.shape[2]]

    def permute(self, order: Tensor, used: int | None) -> None:
        """Row b gets the contents of row ``order[b]``, its first ``used`` slots; None leaves the pages unchanged."""
        parts = [] if used is None else [x[:, :, : self._rows(x, used)] for x in self.token_buffers]
        for part in (*parts, *(x for x in (self.tail, self.sink) if x is not None)):
            part.copy_(part.index_select(0, order))

    def select_rows(self, rows: Tensor, used: int | None) -> CacheTensor:
        """The stream of a cache whose row b is row ``rows[b]`` (int64, on the device) of this one.

        ``used`` slots of codes and scales are copied; None shares them (a pool of pages).
        """
        other = self._copied(lambda x: x.index_select(0, rows))
        if used is not None:
            other.replace_buffers(*self._changed(lambda x: _rows_of(x, rows, self._rows(x, used))))
        return other

    def to(self, device: torch.device) -> CacheTensor:
        """A copy on another device."""
        other = self._copied(lambda x: x.to(device))
        other._query_rms = None if self._query_rms is None else self._query_rms.to(device)
        other.replace_buffers(*self._changed(lambda x: x.to(device)))
        return other

    def _copied(self, change: Callable[[Tensor], Tensor]) -> CacheTensor:
        other = copy.copy(self)
        other.last_view = None
        other.tail = None if self.tail is None else change(self.tail)
        other.sink = None if self.sink is None else change(self.sink)
        return other

    def resized(self, slots: int, start: int, kept: int) -> CacheTensor:
        """A copy with room for ``slots`` tokens per row, of which the ``kept`` ones from ``start`` on come first.

        This stream stays as it is; they share what does not change.
        """

        def moved(x: Tensor) -> Tensor:
            return _front(x, *(self._rows(x, count) for count in (start, kept, slots)))

        other = copy.copy(self)
        other.replace_buffers(*self._changed(moved))
        if self.tail is not None and start % self.tail.shape[2]:  # position start + j becomes j
            other.tail = self.tail.roll(-start, dims=2)
        return other

    def roomy(self, slots: int) -> tuple[Tensor, Tensor | None]:
        """Codes and scales with room for ``slots``: the stream's own if large enough, else new uninitialised ones."""
        return self._changed(
            lambda x: (
                x if x.shape[2] >= self._rows(x, slots) else _with_slots(x, self._rows(x, slots))
            )
        )

    def with_pages(
        self, count: int, target: Tensor, source: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Codes and scales of a new pool of ``count`` pages, with pages ``source`` of this one copied to ``target``."""

        def moved(buffer: Tensor) -> Tensor:
            new = empty((count, *buffer.shape[1:]), buffer.dtype, buffer.device)
            new[target] = buffer[source]
            return new

        return self._changed(moved)

    def replace_buffers(self, codes: Tensor, scales: Tensor | None) -> None:
        """Replaces the buffers of codes and scales."""
        self.last_view, self.codes, self.scales = None, codes, scales

    def _rows(self, buffer: Tensor, slots: int) -> int:
        return slots if buffer is self.codes else -(-slots // self.group)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        return change(self.codes), None if self.scales is None else change(self.scales)

    def state(self, used: int) -> dict[str, Any]:
        """Copies of the first ``used`` slots, with the storage settings as plain values."""
        return {
            "head_dim": self.head_dim,
            "config": self.config.model_dump(mode="json"),
            "codes": self.codes[:, :, :used].clone(),
            "scales": None
            if self.scales is None
            else self.scales[:, :, : self._rows(self.scales, used)].clone(),
            "tail": None if self.tail is None else self.tail.clone(),
            "sink": None if self.sink is None else self.sink.clone(),
        }

    def load(self, part: dict[str, Any], used: int) -> None:
        """Copies in a result of `state`, for which there must be room."""
        self.codes[:, :, :used] = part["codes"]
        if self.scales is not None:
            self.scales[:, :, : self._rows(self.scales, used)] = part["scales"]
        for name, side in (("tail", self.tail), ("sink", self.sink)):
            if side is not None:
                side.copy_(part[name])


def _rows_of(buffer: Tensor, rows: Tensor, used: int) -> Tensor:
    """A new buffer with the first ``used`` slots of some rows; the other slots are uninitialised."""
    new = empty((len(rows), *buffer.shape[1:]), buffer.dtype, buffer.device)
    if used:
        new[:, :, :used] = buffer[:, :, :used].index_select(0, rows)
    return new


def _front(buffer: Tensor, start: int, kept: int, slots: int) -> Tensor:
    """A buffer whose first slots are those from ``start`` on; the same one if nothing changes."""
    if buffer.shape[2] == slots and not start:
        return buffer
    new = _with_slots(buffer, slots)
    new[:, :, :kept] = buffer[:, :, start : start + kept]
    return new


def _with_slots(buffer: Tensor, slots: int) -> Tensor:
    return empty((*buffer.shape[:2], slots, buffer.shape[3]), buffer.dtype, buffer.device)
