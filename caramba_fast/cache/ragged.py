"""RaggedBatch: new tokens of many sequences side by side, without padding, over pages of a pool.

A model's linear layers see N tokens and no rows. Attention takes those that came alone as one call of T = 1, and
the stretches of prompts and drafts as another, cut into pieces of at most 32 queries; both are the ordinary ops
over a block table, on whatever backend serves them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache.layer import LayerCache
from caramba_fast.cache.pool import PagePool
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS


class Stretch(NamedTuple):
    """New tokens of one sequence.

    Attributes:
        start: tokens it has in the pool before them.
        tokens: how many come, 1 or more.
        pages: its pages, in order, with room for them.
    """

    start: int
    tokens: int
    pages: Sequence[int]


#: First of the N tokens, tokens before it in its sequence, how many, and the sequence's pages.
Piece = tuple[int, int, int, Sequence[int]]


class _Group:
    """Stretches, or pieces of some, that one call of an op takes: R rows of at most W tokens.

    Args:
        pieces: one for each row.
        page_size: tokens of a page.
        device: where the ops run.
    """

    def __init__(
        self, pieces: Sequence[Piece], page_size: int, device: torch.device
    ) -> None:  # fmt: skip
        counts = [count for _, _, count, _ in pieces]
        self.rows, self.width, self.first = len(pieces), max(counts), pieces[0][0]
        width = max(-(-(start + count) // page_size) for _, start, count, _ in pieces)
        tables = [[*pages[:width], *[-1] * (width - len(pages))] for _, _, _, pages in pieces]

        def integers(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        self.table = integers(tables)
        self.starts = integers([start for _, start, _, _ in pieces])
        self.ends = integers([start + count for _, start, count, _ in pieces])
        self.index: Tensor | None = None
        self.query_lens: Tensor | None = None
        self.kept: Tensor | None = None
        if self.width > 1:
            steps = range(self.width)
            self.index = integers(
                [[at + min(step, count - 1) for step in steps] for at, _, count, _ in pieces],
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
        single, pieces = list[Piece](), list[Piece]()
        first = 0
        for start, count, pages in stretches:
            if count == 1:
                single.append((first, start, 1, pages))
            for at in range(0, count if count > 1 else 0, MAX_QUERY_TOKENS):
                size = min(MAX_QUERY_TOKENS, count - at)
                pieces.append((first + at, start + at, size, pages))
            first += count
        self.tokens, self.longest = first, max(s.start + s.tokens for s in stretches)
        self.groups = [_Group(x, pool.page_size, pool.device) for x in (single, pieces) if x]
        positions = [s.start + i for s in stretches for i in range(s.tokens)]
        self.positions = torch.tensor(positions, dtype=torch.int64).to(pool.device)
        self._stretches, self._pool = stretches, pool
        self.layers = [RaggedLayer(layer, self.groups) for layer in pool.layers]

    def __getitem__(self, index: int) -> RaggedLayer:
        return self.layers[index]

    def narrowed(self, rows: Tensor) -> RaggedLayer:
        """The last layer, which stores all N tokens and attends from those of ``rows`` (M,) alone.

        No layer follows: what the others would have seen nobody asks for.
        """
        single = list[Piece]()
        ends = list(itertools.accumulate(stretch.tokens for stretch in self._stretches))
        for place, token in enumerate(rows.tolist()):
            index = bisect_right(ends, token)
            start, count, pages = self._stretches[index]
            single.append((place, start + token - (ends[index] - count), 1, pages))
        groups = [_Group(single, self._pool.page_size, self._pool.device)] if single else []
        return RaggedLayer(self._pool.layers[-1], self.groups, groups)


class RaggedLayer:
    """One layer of a batch: the part of `LayerKVCache` that a model's attention calls, for N tokens."""

    is_empty = False

    def __init__(
        self, stored: LayerCache, groups: Sequence[_Group], queries: Sequence[_Group] | None = None
    ) -> None:
        self.stored, self.groups = stored, groups
        self.queries = groups if queries is None else queries

    @torch.no_grad()
    def append_tokens(self, *new: Tensor) -> None:
        """Stores N tokens: (N, H_kv, D) of each stream."""
        for group in self.groups:
            rows = [group.rows_of(x) for x in new]
            options = {"block_table": group.table}
            if group.query_lens is not None:
                options["query_lens"] = group.query_lens
            self.stored.plans.append(rows, group.starts, options)

    def attend_tokens(self, *queries: Tensor, **options: Any) -> Tensor:
        """(N, H_q, D) each, or those of the rows that are wanted -> (N, H_q, D_v).

        A token sees those of its sequence up to itself.
        """
        found = []
        for group in self.queries:
            rows = [group.rows_of(q) for q in queries]
            pages = {"block_table": group.table, "query_lens": group.query_lens}
            out, _ = self.stored.plans.attend(rows, group.ends, {**options, **pages})
            found.append(group.tokens_of(out))
        if not found:
            heads, dim = queries[0].shape[1], self.stored.streams["v"].head_dim
            return queries[0].new_empty(0, heads, dim)
        return found[0] if len(found) == 1 else torch.cat(found)

    # -- as a layer of the native model calls it, with N rows of one token ----------------

    def append(self, *args: Any, will_attend: bool = True) -> None:  # noqa: ARG002 - it always does
        """(N, H_kv, 1, D) of each stream, and None: rows of one token have no padding."""
        *new, query_lens = args
        assert query_lens is None
        self.append_tokens(*(x[:, :, 0] for x in new))

    def attend(self, *queries: Tensor, **options: Any) -> Tensor:
        """(N, H_q, 1, D) each -> (N, H_q, 1, D_v)."""
        return self.attend_tokens(*(q[:, :, 0] for q in queries), **options).unsqueeze(2)


def _check(stretches: Sequence[Stretch], page_size: int) -> None:
    if not stretches:
        raise ValueError("stretches is empty; a batch has one token or more")
    longer = False
    for index, (start, count, pages) in enumerate(stretches):
        if count < 1 or start < 0 or start + count > len(pages) * page_size:
            raise ValueError(
                f"stretch {index} has {count} tokens behind {start} and {len(pages)} pages of {page_size}; "
                "1 or more that fit are needed"
            )
        if count == 1 and longer:
            raise ValueError(f"stretch {index} is a single token behind a longer stretch")
        longer = longer or count > 1
