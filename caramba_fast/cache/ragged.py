"""RaggedBatch: new tokens of many sequences side by side, without padding, over pages of a pool.

A model's linear layers see N tokens and no rows. Attention takes those that came alone as one call of T = 1, and
the stretches of prompts and drafts as another, cut into pieces of at most 32 queries; both are the ordinary ops
over a block table, on whatever backend serves them. Sequences differ in length, so calls of several rows ask for a
balanced schedule (``num_splits`` of `ops.decode_attention`) unless the pool says otherwise: no token waits for the
longest sequence to be read by few.

By channel the tokens of a group that is not full are in the fp16 ring of their sequence. Stretches are cut where groups
begin, so that each piece needs one group: it gets a ring of its own for the length of a layer, with what its sequence
has of the first group, and what came goes back to the ring of the sequence. Sinks, where the storage has them, lie
beside the ring of their sequence and are lent to the pieces in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache.interface import Rope
from caramba_fast.cache.layer import LayerCache
from caramba_fast.cache.pool import PagePool
from caramba_fast.cache.stream import CacheTensor
from caramba_fast.ops.attention_call import BALANCED, MAX_QUERY_TOKENS
from caramba_fast.sharing import shared


class Stretch(NamedTuple):
    """New tokens of one sequence.

    Attributes:
        start: tokens it has in the pool before them.
        tokens: how many come, 1 or more.
        pages: its pages, in order, with room for them.
        ring: its ring in the pool; of no meaning where the storage has none.
    """

    start: int
    tokens: int
    pages: Sequence[int]
    ring: int = 0


class Piece(NamedTuple):
    """A part of a stretch that is one row of a call.

    Attributes:
        first: its first token, of the N.
        start: tokens before it in its sequence.
        length: how many.
        pages: the sequence's.
        row: which of the rings of this pass it uses.
        ring: the ring of its sequence in the pool.
    """

    first: int
    start: int
    length: int
    pages: Sequence[int]
    row: int
    ring: int


class _Group:
    """Stretches, or pieces of some, that one call of an op takes: R rows of at most W tokens.

    Args:
        pieces: one for each row.
        pool: whose pages they are in.
    """

    def __init__(self, pieces: Sequence[Piece], pool: PagePool) -> None:
        page_size, device, sink_len = pool.page_size, pool.device, pool.sink_len
        counts = [piece.length for piece in pieces]
        self.rows, self.width, self.first = len(pieces), max(counts), pieces[0].first
        width = max(-(-(piece.start + piece.length) // page_size) for piece in pieces)
        tables = [[*p.pages[:width], *[-1] * (width - len(p.pages))] for p in pieces]

        def integers(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        self.table = integers(tables)
        self.starts = integers([piece.start for piece in pieces])
        self.ends = integers([piece.start + piece.length for piece in pieces])
        rings = [piece.row for piece in pieces]
        ordered = rings == list(range(rings[0], rings[0] + self.rows))
        #: Which rings of this pass the rows have; a slice wherever it can be, which needs no copy.
        self.rings: slice | Tensor = (
            slice(rings[0], rings[0] + self.rows) if ordered else integers(rings, torch.int64)
        )
        self.owners = integers([piece.ring for piece in pieces], torch.int64)
        self.shared: dict[Any, Any] = {}  # what layers derive of these lengths (`sharing`)
        #: Row, ring and place of every sink that is written: first tokens of sequences.
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
            self.index = integers(
                [[p.first + min(step, p.length - 1) for step in steps] for p in pieces],
                torch.int64,
            )
            if min(counts) < self.width:
                self.query_lens = integers(counts)
                self.kept = integers(
                    [r * self.width + i for r, count in enumerate(counts) for i in range(count)],
                    torch.int64,
                )

    def rows_of(self, x: Tensor) -> Tensor:
        """(N, H, D) -> (R, H, W, D); padding repeats a row's last token."""
        if self.index is None:
            return x[self.first : self.first + self.rows].unsqueeze(2)
        return x[self.index].transpose(1, 2)

    def tokens_of(self, out: Tensor) -> Tensor:
        """(R, H, W, D) -> (tokens, H, D), without padding."""
        flat = out.transpose(1, 2).flatten(0, 1)
        return flat if self.kept is None else flat[self.kept]


class _Rings:
    """The rings of one pass: one for each piece, filled from those of the sequences and given back.

    A sequence's ring has a group's tokens. A piece's has twice as many slots, as ops ask for whose queries may stand in
    two groups; a piece's own stand in one.

    Args:
        pieces: of all stretches, each within a group.
        ends: where the stretch of each piece ends in its sequence.
        size: tokens of a group.
        device: where.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        ends: Sequence[int],
        size: int,
        device: torch.device,
    ) -> None:
        self.of_rows = torch.tensor([piece.ring for piece in pieces], dtype=torch.int64).to(device)
        kept = [
            (piece.row, piece.ring, place % (2 * size))
            for piece, end in zip(pieces, ends, strict=True)
            for place in range(max(piece.start, end - size), piece.start + piece.length)
        ]
        self.row, self.ring, self.slot = torch.tensor(kept, dtype=torch.int64).T.to(device)
        self.size = size

    def taken(self, tail: Tensor) -> Tensor:
        """(pieces, lanes, 2 * size, lane_dim): what each piece's sequence has in ``tail`` (rings, …)."""
        return tail.index_select(0, self.of_rows).repeat(1, 1, 2, 1)

    def give_back(self, pieces: Tensor, tail: Tensor) -> None:
        """Writes what the pieces have got into the rings of their sequences."""
        tail[self.ring, :, self.slot % self.size] = pieces[self.row, :, self.slot]


class RaggedBatch:
    """What one forward pass appends and attends to.

    Args:
        stretches: those of a single token before all others.
        pool: whose pages they are in.

    Attributes:
        tokens: N.
        longest: tokens of the longest sequence, new ones included.
        positions: (N,) int64 on the pool's device, the place of each token in its sequence.
        layers: a `RaggedLayer` for each of the model's.

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
        parts = [appended[:singles], appended[singles:]]
        self.groups = [_Group(part, pool) for part in parts if part]
        self.rings, self.queries = None, self.groups
        if group > 1:
            ends = [s.start + s.tokens for s in stretches for _ in _cut(s.start, s.tokens, group)]
            self.rings = _Rings(appended, ends, group, pool.device)
        if group > MAX_QUERY_TOKENS:
            parts[1] = [part for piece in parts[1] for part in _halved(piece)]
            self.queries = [_Group(part, pool) for part in parts if part]
        self._pieces = appended
        positions = [s.start + i for s in stretches for i in range(s.tokens)]
        self.positions = torch.tensor(positions, dtype=torch.int64).to(pool.device)
        self._pool = pool
        self.layers = [
            RaggedLayer(layer, pool.num_splits, self.groups, self.queries, self.rings)
            for layer in pool.layers
        ]

    def __getitem__(self, index: int) -> RaggedLayer:
        return self.layers[index]

    def narrowed(self, rows: Tensor) -> RaggedLayer:
        """The last layer, which stores all N tokens and attends from those of ``rows`` (M,) alone.

        No layer follows: what the others would have seen nobody asks for.
        """
        single = list[Piece]()
        firsts = [piece.first for piece in self._pieces]
        for place, token in enumerate(rows.tolist()):
            piece = self._pieces[bisect_right(firsts, token) - 1]
            begin = piece.start + token - piece.first
            single.append(piece._replace(first=place, start=begin, length=1))
        queries = [_Group(single, self._pool)] if single else []
        pool = self._pool
        return RaggedLayer(pool.layers[-1], pool.num_splits, self.groups, queries, self.rings)


def _cut(start: int, tokens: int, group: int) -> list[tuple[int, int]]:
    """Pieces (first, count) of a stretch: within a group by channel, else of at most 32 tokens."""
    found, at = list[tuple[int, int]](), 0
    while at < tokens:
        most = group - (start + at) % group if group > 1 else MAX_QUERY_TOKENS
        found.append((at, min(most, tokens - at)))
        at += found[-1][1]
    return found


def _halved(piece: Piece) -> list[Piece]:
    """A piece of a large group as some of at most 32 queries."""
    return [
        piece._replace(
            first=piece.first + at,
            start=piece.start + at,
            length=min(MAX_QUERY_TOKENS, piece.length - at),
        )
        for at in range(0, piece.length, MAX_QUERY_TOKENS)
    ]


class RaggedLayer:
    """One layer of a batch: the part of `LayerKVCache` that a model's attention calls, for N tokens."""

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
        """Stores N tokens: (N, H_kv, D) of each stream; ``rope`` as of `append`."""
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
            sides = self._sides(group)
            self.stored.plans.append(rows, group.starts, options, sides)
            self._keep_sinks(group, sides)
            if group.early is None:  # else sinks of one row are another's as well
                self._lent[group] = sides
        if rings is not None:
            for name, stream in streams.items():
                rings.give_back(self._tails[name], tail_of(stream))

    def attend_tokens(self, *queries: Tensor, **options: Any) -> Tensor:
        """(N, H_q, D) each, or those of the rows that are wanted -> (N, H_q, D_v).

        A token sees those of its sequence up to itself.
        """
        found = []
        for group in self.queries:
            rows = [group.rows_of(q) for q in queries]
            pages = {"block_table": group.table, "query_lens": group.query_lens}
            alone = group.rows == 1 and self.num_splits == BALANCED
            shares = {} if alone else {"num_splits": self.num_splits}
            sides = self._lent.get(group) or self._sides(group)
            with shared(group.shared):
                out, _ = self.stored.plans.attend(
                    rows, group.ends, {**shares, **options, **pages}, sides=sides
                )
            found.append(group.tokens_of(out))
        if not found:
            heads, dim = queries[0].shape[1], self.stored.streams["v"].head_dim
            return queries[0].new_empty(0, heads, dim)
        return found[0] if len(found) == 1 else torch.cat(found)

    def release(self) -> None:
        """Lets go of what rows were lent, when a model has done with the layer: the next one has room in its place."""
        self._tails, self._lent = {}, {}

    def _sides(self, group: _Group) -> dict[str, dict[str, Tensor]]:
        """Rings of a group's rows, and the sinks of their sequences; nothing where the storage has neither."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tail in self._tails.items():
            found.setdefault(name, {})["tail"] = tail[group.rings]
        for name, stream in self.stored.streams.items():
            if stream.sink is not None:
                found.setdefault(name, {})["sink"] = stream.sink[group.owners]
        return found

    def _keep_sinks(self, group: _Group, sides: dict[str, dict[str, Tensor]]) -> None:
        """What first tokens of sequences have been written to sinks goes to those of the sequences."""
        if group.early is None:
            return
        rows, rings, places = group.early
        for name, side in sides.items():
            sink = self.stored.streams[name].sink
            if sink is not None:
                sink[rings, :, places] = side["sink"][rows, :, places]

    # -- as a layer of the native model calls it, with N rows of one token ----------------

    def append(
        self,
        *args: Any,
        will_attend: bool = True,  # noqa: ARG002 - it always does
        rope: Rope | None = None,
    ) -> None:
        """(N, H_kv, 1, D) of each stream, and None: rows of one token have no padding.

        ``rope`` turns keys and queries (N, H_q, 1, D), as in `LayerKVCache.append`.
        """
        *new, query_lens = args
        assert query_lens is None
        self.append_tokens(*(x[:, :, 0] for x in new), rope=rope)

    def attend(self, *queries: Tensor, **options: Any) -> Tensor:
        """(N, H_q, 1, D) each -> (N, H_q, 1, D_v)."""
        return self.attend_tokens(*(q[:, :, 0] for q in queries), **options).unsqueeze(2)


def tail_of(stream: CacheTensor) -> Tensor:
    """The rings of a stream by channel."""
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
