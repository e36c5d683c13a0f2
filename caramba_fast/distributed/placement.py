"""Which rank stores which tokens of a row, and what each rank does for one append or one read.

`PageSpread`: page ``p`` of a row has the tokens from ``p * page_size`` on. Pages are assigned round-robin; a rank
without room is skipped. The rank of a page depends only on ``p``, so that every rank computes the same answer without
communication.

`Placement`: a rank stores its tokens of a row contiguously, so a local slot is not a position. The causal mask is
therefore a count: a query sees the first ``c`` of the rank's tokens of its row, those at or before its own position.
From one query of a row to the next, ``c`` grows by one if the rank stores the query's own token, else it stays. Both
cases are calls of the ordinary ops:

    growing   causal decode or extend attention, over the ``c`` of the last query
    level     all queries see the same keys: they are passed as additional query heads of one query token

All runs of one kind, of all rows, are one call; each run is a row of the call and uses the pages of its cache row. With
a sliding window, queries are grouped by how many of the rank's tokens are in their window, one call per number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
#: Pages are made of whole tiles of 32 tokens.
PAGE_MULTIPLE = 32
PAGE_SIZE = 128


class PageSpread:
    """Pages of rows of up to ``max_seq_len`` tokens over ``world_size`` ranks.

    Args:
        max_seq_len: tokens a row can hold over all ranks.
        world_size: ranks.
        page_size: tokens of a page, a multiple of 32.
        rank_tokens: for each rank, the most tokens of a row it holds, rounded down to whole pages; by default the ranks
            share ``max_seq_len`` evenly.

    Attributes:
        owners: (pages,) int64, the rank of each page of a row.

    Raises:
        ValueError: a size that is not positive or does not fit, or room for less than ``max_seq_len``.
    """

    def __init__(
        self,
        max_seq_len: int,
        world_size: int,
        page_size: int = PAGE_SIZE,
        rank_tokens: Sequence[int] | None = None,
    ) -> None:
        check_page_size(page_size)
        if max_seq_len < 1 or world_size < 1:
            raise ValueError(
                f"max_seq_len is {max_seq_len} and world_size is {world_size}; 1 or more is needed"
            )
        self.max_seq_len, self.world_size, self.page_size = max_seq_len, world_size, page_size
        pages = -(-max_seq_len // page_size)
        self.owners = _in_turn(pages, self._room(pages, rank_tokens))
        held = self.owners[:, None] == np.arange(world_size)
        self._before = np.vstack((np.zeros((1, world_size), np.int64), held.cumsum(0)))
        self._held = np.vstack((held, np.zeros((1, world_size), bool)))  # no page after the last

    def _room(self, pages: int, rank_tokens: Sequence[int] | None) -> list[int]:
        if rank_tokens is None:
            return [pages] * self.world_size
        check_rank_tokens(rank_tokens, self.world_size)
        room = [tokens // self.page_size for tokens in rank_tokens]
        if sum(room) < pages:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}, {pages} pages of {self.page_size} tokens; the ranks have "
                f"room for {sum(room)} ({list(rank_tokens)} tokens)"
            )
        return room

    @property
    def first_rank(self) -> int:
        """The rank that holds the first page of every row."""
        return int(self.owners[0])

    def pages_of(self, rank: int) -> Counts:
        """Pages of a row that ``rank`` holds, in order."""
        return np.flatnonzero(self.owners == rank)

    def tokens_of(self, rank: int) -> int:
        """The most tokens of a row that ``rank`` holds."""
        return len(self.pages_of(rank)) * self.page_size

    def held(self, rank: int, position: Counts) -> Flags:
        """Whether ``rank`` holds the tokens at ``position`` (any shape), from 0 to the end of the last page."""
        return self._held[position // self.page_size, rank]

    def count(self, rank: int, tokens: Counts) -> Counts:
        """How many of the first ``tokens`` (any shape) of a row ``rank`` holds; 0 for negative ``tokens``."""
        tokens = np.clip(tokens, 0, self.max_seq_len)
        page, rest = np.divmod(tokens, self.page_size)
        whole = self._before[page, rank] * self.page_size
        return whole + np.where(self._held[page, rank], rest, 0)

    def positions_of(self, rank: int, start: int, stop: int) -> Counts:
        """The positions from ``start`` up to ``stop`` of a row that ``rank`` holds."""
        position = np.arange(start, stop)
        return position[self.held(rank, position)]


def check_page_size(page_size: int) -> None:
    """Raises ValueError for a page size that the ops do not support."""
    if type(page_size) is not int or page_size < 1 or page_size % PAGE_MULTIPLE:
        raise ValueError(f"page_size is {page_size!r}; a multiple of {PAGE_MULTIPLE} is needed")


def check_rank_tokens(rank_tokens: Sequence[int], world_size: int) -> None:
    """Raises ValueError unless there is a valid count for each rank."""
    if len(rank_tokens) != world_size or min(rank_tokens) < 0:
        raise ValueError(
            f"rank_tokens is {list(rank_tokens)}; one count of 0 or more for each of {world_size} ranks is needed"
        )


def _in_turn(pages: int, room: list[int]) -> Counts:
    """The owner of each page: round-robin over the ranks, skipping full ones."""
    left, owners = list(room), np.empty(pages, np.int64)
    rank = 0
    for page in range(pages):
        while not left[rank % len(left)]:
            rank += 1
        owners[page] = rank % len(left)
        left[owners[page]] -= 1
        rank = int(owners[page]) + 1
    return owners


#: Most queries of one level run; bounds the output size of a call.
LEVEL_QUERIES = 512


@dataclass(frozen=True)
class Append:
    """Which of T new tokens a rank stores.

    Attributes:
        counts, most: number of tokens of each row, and the largest.
        index: (B, most) int64 on the device, their indices among the T tokens; None for the first ones of each row.
    """

    counts: list[int]
    index: Tensor | None
    most: int


@dataclass(frozen=True)
class Call:
    """One call of an attention op: J rows of N queries.

    Attributes:
        rows: (J,) int64, cache row of each row of the call.
        tokens: (J, N) int64, indices of the query tokens.
        kept: (K,) int64, which of the J * N are real, not padding; None for all.
        seqlens: (J,) int32, local tokens that the last real query sees.
        query_lens: (J,) int32, real queries of each row; None for all.
        grows: whether each query sees one more token than the one before.
        left: local tokens before the newest that a query sees; -1 for all.
        longest: the largest of ``seqlens``.
        whole: whether these are all queries, in order.
    """

    rows: Tensor
    tokens: Tensor
    kept: Tensor | None
    seqlens: Tensor
    query_lens: Tensor | None
    grows: bool
    left: int
    longest: int
    whole: bool


@dataclass(frozen=True)
class Queries:
    """The queries of one read.

    Attributes:
        start: position of the first query of each row.
        count: real queries of each row.
        tokens: T, padding included.
        behind: keys less than this many tokens behind a query are read from the fp16 tail, not from codes.
        left: tokens before its own that a query sees; -1 for all.
        group: tokens encoded together; a group is read from the tail until its last token is ``behind`` or more behind.
    """

    start: tuple[int, ...]
    count: tuple[int, ...]
    tokens: int
    behind: int = 0
    left: int = -1
    group: int = 1

    def encoded(self, position: Counts) -> Counts:
        """How many of the first tokens queries at ``position`` read from codes; negative for none."""
        return (position - self.behind + 1) // self.group * self.group


class Placement:
    """Placement of one rank. Caches the latest append and read, since every layer asks for the same."""

    def __init__(self, spread: PageSpread, rank: int, device: torch.device) -> None:
        self.spread, self.rank, self.device = spread, rank, device
        self._append: tuple[object, Append] | None = None
        self._read: tuple[object, list[Call]] | None = None

    def append(self, held: Sequence[int], added: Sequence[int], tokens: int) -> Append:
        """Which of ``tokens`` new tokens this rank stores; row b holds ``held[b]`` tokens and gets ``added[b]``."""
        key = (tuple(held), tuple(added), tokens)
        if self._append is None or self._append[0] != key:
            self._append = key, self._find_append(np.array(held), np.array(added), tokens)
        return self._append[1]

    def _find_append(self, held: Counts, added: Counts, tokens: int) -> Append:
        step = np.arange(tokens)
        real = step < added[:, None]
        mine = self._held(np.where(real, held[:, None] + step, 0)) & real
        counts = mine.sum(1)
        most = int(counts.max())
        index = np.argsort(~mine, axis=1, kind="stable")[:, :most]
        in_front = bool((mine == (step < counts[:, None])).all())
        return Append(counts.tolist(), None if in_front else self._on_device(index), most)

    def read(self, queries: Queries) -> list[Call]:
        """The calls that compute this rank's part of the attention; empty if no query sees a token here."""
        if self._read is None or self._read[0] != queries:
            self._read = queries, self._find_read(queries)
        return self._read[1]

    def _find_read(self, queries: Queries) -> list[Call]:
        step = np.arange(queries.tokens)
        real = step < np.array(queries.count)[:, None]
        position = np.array(queries.start)[:, None] + step
        end = np.where(real, queries.encoded(position), 0)
        seen = self.spread.count(self.rank, end)
        if queries.left >= 0:
            hidden = self.spread.count(self.rank, np.where(real, position - queries.left, 0))
            if (np.minimum(hidden, seen) > 0).any():
                return self._windowed(seen, seen - np.minimum(hidden, seen))
        return self._level(seen, real) if queries.group > 1 else self._whole(seen, end, real)

    def _level(self, seen: Counts, real: Flags) -> list[Call]:
        """Calls for grouped codes: consecutive queries see the same whole groups."""
        runs = []
        for row, count in enumerate(real.sum(1).tolist()):
            edges = [0, *(np.flatnonzero(np.diff(seen[row, :count])) + 1).tolist(), count]
            for start, stop in pairwise(edges):
                if stop > start and seen[row, start] > 0:
                    runs += _cut(row, start, stop, LEVEL_QUERIES)
        return [self._call(np.array(runs), seen, False)] if runs else []

    def _whole(self, seen: Counts, end: Counts, real: Flags) -> list[Call]:
        """Calls of queries that see all earlier tokens; ``end`` is the number they see over all ranks."""
        if not seen.any():
            return []
        own = np.clip(end - 1, 0, None)
        grows = self._held(own) & (end > 0) & real
        found: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        for row in range(len(seen)):
            for start, stop in _stretches(grows[row][: real[row].sum()]):
                growing = bool(grows[row, start])
                if growing or seen[row, start] > 0:
                    found[growing] += _cut(row, start, stop, 0 if growing else LEVEL_QUERIES)
        if seen.shape[1] == 1:  # one query per row: both kinds are the same
            found = {True: [(row, 0, 1) for row in range(len(seen))], False: []}
        return [
            self._call(np.array(runs), seen, growing) for growing, runs in found.items() if runs
        ]

    def _call(self, runs: Counts, seen: Counts, grows: bool) -> Call:
        """One call for runs (row, start, stop) of queries."""
        rows, start, stop = runs.T
        lens = stop - start
        most, tokens = int(lens.max()), seen.shape[1]
        index = np.minimum(start[:, None] + np.arange(most), tokens - 1)
        ragged = bool((lens < most).any())
        seqlens = seen[rows, stop - 1]
        return Call(
            rows=self._on_device(rows),
            tokens=self._on_device(index),
            kept=self._on_device(np.flatnonzero(np.arange(most) < lens[:, None]))
            if ragged
            else None,
            seqlens=self._on_device(seqlens.astype(np.int32)),
            query_lens=self._on_device(lens.astype(np.int32)) if ragged and grows else None,
            grows=grows,
            left=-1,
            longest=int(seqlens.max()),
            whole=not ragged and most == tokens and rows.tolist() == list(range(len(seen))),
        )

    def _windowed(self, seen: Counts, inside: Counts) -> list[Call]:
        """Calls of queries that see the newest ``inside`` of ``seen`` tokens; queries that see none are left out."""
        calls = []
        for width in np.unique(inside[inside > 0]).tolist():
            rows, token = np.nonzero(inside == width)
            seqlens = seen[rows, token]
            calls.append(
                Call(
                    rows=self._on_device(rows),
                    tokens=self._on_device(token[:, None]),
                    kept=None,
                    seqlens=self._on_device(seqlens.astype(np.int32)),
                    query_lens=None,
                    grows=True,
                    left=width - 1,
                    longest=int(seqlens.max()),
                    whole=inside.shape[1] == 1 and len(rows) == len(inside),
                )
            )
        return calls

    def _held(self, position: Counts) -> Flags:
        return self.spread.held(self.rank, position)

    def _on_device(self, x: Counts) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device, non_blocking=True)


def _stretches(flags: Flags) -> list[tuple[int, int]]:
    """Runs of equal flags, (start, stop) each."""
    if not len(flags):
        return []
    edges = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    return list(pairwise(edges))


def _cut(row: int, start: int, stop: int, most: int) -> list[tuple[int, int, int]]:
    """Splits a run of a row into pieces of at most ``most`` queries; 0 for one piece."""
    step = most or stop - start
    return [(row, first, min(first + step, stop)) for first in range(start, stop, step)]
