"""DecodeBatch: one token of each of several sequences, in tensors with fixed addresses.

A step over it can be captured once (CUDA graph) and replayed for other sequences: only the contents of one tensor
differ, and padding rows store and see nothing. Models use it like a `RaggedBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.pool import PagePool
from caramba_fast.cache.ragged import RaggedLayer, Stretch

#: Numbers of a row before its pages: the token id, stored tokens without and with it, whether the row has a sequence,
#: the sequence's ring, and the row whose new token goes into that ring.
NUMBERS = 6
NO_PAGE = -1


class _Rows:
    """The single op call of a layer: R rows of one token, from ``given`` (NUMBERS + pages, R or more) int32.

    Same interface as `ragged._Group`.
    """

    at_home, home, early, index = False, None, None, None

    def __init__(self, given: Tensor, rows: int) -> None:
        numbers = given[:NUMBERS, :rows]
        self.ids, self.starts, self.ends, self.query_lens, owners, givers = numbers
        self.rows, self.table = rows, given[NUMBERS:, :rows].T.contiguous()
        self.owners, self.givers = owners.long(), givers.long()
        self.rings = slice(None)
        self.shared: dict[Any, Any] = {}

    def rows_of(self, x: Tensor) -> Tensor:
        """(R, H, D) -> (R, H, 1, D)."""
        return x.unsqueeze(2)

    def tokens_of(self, out: Tensor) -> Tensor:
        """(R, H, 1, D) -> (R, H, D)."""
        return out[:, :, 0]


class _Rings:
    """The rings of the rows' sequences, as `ragged._Rings`; a padding row writes the same values as the first row."""

    def __init__(self, rows: _Rows, size: int) -> None:
        self.rows, self.size = rows, size
        self._slots = rows.starts.long()[rows.givers] % (2 * size)
        self._places = self._slots % size

    def taken(self, tail: Tensor) -> Tensor:
        """(R, lanes, 2 * size, lane_dim): each row's sequence ring in ``tail`` (rings, …), gathered by one kernel."""
        twice = tail.unsqueeze(2).expand(-1, -1, 2, -1, -1)
        return twice.index_select(0, self.rows.owners).flatten(2, 3)

    def give_back(self, pieces: Tensor, tail: Tensor) -> None:
        tail[self.rows.owners, :, self._places] = pieces[self.rows.givers, :, self._slots]


class DecodeBatch:
    """One token of each of up to ``rows`` sequences.

    Args:
        rows: R, padding rows included; before `fill` all rows are padding.
        pool: the pool that holds the pages.

    Attributes:
        tokens: R.
        positions: (R,) int64, the position of each token in its sequence; set by `unpack`.
        layers: a `RaggedLayer` for each of the model's layers; set by `unpack`.
    """

    prefill = "stored"

    def __init__(self, rows: int, pool: PagePool) -> None:
        self.tokens, self._pool = rows, pool
        # One line per number, for all rows, so that unused lines need no copy; 16-byte aligned, on which Triton
        # specializes.
        shape = (NUMBERS + pool.pages_per_row, -(-rows // 4) * 4)
        self._host = torch.zeros(shape, dtype=torch.int32, device="cpu")
        self._host[NUMBERS:] = NO_PAGE
        self._lines: Any = self._host.numpy()
        self._pages: list[Sequence[int]] = [[] for _ in range(rows)]
        self._used = NUMBERS
        self._given = torch.empty(shape, dtype=torch.int32, device=pool.device).copy_(self._host)
        self.positions: Tensor
        self.layers: list[RaggedLayer] = []

    @staticmethod
    def why_not(stretches: Sequence[Stretch], pool: PagePool) -> str | None:
        """Why these stretches cannot be rows of such a batch; None if they can."""
        if any(stretch.tokens > 1 for stretch in stretches):
            return "a sequence has more than one new token"
        if any(stretch.start < pool.sink_len for stretch in stretches):
            return "a sequence still writes its sinks"
        return None

    def fill(self, tokens: Sequence[int], stretches: Sequence[Stretch]) -> None:
        """Puts a token of each sequence into the first rows and makes the others padding rows.

        Raises ValueError for no sequences, more sequences than rows, or one that `why_not` rejects.
        """
        if not 0 < len(stretches) == len(tokens) <= self.tokens:
            raise ValueError(
                f"{len(tokens)} tokens of {len(stretches)} sequences; 1 to {self.tokens} of each are allowed"
            )
        why = self.why_not(stretches, self._pool)
        if why is not None:
            raise ValueError(f"{why}, which a batch of single tokens has no place for")
        numbers = [
            (token, stretch.start, stretch.start + 1, 1, max(stretch.ring, 0), row)
            for row, (token, stretch) in enumerate(zip(tokens, stretches, strict=True))
        ]
        nobody = (0, 0, 0, 0, numbers[0][NUMBERS - 2], 0)
        numbers += [nobody] * (self.tokens - len(numbers))
        self._lines[:NUMBERS, : self.tokens] = list(zip(*numbers, strict=True))
        for row in range(self.tokens):
            self._put_pages(row, stretches[row].pages if row < len(stretches) else ())
        used = NUMBERS + max(map(len, self._pages))
        changed, self._used = max(used, self._used), used
        # A blocking copy: the next call overwrites its source.
        self._given[:changed].copy_(self._host[:changed])

    def _put_pages(self, row: int, pages: Sequence[int]) -> None:
        """Updates the pages of a row if they differ from those of the previous step; most do not."""
        pages = list(pages[: self._pool.pages_per_row])
        if pages != self._pages[row]:
            column, self._pages[row] = self._lines[NUMBERS:, row], pages
            column[: len(pages)] = pages
            column[len(pages) :] = NO_PAGE

    def unpack(self) -> Tensor:
        """The token ids, (R,) int64; also sets `positions` and `layers`.

        Uses only tensor ops: it is part of the captured graph.
        """
        rows = _Rows(self._given, self.tokens)
        rings = _Rings(rows, self._pool.group) if self._pool.group > 1 else None
        calls: Any = [rows]
        self.positions = rows.starts.long()
        splits = self._pool.num_splits
        self.layers = [
            RaggedLayer(layer, splits, calls, calls, rings) for layer in self._pool.layers
        ]
        return rows.ids.long()

    def __getitem__(self, index: int) -> RaggedLayer:
        return self.layers[index]
