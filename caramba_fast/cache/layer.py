"""Caches of one attention layer: standard (K, V) and decoupled (K_sem, K_geo, V).

AttentionLimits: how far back reads of a cache go, and how many query tokens they take at a time.

Checks of what a layer cache is made with.

LayerCache: what the caches of one attention layer have in common.

What grows, shrinks and moves is the same for standard and decoupled attention, contiguous or paged, with or
without tail and sinks: it is written once, over the layer's streams.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache import rows
from caramba_fast.cache.calibration import LayerCalibration
from caramba_fast.cache.pages import PageAllocator, PageTable
from caramba_fast.cache.plans import LayerPlans
from caramba_fast.cache.rows import Counts, RowLengths
from caramba_fast.cache.statistics import StreamStatistics
from caramba_fast.cache.stream import CacheTensor, TailKeeper, capacity
from caramba_fast.config import KVCacheTensorConfig, Rotary
from caramba_fast.ops import Transform, checks
from caramba_fast.ops.append import append_op, decoupled_append_op, plan_append
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS, plan_attention
from caramba_fast.ops.decode_attention import decode_op, decoupled_decode_op
from caramba_fast.ops.extend_attention import decoupled_extend_op, extend_op, window_of
from caramba_fast.ops.registry import Op
from caramba_fast.ops.transform import undo_on_key, undo_on_value
from caramba_fast.ops.view import Lanes, load

if TYPE_CHECKING:
    from typing_extensions import Self


class AttentionLimits(NamedTuple):
    """Limits of every read of a cache, on top of the model's own.

    Attributes:
        q_chunk: query tokens `ops.extend_attention` takes at a time, which bounds its scratch and changes no
            result; None for the op's default.
        local_window: tokens a query reaches back, itself included, where the model reaches no less far;
            None for no limit. **It changes results.**
        bucket: which part of a decode plan it came from, for reports.
    """

    q_chunk: int | None = None
    local_window: int | None = None
    bucket: str = "none"

    def problems(self) -> list[str]:
        """What is out of range."""
        given = {"q_chunk": self.q_chunk, "local_window": self.local_window}
        return [
            f"{name} is {value!r}; 1 or more, or None, is allowed"
            for name, value in given.items()
            if value is not None and (type(value) is not int or value < 1)
        ]

    def window(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """``window_size`` of a read: the narrower of the call's own and ``local_window``."""
        left, right = options.get("window_size") or (-1, -1)
        if self.local_window is None:
            return left, right
        most = self.local_window - 1
        return (most if left < 0 else min(left, most)), right


class LayerOps(NamedTuple):
    """The ops that serve a kind of layer."""

    append: Op
    decode: Op
    extend: Op


def check_sizes(
    batch_size: int,
    max_seq_len: int,
    n_kv_heads: int,
    dims: dict[str, int],
    page_size: int | None,
    num_pages: int | None,
) -> None:
    """Raises ValueError naming the size that is not positive or does not divide."""
    sizes: dict[str, Any] = {
        "batch_size": batch_size,
        "max_seq_len": max_seq_len,
        "n_kv_heads": n_kv_heads,
    }
    sizes.update({f"{name}_dim": dim for name, dim in dims.items()})
    sizes.update(
        {n: x for n, x in (("page_size", page_size), ("num_pages", num_pages)) if x is not None}
    )
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; a positive int is needed")
    for name, dim in dims.items():
        if dim % n_kv_heads:
            raise ValueError(f"{name}_dim={dim} is not a multiple of n_kv_heads={n_kv_heads}")
    if page_size is not None and page_size % 32:
        raise ValueError(f"page_size is {page_size}; a multiple of 32 is needed")
    if num_pages is not None and page_size is None:
        raise ValueError("num_pages was given without page_size; only a paged cache has pages")


def check_agreement(configs: dict[str, KVCacheTensorConfig]) -> None:
    """Raises ValueError when tail or sinks differ between the tensors of a layer, or values are centered."""
    if configs["v"].center:
        raise ValueError("v is to be centered; center is for keys")
    for field in ("residual_len", "tail_slack", "sink_len"):
        values = {name: getattr(config, field) for name, config in configs.items()}
        if len(set(values.values())) > 1:
            raise ValueError(f"{field} must be the same for all tensors of a layer, got {values}")


class LayerCache:
    """Streams of one layer and the lengths of their rows; see `caramba_fast.cache.layer`.

    Args:
        batch_size: rows.
        max_seq_len: tokens a row can hold.
        dims: width of each stream over all kv heads.
        configs: storage of each stream, same keys.
        device: where the buffers live.
        n_kv_heads: kv heads; every width is a multiple of it.
        page_size: None for a contiguous cache (memory for max_seq_len tokens a row, rounded up to 128),
            else tokens of a page, a multiple of 32.
        num_pages: pages of the pool; by default enough for every row to reach max_seq_len.
        calibration: what is known of keys and values beforehand. The constants of the transforms follow from it when
            the first tokens arrive, and stay while the cache holds any.
    """

    _ops: LayerOps

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        dims: dict[str, int],
        configs: dict[str, KVCacheTensorConfig],
        device: torch.device | str,
        n_kv_heads: int,
        page_size: int | None,
        num_pages: int | None,
        *,
        calibration: LayerCalibration | None = None,
    ) -> None:
        check_sizes(batch_size, max_seq_len, n_kv_heads, dims, page_size, num_pages)
        check_agreement(configs)
        self.calibration = calibration or LayerCalibration()
        self.calibration.check({name: dim // n_kv_heads for name, dim in dims.items()}, n_kv_heads)
        self._by_hand = False  # set_transforms has been called
        self._widened = 0  # tokens the tails have been given room for
        #: Later layers attend to what is stored here as well: the tails stay wide until the next change.
        self.attended_again = False
        #: Attend to all slots by name, whatever is held: a recorded read then serves every length.
        self.reads_all_slots = False
        #: Limits of every read, as a decode plan sets them (`ModelKVCache.reach`).
        self.reach = AttentionLimits()
        self.plans = LayerPlans()
        self.batch_size, self.max_seq_len, self.n_kv_heads = batch_size, max_seq_len, n_kv_heads
        self.device = torch.device(device)
        with torch.inference_mode(False):  # buffers made under it could not be written outside it
            self._allocate(dims, configs, page_size, num_pages)
        first = next(iter(configs.values()))
        self.residual_len, self.tail_slack = first.residual_len, first.tail_slack
        self._tail = TailKeeper(batch_size, first.residual_len, first.tail_len)

    def _allocate(
        self,
        dims: dict[str, int],
        configs: dict[str, KVCacheTensorConfig],
        page_size: int | None,
        num_pages: int | None,
    ) -> None:
        batch_size, max_seq_len, n_kv_heads = self.batch_size, self.max_seq_len, self.n_kv_heads
        heads = {name: dim // n_kv_heads for name, dim in dims.items()}
        lanes = Lanes.of(n_kv_heads, *heads.values())
        self.pages: PageTable | None = None
        blocks = (batch_size, capacity(max_seq_len))
        if page_size is not None:
            per_row = -(-max_seq_len // page_size)
            blocks = (num_pages or batch_size * per_row, page_size)
            allocator = PageAllocator(blocks[0])
            self.pages = PageTable(batch_size, per_row, page_size, allocator, self.device)
        self.streams = {
            name: CacheTensor(batch_size, blocks, lanes, heads[name], configs[name], self.device)
            for name in dims
        }
        self.lengths = RowLengths(batch_size, self.device)

    # -- what it holds ------------------------------------------------------------------

    @property
    def pos(self) -> int:
        """Tokens in the longest row."""
        return self.lengths.longest

    @property
    def seq_lens(self) -> Tensor:
        """(B,) int32 on the device, tokens in each row; updated in place."""
        return self.lengths.seq_lens

    @property
    def is_empty(self) -> bool:
        """Whether no row holds a token."""
        return self.pos == 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, tails and sinks of all streams, unused slots, block table."""
        table = 0 if self.pages is None else self.pages.tensor.nbytes
        return table + sum(stream.nbytes for stream in self.streams.values())

    @property
    def bytes_per_token(self) -> float:
        """Bytes of codes and scales that one token of one row takes."""
        parts = [x for s in self.streams.values() for x in (s.codes, s.scales) if x is not None]
        return sum(x.nbytes / (x.shape[0] * x.shape[2]) for x in parts)

    def get(
        self, dtype: torch.dtype = torch.float32, cache_leftpad: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Every stream dequantized, in the model's basis: (B, H_kv, pos, D); 0 past a row's length.

        The codes are read, not the fp16 tail or sinks.
        """
        position = torch.arange(self.pos, device=self.device)
        held = (position < self.seq_lens[:, None])[:, None, :, None]
        t = position.expand(self.batch_size, -1)
        t = t if cache_leftpad is None else t - cache_leftpad[:, None]
        found = []
        for name, stream in self.streams.items():
            x = self._stored(stream, self.pos)
            x = (
                undo_on_value(x, stream.transform)
                if name == "v"
                else undo_on_key(x, t, stream.transform)
            )
            found.append(torch.where(held, x, torch.zeros_like(x)).to(dtype))
        return tuple(found)

    def _stored(self, stream: CacheTensor, length: int) -> Tensor:
        """(B, H_kv, length, D) float32 in the stored basis."""
        parts = []
        for buffer in (stream.codes, stream.scales):
            if buffer is not None and self.pages is not None:
                page = self.pages.columns(length).to(torch.int64).clamp(min=0)
                buffer = buffer[page].transpose(1, 2).flatten(2, 3)  # noqa: PLW2901
            parts.append(None if buffer is None else buffer[:, :, :length])
        assert parts[0] is not None
        return stream.lanes.unpack(
            load(parts[0], parts[1], stream.config.kind.value, torch.float32)
        )

    def set_transforms(self, **transforms: Transform) -> None:
        """Fixes the constants streams are stored with, by stream name, until `reset`.

        Raises:
            ValueError: the cache holds tokens, a stream is unknown, or constants do not fit.
        """
        if not self.is_empty:
            raise ValueError(
                f"transforms are fixed while tokens are cached ({self.pos} are); reset() first"
            )
        problems = [
            f"unknown stream {n!r}; streams are {', '.join(self.streams)}"
            for n in transforms
            if n not in self.streams
        ]
        for name, transform in transforms.items():
            if name in self.streams:
                dim = self.streams[name].head_dim
                problems += transform.problems(name, self.n_kv_heads, dim, self.max_seq_len)
        if "v" in transforms and (
            transforms["v"].mean is not None or transforms["v"].bias is not None
        ):
            problems.append("v can be scaled and rotated; mean and bias are for keys")
        checks.raise_all("set_transforms", problems)
        self._by_hand = True
        for name, transform in transforms.items():
            rotate = transform.rotate or self.streams[name].config.rotate
            self.streams[name].transform = replace(transform.to(self.device), rotate=rotate)

    def take_constants(
        self,
        new: dict[str, Tensor] | None = None,
        added: Sequence[int] = (0,),
        cache_leftpad: Tensor | None = None,
    ) -> None:
        """Sets the transforms that follow from what is known, and from the first tokens where there are any.

        Args:
            new: (B, H_kv, T, D) of each stream, the first tokens of every row.
            added: how many of the T tokens of each row are real.
            cache_leftpad: (B,) leading tokens that are padding.
        """
        configs = {name: stream.config for name, stream in self.streams.items()}
        slots = capacity(self.max_seq_len)
        found = self.calibration.transforms(configs, slots, new or {}, added, cache_leftpad)
        for name, transform in found.items():
            self.streams[name].transform = transform.to(self.device)

    # -- growing ------------------------------------------------------------------------

    def _append(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
    ) -> None:
        self._narrow()
        plain = new_lens is None and not torch.is_grad_enabled()
        if not (plain and self._append_planned(new, cache_leftpad)):
            self._append_anew(new, new_lens, cache_leftpad, will_attend)

    @torch.no_grad()  # a cache holds numbers, not a graph
    def _append_anew(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
    ) -> None:
        new = {name: self._heads(name, x, self.streams[name]) for name, x in new.items()}
        counts = {name: x.shape[2] for name, x in new.items()}
        tokens = next(iter(counts.values()))
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
            raise ValueError(f"{listed} tokens; they must agree")
        added = self.lengths.per_row("new_lens", tokens if new_lens is None else new_lens)
        table = self._make_room(tokens, added)
        query_lens = None if min(added) == tokens else self.lengths.on_device(added)
        if self.is_empty and not self._by_hand:
            self.take_constants(new, added, cache_leftpad)
        if self.residual_len and will_attend and tokens > self.tail_slack:
            start = self.seq_lens.clone()
            self._widened = tokens
            for stream in self.streams.values():
                stream.widen_tail(start, tokens)
        try:
            self.write(tuple(new.values()), self.seq_lens, table, cache_leftpad, query_lens)
        except BaseException:
            if self.pages is not None:  # nothing was written: the pages reserved for it go back
                self.pages.shrink(self.lengths.host)
            self._narrow()
            raise
        self.lengths.advance(tokens, added, query_lens)
        self._tail.appended(self.lengths.host)

    def _append_planned(self, new: dict[str, Tensor], cache_leftpad: Tensor | None) -> bool:
        """A step like an earlier one, in a contiguous cache: whether it was one, and is done."""
        lengths, longest = self.lengths, self.lengths.longest
        if self.pages is not None or not longest:
            return False
        tensors = (*new.values(), lengths.seq_lens)
        options = {} if cache_leftpad is None else {"cache_leftpad": cache_leftpad}
        views = self.plans.views(self.streams.values())
        plan = self.plans.find(self._ops.append, tensors, views, options)
        if plan is None:
            return False
        tokens = tensors[0].shape[2]
        if longest + tokens > self.max_seq_len or (self.residual_len and tokens > self.tail_slack):
            return False
        plan.run(tensors, options)
        lengths.advance_all(tokens)
        self._tail.appended(lengths.host)
        return True

    def _make_room(self, tokens: int, added: Sequence[int]) -> Tensor | None:
        """Checks that row b can take ``added[b]`` of ``tokens`` and reserves pages; the block table."""
        for row, (length, count) in enumerate(zip(self.lengths.host, added, strict=True)):
            if not 0 <= count <= tokens:
                raise ValueError(f"new_lens[{row}] is {count}; 0 to T={tokens} is allowed")
            if length + count > self.max_seq_len:
                raise ValueError(
                    f"row {row} holds {length} tokens and cannot take {count} more: "
                    f"max_seq_len is {self.max_seq_len}"
                )
        if self.pages is None:
            return None
        self.copy_pages(self.pages.reserve(self.lengths.host, added))
        return self.pages.tensor

    def before_replay(self) -> None:
        """The host's part of an append of one token a row whose device work was recorded: makes room.

        Raises:
            ValueError, OutOfPagesError: as `append`.
        """
        self._narrow()
        self._make_room(1, [1] * self.batch_size)

    def after_replay(self) -> None:
        """The host takes note of the token that the recorded append has written to each row."""
        lengths = self.lengths
        lengths.host = [length + 1 for length in lengths.host]
        lengths.newest, lengths.query_lens = 1, None
        self._tail.appended(lengths.host)

    def write(
        self,
        new: Sequence[Tensor],
        start: Tensor,
        block_table: Tensor | None,
        cache_leftpad: Tensor | None,
        query_lens: Tensor | None,
    ) -> None:
        """Runs the append op on what is stored; lengths and pages are the caller's."""
        given = dict(block_table=block_table, cache_leftpad=cache_leftpad, query_lens=query_lens)
        options = {name: value for name, value in given.items() if value is not None}
        views, tensors, op = (
            self.plans.views(self.streams.values()),
            (*new, start),
            self._ops.append,
        )
        plan = self.plans.find(op, tensors, views, options)
        if plan is None:
            named = dict(zip(self.streams, views, strict=True))
            plan = self.plans.keep(op, new[0], plan_append(op, named, new, start, options))
        plan.run(tensors, options)

    def read(
        self,
        queries: Sequence[Tensor],
        cache_seqlens: Tensor,
        options: dict[str, Any],
        slots: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the attention op for so many queries on what is stored, or its first ``slots``: out and lse.

        Arguments as of `ops.decode_attention`, and `ops.extend_attention` for more than 32 queries.
        """
        extends = queries[0].shape[2] > MAX_QUERY_TOKENS
        op = self._ops.extend if extends else self._ops.decode
        options = window_of(options) if extends else options
        options = {name: value for name, value in options.items() if value is not None}
        views, tensors = self.plans.views(self.streams.values(), slots), (*queries, cache_seqlens)
        plan = self.plans.find(op, tensors, views, options)
        if plan is None:
            named = dict(zip(self.streams, views, strict=True))
            plan = plan_attention(op, named, queries, cache_seqlens, self.n_kv_heads, options)
            self.plans.keep(op, queries[0], plan)
        found: tuple[Tensor, Tensor] = plan.run(tensors, options)
        return found

    def copy_pages(self, moved: Sequence[tuple[int, int]]) -> None:
        """Copies what is stored in pages of the pool to others: (from, to)."""
        if not moved:
            return
        source, target = (
            torch.tensor(pages, device=self.device) for pages in zip(*moved, strict=True)
        )
        for stream in self.streams.values():
            for buffer in (stream.codes, stream.scales):
                if buffer is not None:
                    buffer[target] = buffer[source]

    def _heads(self, name: str, x: Tensor, stream: CacheTensor) -> Tensor:
        checks.float_tensor(name, x)
        wanted = (self.n_kv_heads, stream.head_dim)
        if x.ndim == 3 and x.shape[2] == wanted[0] * wanted[1]:
            x = x.unflatten(2, wanted).transpose(1, 2)
        fits = x.ndim == 4 and x.shape[0] == self.batch_size and (x.shape[1], x.shape[3]) == wanted
        if not fits or x.shape[2] == 0:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; ({self.batch_size}, {wanted[0]}, T, {wanted[1]}) "
                f"or ({self.batch_size}, T, {wanted[0] * wanted[1]}) with T >= 1 is needed"
            )
        if x.device != stream.codes.device:
            raise ValueError(f"{name} is on {x.device}; the cache is on {stream.codes.device}")
        return x

    # -- reading ------------------------------------------------------------------------

    @property
    def attendable(self) -> int:
        """Most newest tokens that can be attended from at once, where there is a tail."""
        return max(self.tail_slack, self._widened)

    def _narrow(self) -> None:
        """Gives up the room a tail was given for many tokens at once."""
        if self._widened:
            for stream in self.streams.values():
                stream.narrow_tail(self.seq_lens)
            self._widened = 0

    def _attend(self, *queries: Tensor, before: int = 0, **options: Any) -> Any:
        q = queries[0]
        tokens = q.shape[2] + before if q.ndim == 4 and before >= 0 else 0
        lengths, most = self.lengths, self.attendable
        if not 1 <= tokens <= max(self.pos, lengths.newest):
            raise ValueError(
                f"q has shape {tuple(q.shape)}; (B, H_q, T, D) with T from 1 to the "
                f"{max(self.pos, lengths.newest)} tokens cached is needed"
            )
        if self.residual_len and tokens > most:
            raise ValueError(
                f"q has T={tokens} tokens; with a tail up to tail_slack={self.tail_slack} are allowed, "
                "or those of the latest append, once and right after it"
            )
        if lengths.query_lens is not None and (before or tokens != lengths.newest):
            raise ValueError(
                f"q has T={tokens} tokens after an append of {lengths.newest} with padding; "
                "they must agree"
            )
        slots = None
        if self.pages is not None:
            whole = self.reads_all_slots
            options["block_table"] = self.pages.tensor if whole else self.pages.columns(self.pos)
        elif not self.reads_all_slots:
            slots = capacity(max(self.pos, 1))
        if lengths.query_lens is not None:
            options.setdefault("query_lens", lengths.query_lens)
        if self.residual_len:
            options["residual_len"] = self.residual_len
        if self.reach.local_window is not None:
            options["window_size"] = self.reach.window(options)
        if self.reach.q_chunk is not None and q.shape[2] > MAX_QUERY_TOKENS:
            options.setdefault("q_chunk", self.reach.q_chunk)
        with_lse = options.pop("return_softmax_lse", False)
        held = self.seq_lens - before if before else self.seq_lens
        out, lse = self.read(queries, held, options, slots)
        if not before and not self.attended_again:
            self._narrow()
        return (out, lse) if with_lse else out

    # -- shrinking and moving -----------------------------------------------------------

    def crop(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens of every row, or ``n[b]`` of row b (a CPU tensor or list).

        Raises:
            TypeError, ValueError: negative, more than a row holds, or a wrong number of rows.
        """
        counts = self.lengths.per_row("n", n)
        for row, (length, count) in enumerate(zip(self.lengths.host, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot crop {count} tokens of row {row}, which holds {length}")
        self.set_lengths([a - b for a, b in zip(self.lengths.host, counts, strict=True)])

    def truncate(self, new_pos: int) -> None:
        """Keeps the first ``new_pos`` tokens of every row; rows that are shorter stay as they are.

        Raises:
            ValueError: ``new_pos`` is negative or beyond the longest row.
        """
        if type(new_pos) is not int or not 0 <= new_pos <= self.pos:
            raise ValueError(f"new_pos is {new_pos!r}; 0 to {self.pos} (tokens cached) is allowed")
        self.set_lengths([min(length, new_pos) for length in self.lengths.host])

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Shortens rows to ``lengths``, none longer than it is."""
        self._narrow()
        self._tail.shortened(self.lengths.host, lengths, self._refill)
        self.lengths.set(lengths)
        if self.pages is not None:
            self.pages.shrink(lengths)

    def _refill(self, row: int, start: int, stop: int) -> None:
        """Puts positions start…stop of a row back into the ring, from their codes."""
        for stream in self.streams.values():
            assert stream.tail is not None
            position = torch.arange(start, stop, device=self.device)
            stored = stream.lanes.pack(self._stored(stream, stop)[row : row + 1, :, start:])
            stream.tail[row, :, position % stream.tail.shape[2]] = stored[0].to(stream.tail.dtype)

    def tail_state(self) -> tuple[list[Tensor], list[int]]:
        """Copies of the fp16 rings, for `restore_tail`: what they hold now cannot be had from the codes again."""
        self._narrow()
        rings = [stream.tail.clone() for stream in self.streams.values() if stream.tail is not None]
        return rings, list(self._tail.lowest)

    def restore_tail(self, state: tuple[list[Tensor], list[int]]) -> None:
        """Puts rings back, after the rows have got the lengths they had then."""
        rings, lowest = state
        tails = [stream.tail for stream in self.streams.values() if stream.tail is not None]
        for tail, ring in zip(tails, rings, strict=True):
            tail.copy_(ring)
        self._tail.lowest = list(lowest)

    def reorder(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was (beam search); a paged cache shares the pages.

        Args:
            beam_idx: (B,) integer tensor; on cpu when the cache is paged or rows differ in length, since
                nothing is ever read from a device.
        """
        countable = not beam_idx.is_floating_point() and beam_idx.dtype != torch.bool
        if beam_idx.shape != (self.batch_size,) or not countable:
            raise ValueError(
                f"beam_idx is {tuple(beam_idx.shape)} {beam_idx.dtype}; ({self.batch_size},) "
                "integers are needed"
            )
        self._narrow()
        order = beam_idx.to(device=self.device, dtype=torch.int64)
        if beam_idx.device.type == "cpu":
            rows = beam_idx.tolist()
            if min(rows) < 0 or max(rows) >= self.batch_size:
                raise ValueError(f"beam_idx is {rows}; 0 to {self.batch_size - 1} is allowed")
            self._tail.reordered(rows)
            if self.pages is not None:
                self.pages.reorder(rows)
            self.lengths.set([self.lengths.host[row] for row in rows])
        elif self.pages is not None or len(set(self.lengths.host)) > 1:
            raise ValueError("beam_idx must be on cpu while rows differ in length or are paged")
        else:
            self._tail.reordered_unknown()
            self.lengths.set(self.lengths.host)
        for stream in self.streams.values():
            whole = [stream.tail, stream.sink]
            used = (
                []
                if self.pages
                else [x[:, :, : self.pos] for x in (stream.codes, stream.scales) if x is not None]
            )
            for part in (*used, *(x for x in whole if x is not None)):
                part.copy_(part.index_select(0, order))

    def select_rows(self, rows: Sequence[int]) -> Self:
        """A new cache whose row b holds what row ``rows[b]`` holds here; this one stays as it is.

        Rows may repeat or be left out, and there may be any number of them. A paged cache shares the pool and
        the pages, which are copied when one of the rows writes; reset the one that is no longer needed, so
        that its pages are free again.

        Raises:
            ValueError: no rows, or one that does not exist.
        """
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise ValueError(
                f"rows is {list(rows)}; one or more of 0 to {self.batch_size - 1} are needed"
            )
        self._narrow()
        other = copy.copy(self)
        other.batch_size, other.plans = len(rows), LayerPlans()
        index = torch.tensor(rows, dtype=torch.int64).to(self.device)
        used = None if self.pages is not None else self.pos
        with torch.inference_mode(False):  # as in __init__
            other.streams = {name: s.select_rows(index, used) for name, s in self.streams.items()}
            other.lengths = self.lengths.select_rows(rows)
            other.pages = None if self.pages is None else self.pages.select_rows(rows)
        other._tail = self._tail.select_rows(rows)
        other._name_streams()
        return other

    def grow(self, max_seq_len: int) -> None:
        """Makes room for ``max_seq_len`` tokens a row, in new buffers; what is stored stays as it is.

        Raises:
            ValueError: a paged cache, or transforms set by hand that end before.
        """
        rows.grow(self, max_seq_len)

    def drop_front(self, count: int, max_seq_len: int) -> None:
        """Forgets the first ``count`` tokens of every row; later tokens move to the front.

        Rows with leading padding must have none of it dropped, if keys are centered: their phases count from its end.

        Args:
            count: a multiple of ``residual_len + tail_slack``, if there is a tail.
            max_seq_len: room afterwards.

        Raises:
            ValueError: a paged cache, rows that differ in length, or a count out of range.
        """
        rows.drop_front(self, count, max_seq_len)

    def state_dict(self) -> dict[str, Any]:
        """What the cache holds and how, as tensors, numbers and names; see `load_state_dict`.

        Raises:
            ValueError: a paged cache, whose pool may be shared.
        """
        return rows.state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a cache of the same rows, streams and storage, and its transforms.

        Raises:
            ValueError: one that differs, and in what; nothing has changed then.
        """
        rows.load_state(self, state_dict)

    def to(self, device: torch.device | str) -> Self:
        """The cache on another device; itself where it is there already.

        Raises:
            ValueError: a paged cache, whose pool may be shared.
        """
        found: Any = rows.moved(self, device)
        return found

    def _name_streams(self) -> None:
        """Sets the attributes that stand for single streams."""
        for name, stream in self.streams.items():
            setattr(self, name, stream)

    def reset(self) -> None:
        """Forgets everything, transforms set by hand included; the memory stays allocated."""
        self.set_lengths([0] * self.batch_size)
        self._by_hand = False
        for stream in self.streams.values():
            stream.transform = Transform(rotate=stream.config.rotate)


class LayerKVCache(LayerCache):
    """K and V of one layer, each in any kind.

    Args:
        batch_size: rows.
        max_seq_len: tokens a row can hold.
        k_dim, v_dim: width of K and of V over all kv heads, ``n_kv_heads * head_dim`` each.
        k_cfg, v_cfg: how each is stored; by default fp16.
        device: where the buffers live.
        n_kv_heads: kv heads; both widths must be multiples of it.
        page_size, num_pages: a paged cache; see `LayerCache`.
        rope: RoPE of the keys, which configs with ``center`` or ``scale`` take into account.
        key_bias, calibration, constants_from_prompt: where their constants come from; see `LayerCalibration`.

    Raises:
        ValueError: a size that is not positive or does not divide, a block that does not fit.
    """

    k: CacheTensor
    v: CacheTensor
    _ops = LayerOps(append_op, decode_op, extend_op)

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        k_dim: int,
        v_dim: int,
        k_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        n_kv_heads: int = 1,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        rope: Rotary | None = None,
        key_bias: StreamStatistics | None = None,
        calibration: dict[str, StreamStatistics] | None = None,
        constants_from_prompt: bool = True,
    ) -> None:
        dims = {"k": k_dim, "v": v_dim}
        configs = {"k": k_cfg or KVCacheTensorConfig(), "v": v_cfg or KVCacheTensorConfig()}
        super().__init__(
            batch_size, max_seq_len, dims, configs, device, n_kv_heads, page_size, num_pages,
            calibration=LayerCalibration(
                {} if rope is None else {"k": rope}, {} if key_bias is None else {"k": key_bias},
                calibration or {}, constants_from_prompt,
            ),
        )  # fmt: skip
        self._name_streams()

    def append(
        self,
        k: Tensor,
        v: Tensor,
        new_lens: Sequence[int] | None = None,
        cache_leftpad: Tensor | None = None,
        *,
        will_attend: bool = True,
    ) -> None:
        """Quantizes and stores T tokens a row.

        Args:
            k: (B, H_kv, T, D_k), or flat (B, T, k_dim); float32, float16 or bfloat16.
            v: (B, H_kv, T, D_v), or flat (B, T, v_dim).
            new_lens: of the T tokens of row b the first ``new_lens[b]`` count, the rest is padding and
                is not stored; by default all count.
            cache_leftpad: (B,) int32, leading slots that hold padding (transforms count from there).
            will_attend: whether `attend` follows with the queries of all T tokens. With a tail, more than
                tail_slack of them need memory until then; False saves it.

        Raises:
            ValueError: a wrong shape, or a row that would exceed max_seq_len.
            OutOfPagesError: the pool of a paged cache is too small.
            TypeError: a wrong dtype. The cache is unchanged in every case.
        """
        self._append({"k": k, "v": v}, new_lens, cache_leftpad, will_attend)

    def attend(self, q: Tensor, *, before: int = 0, **options: Any) -> Any:
        """Attention of the T newest tokens over everything cached, as `ops.decode_attention`.

        Args:
            q: (B, H_q, T, D_k), queries of the T tokens appended last; more than 32 go through
                `ops.extend_attention`.
            before: how many of the newest tokens of every row come after these T; they are not seen.
            options: softmax_scale, window_size, softcap, … of `ops.decode_attention`.

        Raises:
            ValueError: more queries than tokens cached, or an option that does not fit.
        """
        return self._attend(q, before=before, **options)


class DecoupledLayerKVCache(LayerCache):
    """K_sem, K_geo and V of one layer of decoupled attention, each in any kind.

    Args:
        batch_size, max_seq_len, device, n_kv_heads, page_size, num_pages: as in `LayerKVCache`.
        k_sem_dim, k_geo_dim, v_dim: widths over all kv heads.
        k_sem_cfg, k_geo_cfg, v_cfg: how each is stored; by default fp16.
        rope: RoPE of the geometric keys.
        calibration, constants_from_prompt: where the constants of ``center`` and ``scale`` come from; see
            `caramba_fast.cache.calibration.LayerCalibration`.

    Raises:
        ValueError: as in `LayerKVCache`.
    """

    k_sem: CacheTensor
    k_geo: CacheTensor
    v: CacheTensor
    _ops = LayerOps(decoupled_append_op, decoupled_decode_op, decoupled_extend_op)

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        k_sem_dim: int,
        k_geo_dim: int,
        v_dim: int,
        k_sem_cfg: KVCacheTensorConfig | None = None,
        k_geo_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        n_kv_heads: int = 1,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        rope: Rotary | None = None,
        calibration: dict[str, StreamStatistics] | None = None,
        constants_from_prompt: bool = True,
    ) -> None:
        dims = {"k_sem": k_sem_dim, "k_geo": k_geo_dim, "v": v_dim}
        given = {"k_sem": k_sem_cfg, "k_geo": k_geo_cfg, "v": v_cfg}
        configs = {name: config or KVCacheTensorConfig() for name, config in given.items()}
        super().__init__(
            batch_size, max_seq_len, dims, configs, device, n_kv_heads, page_size, num_pages,
            calibration=LayerCalibration(
                {} if rope is None else {"k_geo": rope}, {}, calibration or {}, constants_from_prompt
            ),
        )  # fmt: skip
        self._name_streams()

    def append(
        self,
        k_sem: Tensor,
        k_geo: Tensor,
        v: Tensor,
        new_lens: Sequence[int] | None = None,
        cache_leftpad: Tensor | None = None,
        *,
        will_attend: bool = True,
    ) -> None:
        """Quantizes and stores T tokens a row: (B, H_kv, T, D) each, or flat (B, T, dim).

        Arguments and errors as in `LayerKVCache.append`.
        """
        new = {"k_sem": k_sem, "k_geo": k_geo, "v": v}
        self._append(new, new_lens, cache_leftpad, will_attend)

    def attend(self, q_sem: Tensor, q_geo: Tensor, **options: Any) -> Any:
        """Attention of the T newest tokens, as `ops.decoupled_decode_attention`.

        Args:
            q_sem: (B, H_q, T, D_sem); q_geo: (B, H_q, T, D_geo).
            options: sem_scale, geo_scale, window_size, … of the op.
        """
        return self._attend(q_sem, q_geo, **options)
