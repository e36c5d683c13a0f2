"""RaggedBatch: new tokens of many sequences, concatenated without padding (varlen batch), over pages of a pool.

A model's linear layers see N tokens and no rows. Attention handles single decode tokens in one call with T = 1, and the
stretches of prompts and drafts in another, cut into pieces of at most 32 queries. Both are the ordinary ops with a
block table. Calls with several rows use a balanced schedule (``num_splits`` of `ops.decode_attention`) unless the pool
says otherwise, so that the longest sequence does not delay the step.

With per-channel kinds, the tokens of an incomplete group are in the fp16 ring of their sequence. Decode tokens of
sequences whose rings are neighbours use these as they are, and their sinks. Other stretches are cut at group
boundaries, so that each piece touches one group. For the duration of a layer, a piece gets a ring of its own, filled
with its sequence's tokens of that group; new tokens are then written back to the sequence's ring. Sinks are lent to
pieces in the same way.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache.interface import Rope
from caramba_fast.cache.layer import LayerCache
from caramba_fast.cache.plans import Rows
from caramba_fast.cache.pool import PagePool
from caramba_fast.cache.stream import CacheTensor
from caramba_fast.ops.attention_call import BALANCED, MAX_QUERY_TOKENS
from caramba_fast.sharing import shared


class Stretch(NamedTuple):
    """New tokens of one sequence.

    Attributes:
        start: tokens of the sequence already in the pool.
        tokens: number of new tokens, 1 or more.
        pages: the sequence's pages, in order, with room for the new tokens.
        ring: the sequence's ring in the pool; ignored if the storage has no rings.
    """

    start: int
    tokens: int
    pages: Sequence[int]
    ring: int = 0


class Piece(NamedTuple):
    """A part of a stretch that is one row of an op call.

    Attributes:
        first: index of its first token among the N.
        start: tokens before it in its sequence.
        length: number of tokens.
        pages: pages of the sequence.
        row: its ring among the rings lent in this pass; meaningless if it uses that of its sequence.
        ring: the ring of its sequence in the pool.
    """

    first: int
    start: int
    length: int
    pages: Sequence[int]
    row: int
    ring: int


class _Group:
    """The pieces of one op call: R rows of at most W tokens.

    ``at_home``: whether they use the rings and sinks of their sequences, not lent ones; to store, these must be
    neighbours.
    """

    def __init__(self, pieces: Sequence[Piece], pool: PagePool, at_home: bool = False) -> None:
        page_size, device, sink_len = pool.page_size, pool.device, pool.sink_len
        counts = [piece.length for piece in pieces]
        self.rows, self.width, self.first = len(pieces), max(counts), pieces[0].first
        width = max(-(-(piece.start + piece.length) // page_size) for piece in pieces)
        tables = [[*p.pages[:width], *[-1] * (width - len(p.pages))] for p in pieces]

        def integers(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)

        self.table = integers(tables)
        self.starts = integers([piece.start for piece in pieces])
        self.ends = integers([piece.start + piece.length for piece in pieces])
        self.at_home = at_home

        def places(values: Sequence[int]) -> slice | Tensor:
            rows = _neighbours(values)
            return integers(values, torch.int64) if rows is None else slice(*rows)

        #: The lent rings, and the sequences' own, that the rows use; slices if possible, which need no copy.
        self.rings = places([piece.row for piece in pieces])
        self.owners = places([piece.ring for piece in pieces])
        #: Rows of the sequences' rings and sinks that are used as they are; None if others are lent.
        self.home = _neighbours([piece.ring for piece in pieces]) if at_home else None
        self.shared: dict[Any, Any] = {}  # what layers derive from these lengths (`sharing`)
        #: Row, ring and position of each new token that is also written to a sink (first tokens of sequences).
        early = [
            (row, p.ring, place)
            for row, p in enumerate(pieces)
            for place in range(p.start, min(p.start + p.length, sink_len))
        ]
        self.early = integers(early, torch.int64).T if early else None
        self.index: Tensor | None = None
        self.query_lens: Tensor | None = None
        self.kept: Tensor | None = None
        if self.width > 1:
            steps = range(self.width)
            index = [[p.first + min(step, p.length - 1) for step in steps] for p in pieces]
            self.index = integers(index, torch.int64)
            if min(counts) < self.width:
                self.query_lens = integers(counts)
                kept = [r * self.width + i for r, n in enumerate(counts) for i in range(n)]
                self.kept = integers(kept, torch.int64)

    def rows_of(self, x: Tensor) -> Tensor:
        """(N, H, D) -> (R, H, W, D); padding repeats a row's last token."""
        if self.index is None:
            return x[self.first : self.first + self.rows].unsqueeze(2)
        return x[self.index].transpose(1, 2)

    def tokens_of(self, out: Tensor) -> Tensor:
        """(R, H, W, D) -> (tokens, H, D), without padding."""
        flat = out.transpose(1, 2).flatten(0, 1)
        return flat if self.kept is None else flat[self.kept]


def _neighbours(values: Sequence[int]) -> Rows | None:
    """Start and stop of ``values``, if they ascend by one."""
    if not values or values[0] < 0:
        return None
    rows = values[0], values[0] + len(values)
    return rows if list(values) == list(range(*rows)) else None


class _Rings:
    """The rings lent in one pass: one per piece, filled from the sequences' rings and written back.

    A sequence's ring holds one group. A piece's ring has twice as many slots, because the ops require room for queries
    in two groups, although those of a piece are in one.

    Args:
        pieces: pieces of all stretches, each within one group.
        ends: per piece, where its stretch ends in its sequence.
        size: tokens per group.
    """

    def __init__(
        self, pieces: Sequence[Piece], ends: Sequence[int], size: int, device: torch.device
    ) -> None:
        owners = [piece.ring for piece in pieces]
        self.of_rows = torch.tensor(owners, dtype=torch.int64, device="cpu").to(device)
        kept = [
            (piece.row, piece.ring, place % (2 * size))
            for piece, end in zip(pieces, ends, strict=True)
            for place in range(max(piece.start, end - size), piece.start + piece.length)
        ]
        places = torch.tensor(kept, dtype=torch.int64, device="cpu").T.to(device)
        self.row, self.ring, self.slot, self.size = *places, size

    def taken(self, tail: Tensor) -> Tensor:
        """(pieces, lanes, 2 * size, lane_dim): the contents of each piece's sequence ring in ``tail`` (rings, …)."""
        return tail.index_select(0, self.of_rows).repeat(1, 1, 2, 1)

    def give_back(self, pieces: Tensor, tail: Tensor) -> None:
        tail[self.ring, :, self.slot % self.size] = pieces[self.row, :, self.slot]


class RaggedBatch:
    """The new tokens of one forward pass, and the pages they are stored in and attend to.

    Args:
        stretches: stretches of a single token must come before all others.
        pool: the pool that holds their pages.

    Attributes:
        tokens: N.
        longest: tokens of the longest sequence, new ones included.
        positions: (N,) int64 on the pool's device, the position of each token in its sequence.
        layers: a `RaggedLayer` for each of the model's layers.

    Raises:
        ValueError: no stretches, an empty one, one without room, or a single token behind a longer stretch.
    """

    prefill = "stored"

    def __init__(self, stretches: Sequence[Stretch], pool: PagePool) -> None:
        _check(stretches, pool.page_size)
        group = pool.group
        appended = list[Piece]()
        first = 0
        for stretch in stretches:
            for at, count in _cut(stretch.start, stretch.tokens, group):
                row = len(appended)
                begin = stretch.start + at
                appended.append(Piece(first + at, begin, count, stretch.pages, row, stretch.ring))
            first += stretch.tokens
        self.tokens, self.longest = first, max(s.start + s.tokens for s in stretches)
        singles = sum(stretch.tokens == 1 for stretch in stretches)
        #: How many of the pieces, the first ones, use the rings and sinks of their sequences.
        self._home = home = singles if _neighbours([p.ring for p in appended[:singles]]) else 0
        appended[home:] = [piece._replace(row=piece.row - home) for piece in appended[home:]]

        def made(longer: Sequence[Piece]) -> list[_Group]:
            first = [_Group(appended[:singles], pool, home > 0)] if singles else []
            return [*first, _Group(longer, pool)] if longer else first

        self.groups = made(appended[singles:])
        self.rings, self.queries = None, self.groups
        if group > 1 and appended[home:]:
            ends = [s.start + s.tokens for s in stretches for _ in _cut(s.start, s.tokens, group)]
            self.rings = _Rings(appended[home:], ends[home:], group, pool.device)
        if group > MAX_QUERY_TOKENS:
            self.queries = made([part for piece in appended[singles:] for part in _halved(piece)])
        self._pieces = appended
        positions = [s.start + i for s in stretches for i in range(s.tokens)]
        self.positions = torch.tensor(positions, dtype=torch.int64, device="cpu").to(pool.device)
        self._pool = pool
        self.layers = [
            RaggedLayer(layer, pool.num_splits, self.groups, self.queries, self.rings)
            for layer in pool.layers
        ]

    def __getitem__(self, index: int) -> RaggedLayer:
        return self.layers[index]

    def narrowed(self, rows: Tensor) -> RaggedLayer:
        """The last layer, which stores all N tokens but attends only from those with indices ``rows`` (M,)."""
        single = list[tuple[bool, Piece]]()
        firsts = [piece.first for piece in self._pieces]
        for place, token in enumerate(rows.tolist()):
            index = bisect_right(firsts, token) - 1
            piece = self._pieces[index]
            begin = piece.start + token - piece.first
            single.append((index < self._home, piece._replace(first=place, start=begin, length=1)))
        pool = self._pool
        queries = [
            _Group([piece for _, piece in part], pool, at_home)
            for at_home, part in itertools.groupby(single, operator.itemgetter(0))
        ]
        return RaggedLayer(pool.layers[-1], pool.num_splits, self.groups, queries, self.rings)


def _cut(start: int, tokens: int, group: int) -> list[tuple[int, int]]:
    """Cuts a stretch into pieces (first, count): within one group for per-channel kinds, else of at most 32 tokens."""
    found, at = list[tuple[int, int]](), 0
    while at < tokens:
        most = group - (start + at) % group if group > 1 else MAX_QUERY_TOKENS
        found.append((at, min(most, tokens - at)))
        at += found[-1][1]
    return found


def _halved(piece: Piece) -> list[Piece]:
    """Cuts a piece in a large group into pieces of at most 32 queries."""
    most = MAX_QUERY_TOKENS
    return [
        piece._replace(first=piece.first + at, start=piece.start + at, length=min(most, piece.length - at))
        for at in range(0, piece.length, most)
    ]  # fmt: skip


class RaggedLayer:
    """One layer of a batch: the part of the `LayerKVCache` interface that a model's attention uses, for N tokens."""

    is_empty = False

    def __init__(
        self,
        stored: LayerCache,
        num_splits: int,
        groups: Sequence[_Group],
        queries: Sequence[_Group],
        rings: Any,
    ) -> None:
        self.stored, self.groups, self.queries, self.rings = stored, groups, queries, rings
        self.num_splits = num_splits
        self._tails: dict[str, Tensor] = {}
        self._lent: dict[Any, dict[str, dict[str, Tensor]]] = {}  # by group

    @torch.no_grad()
    def append_tokens(self, *new: Tensor, rope: Rope | None = None) -> None:
        """Stores N tokens: (N, H_kv, D) of each stream; ``rope`` as in `append`."""
        streams, rings = self.stored.streams, self.rings
        turning: dict[str, Tensor] = {}
        if rope is not None and len(self.groups) == 1 and self.groups[0].index is None:
            turning = rope.options()
        elif rope is not None:  # rows of several tokens repeat some of them
            single = {name: x.unsqueeze(2) for name, x in zip(streams, new, strict=True)}
            new = tuple(x[:, :, 0] for x in rope.turn(single).values())
        if rings is not None:
            self._tails = {name: rings.taken(tail_of(stream)) for name, stream in streams.items()}
        for group in self.groups:
            rows = [group.rows_of(x) for x in new]
            options = {"block_table": group.table, **turning}
            if group.query_lens is not None:
                options["query_lens"] = group.query_lens
            if group.home is not None:
                self.stored.plans.append(rows, group.starts, options, rows=group.home)
                continue
            sides = self._sides(group)
            self.stored.plans.append(rows, group.starts, options, sides)
            self._keep_sinks(group, sides)
            if group.early is None:  # else lent copies of sinks are out of date
                self._lent[group] = sides
        if rings is not None:
            for name, stream in streams.items():
                rings.give_back(self._tails[name], tail_of(stream))

    def attend_tokens(self, *queries: Tensor, **options: Any) -> Tensor:
        """(N, H_q, D) of each key stream, or of the selected rows only -> (N, H_q, D_v), causal within a sequence."""
        found = []
        for group in self.queries:
            rows = [group.rows_of(q) for q in queries]
            pages = {"block_table": group.table, "query_lens": group.query_lens}
            alone = group.rows == 1 and self.num_splits == BALANCED
            shares = {} if alone else {"num_splits": self.num_splits}
            sides = None
            if group.home is None:
                sides = self._lent.get(group) or self._sides(group)
            with shared(group.shared):
                out, _ = self.stored.plans.attend(
                    rows, group.ends, {**shares, **options, **pages}, sides=sides, rows=group.home
                )
            found.append(group.tokens_of(out))
        if not found:
            heads, dim = queries[0].shape[1], self.stored.streams["v"].head_dim
            return queries[0].new_empty(0, heads, dim)
        return found[0] if len(found) == 1 else torch.cat(found)

    def release(self) -> None:
        """Frees the rings and sinks lent to rows; called when a model is done with the layer, for the next to reuse."""
        self._tails, self._lent = {}, {}

    def _sides(self, group: _Group) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for name, stream in self.stored.streams.items():
            if stream.tail is not None and group.at_home:
                found.setdefault(name, {})["tail"] = stream.tail[group.owners]
            elif stream.tail is not None:
                found.setdefault(name, {})["tail"] = self._tails[name][group.rings]
            if stream.sink is not None:
                found.setdefault(name, {})["sink"] = stream.sink[group.owners]
        return found

    def _keep_sinks(self, group: _Group, sides: dict[str, dict[str, Tensor]]) -> None:
        """Copies sinks that were written for first tokens back to the sequences' own sinks."""
        if group.early is None:
            return
        rows, rings, places = group.early
        for name, side in sides.items():
            sink = self.stored.streams[name].sink
            if sink is not None:
                sink[rings, :, places] = side["sink"][rows, :, places]

    def append(
        self,
        *args: Any,
        will_attend: bool = True,  # noqa: ARG002 - it always does
        rope: Rope | None = None,
    ) -> None:
        """(N, H_kv, 1, D) of each stream, and None: rows of one token have no padding.

        ``rope`` rotates keys and queries (N, H_q, 1, D), as in `LayerKVCache.append`.
        """
        *new, query_lens = args
        assert query_lens is None
        self.append_tokens(*(x[:, :, 0] for x in new), rope=rope)

    def attend(self, *queries: Tensor, **options: Any) -> Tensor:
        """(N, H_q, 1, D) each -> (N, H_q, 1, D_v)."""
        return self.attend_tokens(*(q[:, :, 0] for q in queries), **options).unsqueeze(2)


def tail_of(stream: CacheTensor) -> Tensor:
    """The rings of a per-channel stream."""
    assert stream.tail is not None
    return stream.tail


def _check(stretches: Sequence[Stretch], page_size: int) -> None:
    if not stretches:
        raise ValueError("stretches is empty; a batch has one token or more")
    longer = False
    for index, (start, count, pages, _) in enumerate(stretches):
        if count < 1 or start < 0 or start + count > len(pages) * page_size:
            raise ValueError(
                f"stretch {index} has {count} tokens behind {start} and {len(pages)} pages of {page_size}; "
                "1 or more that fit are needed"
            )
        if count == 1 and longer:
            raise ValueError(f"stretch {index} is a single token behind a longer stretch")
        longer = longer or count > 1
