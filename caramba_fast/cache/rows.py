"""LayerRows: cropping, growing, reordering, saving and moving the rows of one layer, over its named streams.

The same code serves standard and decoupled attention, contiguous and paged caches, with or without tail and sinks; how
a token is stored is up to the streams.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.cache.interface import AttentionLimits, CachedRows
from caramba_fast.cache.lengths import RowLengths, TailKeeper
from caramba_fast.cache.pages import PageTable
from caramba_fast.cache.plans import LayerPlans
from caramba_fast.cache.state import (
    contradictions,
    deepcopied,
    mismatches,
    on_device,
    without_constants,
)
from caramba_fast.cache.stream import ALL, CacheTensor, capacity
from caramba_fast.config.kvcache import ring_size

if TYPE_CHECKING:
    from typing_extensions import Self

#: Restores positions (row, start, stop) in the rings.
Refill = Callable[[int, int, int], None]


class LayerRows(CachedRows):
    """Rows of one layer.

    Args:
        streams: by name, v last.
        batch_size, max_seq_len, n_kv_heads, device: as in `LayerCache`.
        pages: the block table; None for a contiguous cache.

    Attributes:
        tail: which positions the fp16 rings hold.
        ring_len: tokens they hold; 0 if there are none.
        group: tokens that per-channel kinds encode together; else 1.
        plans: prepared op calls on these streams.
    """

    def __init__(
        self,
        streams: dict[str, CacheTensor],
        batch_size: int,
        max_seq_len: int,
        n_kv_heads: int,
        device: torch.device,
        pages: PageTable | None,
    ) -> None:
        self.streams, self.pages = streams, pages
        self.batch_size, self.max_seq_len = batch_size, max_seq_len
        self.n_kv_heads, self.device = n_kv_heads, device
        configs = [stream.config for stream in streams.values()]
        self.residual_len, self.tail_slack = configs[0].residual_len, configs[0].tail_slack
        self.group, self.ring_len = math.lcm(*(c.group for c in configs)), ring_size(configs)
        self.lengths = RowLengths(batch_size, device)
        self.tail = TailKeeper(batch_size, self.ring_len)
        self.plans = LayerPlans(streams, n_kv_heads)
        self.reads_all_slots, self.reach = False, AttentionLimits()
        self._widened = 0  # tokens that the tails have been widened for
        self._widened_from: list[int] = []  # the lengths before them
        self._begun_padded: bool | None = None  # whether sinks begin after a leftpad, if known
        vars(self).update(streams)  # each by its name

    __deepcopy__ = deepcopied

    @property
    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, tails and sinks of all streams, unused slots, block table."""
        table = 0 if self.pages is None else self.pages.tensor.nbytes
        return table + sum(stream.nbytes for stream in self.streams.values())

    @property
    def bytes_per_token(self) -> float:
        """Bytes of codes and scales per token of one row."""
        found = 0.0
        for stream in self.streams.values():
            slots = stream.codes.shape[0] * stream.codes.shape[2]
            found += sum(buffer.nbytes / slots for buffer in stream.token_buffers)
        return found

    def stored(self, name: str, length: int, start: int = 0, rows: slice = ALL) -> Tensor:
        """Tokens ``start`` to ``length`` of a stream, decoded: (B, H_kv, tokens, D) float32, in the stored basis.

        With per-channel kinds, sinks and tokens of an incomplete group have no codes; their values are arbitrary.
        """
        base, table, pages = 0, None, self.pages
        if pages is not None:
            base, skipped = start // pages.page_size * pages.page_size, start // pages.page_size
            table = pages.columns(length)[rows, skipped:].to(torch.int64).clamp(min=0)
        return self.streams[name].values(table, length - base, start - base, rows)

    def copy_pages(self, moved: Sequence[tuple[int, int]]) -> None:
        """Copies pages of the pool, given as (from, to)."""
        if not moved:
            return
        source, target = torch.tensor(moved, device=self.device).T
        for buffer in (x for stream in self.streams.values() for x in stream.token_buffers):
            buffer[target] = buffer[source]

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Shortens rows to ``lengths``, none of which may exceed the current length."""
        self.shorten(lengths, self.refill)

    def shorten(self, lengths: Sequence[int], refill: Refill) -> None:
        """`set_lengths`, with ``refill`` restoring what the rings have lost."""
        if not self._widening_undone(lengths):
            self.narrow_tails()
            for place in self.tail.lost(self.lengths.host, lengths):
                refill(*place)
            self.tail.shortened(self.lengths.host, lengths)
        self.lengths.set(lengths)
        if self.pages is not None:
            self.pages.shrink(lengths)

    def refill(self, row: int, start: int, stop: int) -> None:
        """Restores positions in the rings from their codes."""
        for name, stream in self.streams.items():
            values = self.stored(name, stop, start, slice(row, row + 1))
            stream.put_in_tail(row, start, stream.lanes.pack(values)[0])

    def narrow_tails(self) -> None:
        """Undoes the temporary widening of tails."""
        if self._widened:
            for stream in self.streams.values():
                stream.narrow_tail(self.seq_lens)
            self._widened = 0

    def _widening_undone(self, lengths: Sequence[int]) -> bool:
        """Whether the tails were widened for just the tokens beyond ``lengths``; the rings are then as before them."""
        if not self._widened or list(lengths) != self._widened_from:
            return False
        for stream in self.streams.values():
            stream.drop_wide_tail()
        self._widened = 0
        return True

    def tail_state(self) -> tuple[list[Tensor], list[int]]:
        """Copies of the fp16 rings, for `restore_tail`: the codes do not preserve their exact values."""
        self.narrow_tails()
        rings = [stream.tail.clone() for stream in self.streams.values() if stream.tail is not None]
        return rings, self.tail.held_from(self.lengths.host)

    def restore_tail(self, state: tuple[list[Tensor], list[int]]) -> None:
        """Restores the rings; call it after the rows have their former lengths again."""
        tails = [stream.tail for stream in self.streams.values() if stream.tail is not None]
        for tail, ring in zip(tails, state[0], strict=True):
            tail.copy_(ring)
        self.tail.lowest = list(state[1])

    def reset(self) -> None:
        """Removes all tokens; the memory stays allocated."""
        self.set_lengths([0] * self.batch_size)

    def reorder(self, beam_idx: Tensor) -> None:
        """Reorders rows: new row b is old row ``beam_idx[b]`` (beam search). A paged cache shares pages.

        ``beam_idx`` is a (B,) integer tensor, never read from a device: on the CPU if the cache is paged or rows differ
        in length. TypeError for no tensor; ValueError for another tensor or, on the CPU, an index out of range.
        """
        _check_order(beam_idx, self.batch_size)
        self.narrow_tails()
        order = beam_idx.to(device=self.device, dtype=torch.int64)
        if beam_idx.device.type == "cpu":
            rows = beam_idx.tolist()
            if min(rows) < 0 or max(rows) >= self.batch_size:
                raise ValueError(f"beam_idx is {rows}; 0 to {self.batch_size - 1} is allowed")
            self.tail.reordered(rows)
            if self.pages is not None:
                self.pages.reorder(rows)
            self.lengths.set([self.lengths.host[row] for row in rows])
        elif self.pages is not None or len(set(self.lengths.host)) > 1:
            raise ValueError("beam_idx must be on cpu while rows differ in length or are paged")
        else:
            self.tail.reordered_unknown()
            self.lengths.set(self.lengths.host)
        for stream in self.streams.values():
            stream.permute(order, self.pos if self.pages is None else None)

    def select_rows(self, rows: Sequence[int]) -> Self:
        """A new cache whose row b is row ``rows[b]`` of this one, which is unchanged.

        Rows may repeat or be left out, in any number; ValueError for none, or one that does not exist. Paged caches
        share the pool and the pages (copy-on-write); reset the cache that is no longer needed, to free its pages.
        """
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise ValueError(
                f"rows is {list(rows)}; one or more of 0 to {self.batch_size - 1} are needed"
            )
        index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        used = self.pos if self.pages is None else None
        return self._with_streams(lambda stream: stream.select_rows(index, used), rows)

    def to(self, device: torch.device | str) -> Self:
        """A copy of the cache on another device; itself if it is already there.

        Raises ValueError for a paged cache, whose pool may be shared.
        """
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        if self.pages is not None:
            raise ValueError("a paged cache cannot be moved: its pool may be shared")
        other = self._with_streams(lambda stream: stream.to(target), range(self.batch_size))
        other.device = target
        with torch.inference_mode(False):
            other.lengths.seq_lens = other.lengths.seq_lens.to(target)
        return other

    def _with_streams(
        self, change: Callable[[CacheTensor], CacheTensor], rows: Sequence[int]
    ) -> Self:
        """A copy of some rows, with ``change`` applied to each stream."""
        self.narrow_tails()
        other = copy.copy(self)
        other.batch_size = len(rows)
        with torch.inference_mode(False):  # else buffers are read-only outside of it
            other.streams = {name: change(stream) for name, stream in self.streams.items()}
            other.lengths = self.lengths.select_rows(rows)
            other.pages = None if self.pages is None else self.pages.select_rows(rows)
        other.tail = self.tail.select_rows(rows)
        other.plans = LayerPlans(other.streams, self.n_kv_heads)
        vars(other).update(other.streams)
        return other

    def grow(self, max_seq_len: int) -> None:
        """Moves the stored bytes to buffers for ``max_seq_len`` tokens per row; ValueError for a paged cache."""
        if self.pages is not None:
            raise ValueError("a paged cache does not grow; make its pool larger")
        if max_seq_len > self.max_seq_len:
            self._become(self._resized(max_seq_len, 0))

    def drop_front(self, count: int, max_seq_len: int) -> None:
        """Drops the first ``count`` tokens of every row, a multiple of ``group``; slot s moves to slot ``s - count``.

        The remaining tokens have to fit into the new ``max_seq_len``. Raises ValueError for a paged cache, a cache with
        sinks, rows of different lengths, or a count out of range.
        """
        self._become(self.without_front(count, max_seq_len))

    def without_front(self, count: int, max_seq_len: int) -> Self:
        """What `drop_front` makes of this cache, as another one, beside which this one must not be used any more.

        Until then this one is as it was, even if memory runs out.
        """
        step = self.group
        if any(stream.sink is not None for stream in self.streams.values()):
            raise ValueError("sinks hold the first tokens of a row; sink_len=0 lets them go")
        if self.pages is not None or len(set(self.lengths.host)) > 1:
            raise ValueError("tokens in front are dropped of contiguous rows of equal length alone")
        if not 0 <= count <= self.pos or count % step:
            raise ValueError(f"count is {count}; a multiple of {step} up to {self.pos} is allowed")
        kept = self.pos - count
        if max_seq_len < kept:
            raise ValueError(f"max_seq_len is {max_seq_len}; {kept} tokens stay")
        self.narrow_tails()
        other = self._resized(max_seq_len, count)
        other.tail = self.tail.select_rows(range(self.batch_size))
        other.tail.lowest = [max(low - count, 0) for low in self.tail.lowest]
        with torch.inference_mode(False):
            other.lengths = self.lengths.select_rows(range(self.batch_size))
            other.lengths.set([length - count for length in self.lengths.host])
        return other

    def _resized(self, max_seq_len: int, start: int) -> Self:
        """A copy with room for ``max_seq_len`` tokens a row and the tokens from ``start`` on, but the same lengths."""
        other, slots = copy.copy(self), capacity(max_seq_len)
        with torch.inference_mode(False):
            other.streams = {
                name: stream.resized(slots, start, self.pos - start)
                for name, stream in self.streams.items()
            }
        other.max_seq_len, other.plans = max_seq_len, LayerPlans(other.streams, self.n_kv_heads)
        vars(other).update(other.streams)
        return other

    def _become(self, other: Self) -> None:
        """Takes the state of another cache, in one call: an interrupt comes before or after it."""
        vars(self).update(vars(other))

    def state_dict(self) -> dict[str, Any]:
        """Contents and storage settings of the cache, as tensors, numbers and names; see `load_state_dict`.

        Raises ValueError for a paged cache, whose pool may be shared.
        """
        if self.pages is not None:
            raise ValueError("the state of a paged cache is not saved: its pool may be shared")
        self.narrow_tails()
        return {
            "batch_size": self.batch_size,
            "max_seq_len": self.max_seq_len,
            "n_kv_heads": self.n_kv_heads,
            "lengths": list(self.lengths.host),
            "tail_lowest": self.tail.held_from(self.lengths.host),
            "streams": {name: s.state(self.pos) for name, s in self.streams.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of a cache with the same rows, streams and storage.

        Lengths are checked against the state's tensors, so a bad number cannot cause a large allocation. Raises
        ValueError, changing nothing, if the state does not match or contradicts itself.
        """
        self.narrow_tails()
        sizes = {"batch_size": self.batch_size, "n_kv_heads": self.n_kv_heads}
        state_dict = without_constants(state_dict)
        problems = mismatches(state_dict, sizes, self.streams, paged=self.pages is not None)
        problems = problems or contradictions(state_dict, sizes, self.streams)
        if problems:
            raise ValueError(f"the state does not fit: {'; '.join(problems)}")
        longest = max(state_dict["lengths"])
        max_seq_len = max(longest, self.max_seq_len)
        slots = capacity(max_seq_len)
        with torch.inference_mode(False), torch.no_grad():
            parts = {n: on_device(state_dict["streams"][n], self.device) for n in self.streams}
            buffers = {name: stream.roomy(slots) for name, stream in self.streams.items()}
            # What follows only copies and cannot fail.
            self.reset()
            for name, stream in self.streams.items():
                stream.replace_buffers(*buffers[name])
                stream.load(parts[name], longest)
        self.max_seq_len, self._begun_padded = max_seq_len, None
        self.tail.lowest = list(state_dict["tail_lowest"])
        self.lengths.set(state_dict["lengths"])


def _check_order(beam_idx: Tensor, rows: int) -> None:
    """Raises ValueError unless there is an integer for each row."""
    if not isinstance(beam_idx, Tensor):
        raise TypeError(f"beam_idx is a {type(beam_idx).__name__}; a tensor is needed")
    countable = not beam_idx.is_floating_point() and beam_idx.dtype != torch.bool
    if beam_idx.shape != (rows,) or not countable:
        raise ValueError(
            f"beam_idx is {tuple(beam_idx.shape)} {beam_idx.dtype}; ({rows},) integers are needed"
        )
