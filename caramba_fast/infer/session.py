"""Session: a model, its cache, and the tokens of each row.

The newest tokens of a row may be pending: the token sampled last enters the cache with the next input. A failed call
leaves the session as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.cache.kept_rings import KeptRings
from caramba_fast.cache.lengths import Counts
from caramba_fast.infer.cuda_graph import DecodeGraphs, RecordingError
from caramba_fast.infer.decode_plan import DecodePlan
from caramba_fast.infer.sequence import Mark, TokenSequence
from caramba_fast.models import LanguageModel


class Snapshot(NamedTuple):
    """State of a session, for `Session.restore`."""

    cache: ModelKVCache | None
    lengths: list[int]
    rows: list[TokenSequence]
    marks: list[Mark]
    tails: list[tuple[list[Tensor], list[int]]]


class _Padded(NamedTuple):
    """The tokens that are not padding, after decode steps that fed padding to rows that had ended.

    Attributes:
        lengths: cached tokens of each row, without padding; absolute, so that an interrupted removal can be repeated.
        kept: fp16 rings of rows with more than one padding token, as they were before.
    """

    lengths: list[int]
    kept: tuple[KeptRings, ...]


class _Planned(NamedTuple):
    """The cache whose attention limits were set, and the lengths they hold for."""

    cache: ModelKVCache | None
    lengths: range


class Session:
    """Feeds tokens to a model and keeps its cache.

    Args:
        new_cache: makes a cache of a given number of rows.
        graphs: replays decode steps where it can.
        fill: padding id.
        max_seq_len: tokens a row of the cache can hold.
        prefill_chunk: most tokens of a row in one forward pass.
        plan: attention limits by cache length; None for no limits.
    """

    def __init__(
        self,
        model: LanguageModel,
        new_cache: Callable[[int], ModelKVCache],
        graphs: DecodeGraphs,
        fill: int,
        max_seq_len: int,
        prefill_chunk: int | None,
        plan: DecodePlan | None = None,
    ) -> None:
        self.model, self._new_cache, self._graphs = model, new_cache, graphs
        self.fill, self._max_seq_len, self._prefill_chunk = fill, max_seq_len, prefill_chunk
        self._plan, self._planned = plan, _Planned(None, range(0))
        self._begun: Callable[..., Tensor] | None = getattr(model, "forward_begun", None)
        self.cache: ModelKVCache | None = None
        self.rows: list[TokenSequence] = []
        self._padded: _Padded | None = None  # None if no row holds padding

    @property
    def cached(self) -> list[int]:
        """Cached tokens of each row, without padding."""
        if self.cache is None:
            return [0] * len(self.rows)
        return self.cache.row_lengths if self._padded is None else list(self._padded.lengths)

    @property
    def pending(self) -> list[list[int]]:
        """The newest tokens of each row, not in the cache yet."""
        return [list(row.tokens[n:]) for row, n in zip(self.rows, self.cached, strict=True)]

    def check_rows(self, count: int) -> None:
        """Raises ValueError if the conversation has another number of rows."""
        if self.cache is not None and len(self.rows) != count:
            raise ValueError(
                f"the conversation has {len(self.rows)} rows and this input "
                f"{count}; call reset() to start another"
            )

    def check_room(self, new: Sequence[int], room: Sequence[int]) -> None:
        """Raises ValueError if ``new[b]`` input tokens and ``room[b]`` more exceed max_seq_len."""
        held = [len(row) for row in self.rows] or [0] * len(new)
        for row, (length, count, more) in enumerate(zip(held, new, room, strict=True)):
            if length + count + more > self._max_seq_len:
                raise ValueError(
                    f"row {row} needs {length + count + more} cached tokens ({length} held, {count} of "
                    f"input, {more} generated), more than max_seq_len={self._max_seq_len}"
                )

    def feed(
        self, rows: Sequence[Sequence[int]], ready: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Feeds pending tokens and ``rows``; returns logits (B, V) after each row's last token.

        ``ready`` is called once there is a cache.
        """
        self.check_room([len(row) for row in rows], [0] * len(rows))
        before = self.snapshot(tails=True)
        try:
            if self.cache is None:
                self.rows, self._padded = [TokenSequence() for _ in rows], None
                self.cache = self._new_cache(len(rows))
            ready()
            for row, tokens in zip(self.rows, rows, strict=True):
                row.extend(tokens)
            return self._in_pieces(self.pending)
        except BaseException:
            self.restore(before)
            raise

    def _in_pieces(self, rows: Sequence[list[int]]) -> Tensor:
        """Feeds the rows in chunks of at most ``prefill_chunk`` tokens."""
        device = self.model.device
        longest = max(map(len, rows))
        step = min(longest, self._prefill_chunk or longest)
        logits: Tensor | None = None
        for start in range(0, longest, step):
            pieces = [row[start : start + step] for row in rows]
            lens = [len(piece) for piece in pieces]
            index = torch.tensor([max(length - 1, 0) for length in lens], device=device)
            latest = self._forward(*self._batch(pieces), logits_index=index)[:, -1]
            fresh = torch.tensor([length > 0 for length in lens], device=device)[:, None]
            logits = latest if logits is None else torch.where(fresh, latest, logits)
        assert logits is not None
        return logits

    def _batch(self, rows: Sequence[list[int]]) -> tuple[Tensor, list[int] | None]:
        """(B, longest) right-padded ids, and the row lengths if they differ."""
        lens = [len(row) for row in rows]
        width = max(lens)
        ids = [row + [self.fill] * (width - len(row)) for row in rows]
        return torch.tensor(ids, device=self.model.device), None if min(lens) == width else lens

    def note(self, tokens: Sequence[int], alive: Sequence[bool]) -> None:
        """Adds a sampled token to every ``alive`` row; it is fed with the next step."""
        for row, token, goes_on in zip(self.rows, tokens, alive, strict=True):
            if goes_on:
                row.push(token)

    def step(self, tokens: Sequence[int], alive: Sequence[bool]) -> Tensor:
        """Feeds the one pending token of each row; returns logits (B, V), meaningless for rows that are not alive.

        Rows that are not ``alive`` are fed nothing. A replayed graph cannot leave them out: it feeds them padding,
        which `drop_padding` removes.
        """
        assert self.cache is not None
        fed = torch.tensor(tokens, device=self.model.device)[:, None]
        lens, pads, padded = None, not all(alive), None
        if pads:
            full = max(n for n, a in zip(self.cache.row_lengths, alive, strict=True) if not a)
            if self._graphs.reason is not None or full == self._max_seq_len:
                lens, pads = [int(goes_on) for goes_on in alive], False
        if pads or self._padded is not None:  # rows keep the padding of earlier steps
            own = [n + goes_on for n, goes_on in zip(self.cached, alive, strict=True)]
            padded = _Padded(own, self._kept(alive, more=pads))
        logits = self._forward(fed, lens)[:, -1]
        self._padded = padded
        return logits

    def _kept(self, alive: Sequence[bool], *, more: bool) -> tuple[KeptRings, ...]:
        """Copies of fp16 rings, which have room for one padding token, of rows about to get ``more`` than that."""
        assert self.cache is not None
        known = () if self._padded is None else self._padded.kept
        if not more:
            return known
        pairs = enumerate(zip(alive, self.cache.row_lengths, self.cached, strict=True))
        new = {row: own for row, (goes_on, held, own) in pairs if not goes_on and held > own}
        new = {row: n for row, n in new.items() if not any(row in kept.lengths for kept in known)}
        return (*known, KeptRings(self.cache, new)) if new else known

    def verify(self, drafts: Sequence[Sequence[int]], alive: Sequence[bool]) -> Tensor:
        """Feeds the pending tokens and a draft of each row in one pass; logits (B, T, V), one after each token fed.

        The draft is cached but does not belong to the rows: `keep_cached` says how much stays. Rows that are not alive
        are fed nothing.
        """
        rows = [
            [*waiting, *draft] if goes_on else []
            for waiting, draft, goes_on in zip(self.pending, drafts, alive, strict=True)
        ]
        return self._forward(*self._batch(rows))

    def next_logits(self, alive: Sequence[bool]) -> Tensor:
        """Feeds the pending tokens of live rows; returns logits (B, V)."""
        rows = [
            waiting if goes_on else [] for waiting, goes_on in zip(self.pending, alive, strict=True)
        ]
        return self._in_pieces(rows)

    def keep_cached(self, lengths: Sequence[int]) -> None:
        """Keeps the first ``lengths[b]`` tokens of row b in the cache, after `verify`."""
        assert self.cache is not None
        self._padded = None
        self.cache.restore(list(lengths))

    def _forward(self, tokens: Tensor, query_lens: list[int] | None, **options: Any) -> Tensor:
        """One forward pass; logits (B, T, V) or (B, 1, V). If it fails, the cache is as it was."""
        cache = self.cache
        assert cache is not None
        before, count = list(cache.layers[0].lengths.host), tokens.shape[1]
        longest = max(before if self._padded is None else self._padded.lengths)
        if self._planned.cache is not cache or longest + count not in self._planned.lengths:
            self._limit(cache, longest + count)
        step = count == 1 and query_lens is None and not options and longest > 0
        try:
            if step and self._graphs.reason is None:
                return self._graphs.step(cache, tokens)[:, None]
            run = self.model.forward if self._begun is None else self._begun
            return run(tokens, cache, query_lens=query_lens, **options)
        except RecordingError as error:
            cache.restore(before)
            self._graphs.give_up(str(error))
            return self._forward(tokens, query_lens, **options)
        except BaseException:
            cache.restore(before)
            raise

    def _limit(self, cache: ModelKVCache, length: int) -> None:
        """Sets the attention limits for ``length`` tokens, and notes for which lengths they hold."""
        if self._plan is None:
            self._planned = _Planned(cache, range(sys.maxsize))
            return
        cache.reach = self._plan.plan_for(length)
        self._planned = _Planned(cache, self._plan.lengths_like(length))

    def lengths_without(self, n: Counts) -> list[int]:
        """Tokens of each row without its newest ``n`` (or ``n[b]`` of row b), cached or not.

        Raises ValueError if there are fewer, or the model cannot go on from there.
        """
        assert self.cache is not None
        counts = self.cache[0].lengths.per_row("n", n)
        for index, (count, row) in enumerate(zip(counts, self.rows, strict=True)):
            if not 0 <= count <= len(row):
                raise ValueError(
                    f"cannot roll back {count} tokens of row {index}, which holds {len(row)}"
                )
        left = [len(row) - count for row, count in zip(self.rows, counts, strict=True)]
        check = getattr(self.model, "check_shortened", None)
        if check is not None:
            self.drop_padding()
            check(self.cache, left)
        return left

    def shorten(self, lengths: Sequence[int]) -> None:
        """`keep` between runs. If it is interrupted, the rows are as before; uncached tokens are fed again."""
        rows = [row.first(length) for row, length in zip(self.rows, lengths, strict=True)]
        self._keep_in_cache(lengths)
        self.drop_padding()
        self.rows = rows

    def keep(self, lengths: Sequence[int]) -> None:
        """Row b keeps its first ``lengths[b]`` tokens, cached or not, even in the middle of a run."""
        self._keep_in_cache(lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            row.cut(length)
        self.drop_padding()

    def _keep_in_cache(self, lengths: Sequence[int]) -> None:
        """Notes what `drop_padding` leaves in the cache."""
        if self.cache is not None:
            own = [min(n, length) for n, length in zip(self.cached, lengths, strict=True)]
            self._padded = _Padded(own, () if self._padded is None else self._padded.kept)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row b becomes a copy of row ``rows[b]``; the number of rows may change."""
        assert self.cache is not None
        self.drop_padding()
        self.cache = self.cache.select_rows(rows)
        self._graphs.forget()
        self.rows = [self.rows[row].copy() for row in rows]

    def reorder(self, order: Sequence[int]) -> None:
        """Row b becomes a copy of row ``order[b]``, in the same cache."""
        if list(order) == list(range(len(self.rows))):
            return
        assert self.cache is not None
        self.drop_padding()
        self.cache.reorder(torch.tensor(order, device="cpu"))
        self.rows = [self.rows[row].copy() for row in order]

    def go_back(self, cache: ModelKVCache | None, rows: list[TokenSequence]) -> None:
        """Takes over a cache and rows: those before `select_rows`, or loaded ones."""
        self._graphs.forget()
        self.cache, self.rows, self._padded = cache, rows, None

    def drop_padding(self) -> None:
        """Removes the padding fed to rows that had ended."""
        if self.cache is not None and self._padded is not None:
            for kept in self._padded.kept:
                kept.put_back(self.cache)
            try:
                self.cache.restore(self._padded.lengths)
            except (RuntimeError, MemoryError):
                self._padded = None  # the cache is empty
                raise
        self._padded = None

    def snapshot(self, *, tails: bool = False) -> Snapshot:
        """State for `restore`.

        ``tails``: also copy the cache's fp16 rings, for when more tokens may follow than they can drop.
        """
        self.drop_padding()
        cache = self.cache
        return Snapshot(
            cache,
            [] if cache is None else cache.row_lengths,
            self.rows,
            [row.mark() for row in self.rows],
            [layer.tail_state() for layer in cache or ()] if tails else [],
        )

    def restore(self, before: Snapshot) -> None:
        """Restores a snapshot, even after an error or an interrupt."""
        self._graphs.forget()
        self.cache, self.rows, self._padded = before.cache, before.rows, None
        for row, mark in zip(self.rows, before.marks, strict=True):
            row.restore(mark)
        if self.cache is not None:
            self.cache.restore(before.lengths)
            kept = self.cache.row_lengths == before.lengths  # else it was emptied
            for layer, tail in zip(self.cache, before.tails if kept else (), strict=False):
                layer.restore_tail(tail)

    def reset(self) -> None:
        """Drops the cache and all rows."""
        self._graphs.forget()
        self.cache, self.rows, self._padded = None, [], None
