"""The reference of all attention ops: standard and decoupled, contiguous and paged, any T.

A row's keys are the stored ones, the fp16 tail and sinks that replace some of them, an optional null key, and an
optional sink logit (``s_aux``). Attention over each group is computed in float32, and the partial results are merged
exactly, in the order of the fast kernels: stored, tail and sinks in the stored basis of V, then back to the model's
basis, then null and s_aux. Long inputs are processed in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba_fast.ops.hadamard import rotated
from caramba_fast.ops.merge_state import reference as merge
from caramba_fast.ops.view import KVView, group_of, load, stored_lanes

State = tuple[Tensor, Tensor]

#: Most scores, and most dequantized values, of one piece (4 bytes each).
SCORES_PER_PIECE = 2**20
VALUES_PER_PIECE = 2**21
QUERIES_PER_PIECE = 256


@dataclass(frozen=True)
class Keys:
    """One key stream and its queries.

    Attributes:
        q: (B, H_kv, G * T, D) float32, in the model's basis, times the scale of this stream's q·k.
        view: the stored keys.
        null: (H_kv, D) learned key that every query sees, in the model's basis.
    """

    q: Tensor
    view: KVView
    null: Tensor | None

    def logits(self, keys: Tensor) -> Tensor:
        """keys (B, H_kv, N, D) in the stored basis -> (B, H_kv, G * T, N)."""
        return torch.matmul(rotated(self.q, self.view.rotate), keys.transpose(-1, -2))


class Problem:
    """One attention call: visibility of keys, and where they are stored."""

    def __init__(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[KVView],
        value: KVView,
        factors: Sequence[float],
        nulls: Sequence[Tensor | None],
        cache_seqlens: Tensor,
        *,
        n_kv_heads: int,
        block_table: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        query_lens: Tensor | None = None,
        residual_len: int = 0,
        null_v: Tensor | None = None,
        s_aux: Tensor | None = None,
        window_size: Sequence[int] = (-1, -1),
        num_sink_tokens: int = 0,
        softcap: float = 0.0,
    ) -> None:
        first = queries[0]
        self.batch, self.heads, self.tokens, head_dim = first.shape
        self.n_kv_heads, self.dtype = n_kv_heads, first.dtype
        self.lanes = stored_lanes(keys[0].codes, keys[0].kind, n_kv_heads, head_dim)
        self.keys = [
            Keys(self._group(q.float() * factor), view, null)
            for q, view, factor, null in zip(queries, keys, factors, nulls, strict=True)
        ]
        self.value, self.null_v, self.s_aux = value, null_v, s_aux
        self.block_table, self.residual_len = block_table, residual_len
        self.group = group_of((*keys, value))
        self.window, self.num_sink_tokens, self.softcap = window_size, num_sink_tokens, softcap
        self.sink_len = 0 if value.sink is None else value.sink.shape[2]
        self.last = cache_seqlens.to(torch.int64) - 1
        self.leftpad = (
            torch.zeros_like(self.last) if cache_leftpad is None else cache_leftpad.to(torch.int64)
        )
        index = torch.arange(self.tokens, device=first.device)
        count = (
            torch.full_like(self.last, self.tokens)
            if query_lens is None
            else query_lens.to(torch.int64)
        )
        self.position = (self.last + 1 - count)[:, None] + index  # (B, T)
        self.real = index < count[:, None]

    def _group(self, x: Tensor) -> Tensor:
        """(B, H_q, T, …) -> (B, H_kv, G * T, …)."""
        return x.unflatten(1, (self.n_kv_heads, -1)).flatten(2, 3)

    def visible(self, key: Tensor) -> Tensor:
        """key (B, N) positions -> (B, T, N) bool: causal, in the window, no padding."""
        distance = self.position[:, :, None] - key[:, None]
        seen = (distance >= 0) & (key >= self.leftpad[:, None])[:, None] & self.real[:, :, None]
        left = self.window[0]
        if left >= 0:
            kept = (key - self.leftpad[:, None] < self.num_sink_tokens)[:, None]
            seen = seen & ((distance <= left) | kept)
        return seen

    def source(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Whether key (B, N) is read from the sinks, (B, 1, N), and from the tail, (B, T, N).

        Per-channel kinds read a whole group from the tail until the last of its tokens is out of ``residual_len``.
        """
        in_sink = ((key - self.leftpad[:, None]) < self.sink_len)[:, None]
        last = key - key % self.group + self.group - 1
        in_tail = self.position[:, :, None] - last[:, None] < self.residual_len
        return in_sink, in_tail & ~in_sink

    def stored(self, start: int, stop: int) -> State:
        """Slots ``start`` to ``stop`` of every row, except those replaced by the tail or the sinks."""
        key = torch.arange(start, stop, device=self.last.device).expand(self.batch, -1)
        in_sink, in_tail = self.source(key)
        seen = self.visible(key) & ~in_sink & ~in_tail
        return self._attend(
            seen,
            [self._load(k.view, start, stop) for k in self.keys],
            self._load(self.value, start, stop, used=seen.any(1)),
        )

    def tail(self) -> State:
        """The newest tokens, which queries read from the ring; position j is in slot ``j % size``."""
        assert self.value.tail is not None
        back = self.residual_len + self.group - 2  # the farthest back that the first query may read
        count = back + self.tokens
        key = self.position[:, :1] - back + torch.arange(count, device=self.last.device)
        seen = self.visible(key) & self.source(key)[1]
        slot = key % self.value.tail.shape[2]

        def read(buffer: Tensor | None) -> Tensor:
            assert buffer is not None
            index = slot[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            return buffer.gather(2, index)

        return self._attend(
            seen,
            [self._side(read(k.view.tail)) for k in self.keys],
            self._side(read(self.value.tail), seen),
        )

    def sinks(self) -> State:
        """The first real tokens of each row."""
        key = self.leftpad[:, None] + torch.arange(self.sink_len, device=self.last.device)
        seen = self.visible(key) & self.source(key)[0]
        return self._attend(
            seen,
            [self._side(k.view.sink) for k in self.keys],
            self._side(self.value.sink, seen),
        )

    def null(self) -> State:
        """The learned key and value that every query sees, in the model's basis."""
        logits = sum(
            torch.matmul(k.q, k.null.float()[:, :, None]) for k in self.keys if k.null is not None
        )
        assert isinstance(logits, Tensor) and self.null_v is not None
        out = self.null_v.float()[:, None].expand(self.batch, -1, logits.shape[2], -1)
        return out, self._capped(logits).squeeze(-1)

    def _attend(self, seen: Tensor, keys: list[Tensor], values: Tensor) -> State:
        """Attention over one group; keys and values in the stored basis, with 0 for values that no query sees."""
        logits = sum(stream.logits(k) for stream, k in zip(self.keys, keys, strict=True))
        assert isinstance(logits, Tensor)
        groups = self.heads // self.n_kv_heads
        mask = seen[:, None, None].expand(-1, 1, groups, -1, -1).flatten(2, 3)
        probability, lse = masked_softmax(self._capped(logits), mask)
        return torch.matmul(probability, values), lse

    def _capped(self, logits: Tensor) -> Tensor:
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap > 0 else logits

    def _side(self, buffer: Tensor | None, seen: Tensor | None = None) -> Tensor:
        assert buffer is not None
        used = None if seen is None else seen.any(1)
        return self.lanes.unpack(_zero_unused(buffer, used).float())

    def _load(self, view: KVView, start: int, stop: int, used: Tensor | None = None) -> Tensor:
        group = view.group
        codes = self._slots(view.codes, start, stop)
        scales = self._slots(view.scales, start // group, stop // group)
        assert codes is not None
        if group > 1:  # scales are shared by visible tokens and others
            return self.lanes.unpack(
                _zero_unused(load(codes, scales, view.kind, torch.float32), used)
            )
        if scales is None:
            codes = _zero_unused(codes, used)
        else:
            scales = _zero_unused(scales, used)
        return self.lanes.unpack(load(codes, scales, view.kind, torch.float32))

    def _slots(self, buffer: Tensor | None, start: int, stop: int) -> Tensor | None:
        """(B, lanes, stop - start, width), through the block table if there is one."""
        if buffer is None or self.block_table is None:
            return None if buffer is None else buffer[:, :, start:stop]
        size = buffer.shape[2]
        first, last = start // size, -(-stop // size)
        page = self.block_table[:, first:last].to(torch.int64).clamp(0, buffer.shape[0] - 1)
        joined = buffer[page].transpose(1, 2).flatten(2, 3)  # (B, lanes, pages * size, width)
        return joined[:, :, start - first * size : stop - first * size]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of slots whose scratch memory is bounded."""
        codes = self.keys[0].view.codes
        slots = (
            codes.shape[2]
            if self.block_table is None
            else self.block_table.shape[1] * codes.shape[2]
        )
        width = max(stream.lane_dim for stream in (*(k.view for k in self.keys), self.value))
        by_scores = SCORES_PER_PIECE // (self.batch * self.heads * self.tokens)
        by_values = VALUES_PER_PIECE // (self.batch * self.lanes.count * width)
        step = max(128, min(by_scores, by_values) // 128 * 128)
        for start in range(0, slots, step):
            yield start, min(start + step, slots)

    def solve(self) -> State:
        """out (B, H_q, T, D_v) in q's dtype and lse (B, H_q, T) float32."""
        state: State | None = None
        for start, stop in self.pieces():
            state = _merged(state, self.stored(start, stop))
        if self.value.tail is not None and (self.residual_len > 0 or self.group > 1):
            state = _merged(state, self.tail())
        if self.sink_len:
            state = _merged(state, self.sinks())
        assert state is not None
        state = rotated(state[0], self.value.rotate), state[1]
        if self.null_v is not None:
            state = merge(*state, *self.null())
        if self.s_aux is not None:
            sink = self._group(
                self.s_aux.float()[None, :, None].expand(self.batch, -1, self.tokens)
            )
            state = merge(*state, torch.zeros_like(state[0]), sink)
        return self._settled(state)

    def _settled(self, state: State) -> State:
        """Regroups by query heads; padding queries get 0 and -inf."""
        out = state[0].unflatten(2, (-1, self.tokens)).flatten(1, 2)
        lse = state[1].unflatten(2, (-1, self.tokens)).flatten(1, 2)
        real = self.real[:, None]
        out = torch.where(real[..., None], out, 0.0)
        return out.to(self.dtype), torch.where(real, lse, torch.full_like(lse, -torch.inf))


def _zero_unused(x: Tensor, used: Tensor | None) -> Tensor:
    """Zeros where ``used`` (B, N) is false: slots that no query sees may hold anything, and 0 * NaN is NaN."""
    return x if used is None else torch.where(used[:, None, :, None], x, 0.0)


def _merged(state: State | None, other: State) -> State:
    return other if state is None else merge(*state, *other)


def masked_softmax(logits: Tensor, allowed: Tensor) -> State:
    """Softmax over the last dimension of the allowed entries, and the natural-log sum of their exponentials.

    Where nothing is allowed they are 0 and -inf.
    """
    logits = logits.masked_fill(~allowed, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = (logits - largest).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (largest + total.log()).squeeze(-1)
    return weights / torch.where(total == 0, 1.0, total), lse


def solve(
    queries: Sequence[Tensor],
    keys: Sequence[KVView],
    value: KVView,
    factors: Sequence[float],
    cache_seqlens: Tensor,
    nulls: Sequence[Tensor | None],
    q_chunk: int = QUERIES_PER_PIECE,
    batch_invariant: bool = True,
    **options: Any,
) -> State:
    """`Problem.solve` on ``q_chunk`` query tokens at a time; always ``batch_invariant``."""
    tokens = queries[0].shape[2]
    if tokens <= q_chunk:
        return Problem(queries, keys, value, factors, nulls, cache_seqlens, **options).solve()
    given = options.pop("query_lens", None)
    count = torch.full_like(cache_seqlens, tokens) if given is None else given
    parts = []
    for start in range(0, tokens, q_chunk):
        chunk = [q[:, :, start : start + q_chunk] for q in queries]
        inside = (count - start).clamp(0, chunk[0].shape[2])
        ends = cache_seqlens - count + (start + inside).clamp(max=count)
        part = Problem(
            chunk,
            keys,
            value,
            factors,
            nulls,
            ends,
            query_lens=inside,
            **options,
        )
        parts.append(part.solve())
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)
