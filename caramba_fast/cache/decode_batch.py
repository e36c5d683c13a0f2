"""DecodeBatch: one token of each of some sequences, in tensors that stay where they are.

A step over it can be recorded once and replayed for other sequences: what differs is numbers in one tensor, and rows
without a sequence store and see nothing. It is to models what `RaggedBatch` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.pool import PagePool
from caramba_fast.cache.ragged import RaggedLayer, Stretch

#: Numbers of a row before its pages: token, tokens stored before it and with it, whether there is a sequence, its ring,
#: and which row's new token goes into that ring.
NUMBERS = 6
NO_PAGE = -1


class _Rows:
    """What a layer asks of the one call of its ops: R rows of one token.

    Args:
        given: (NUMBERS + pages, R or more) int32.
        rows: R.
    """

    early = None
    index = None

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
    """The rings of the rows' sequences, as `ragged._Rings`.

    A row without a sequence gives back what the first row has, to where that gives it.
    """

    def __init__(self, rows: _Rows, size: int) -> None:
        self.rows, self.size = rows, size
        self._slots = rows.starts.long()[rows.givers] % (2 * size)
        self._places = self._slots % size

    def taken(self, tail: Tensor) -> Tensor:
        """(R, lanes, 2 * size, lane_dim): what each row's sequence has in ``tail`` (rings, …), in one kernel."""
        twice = tail.unsqueeze(2).expand(-1, -1, 2, -1, -1)
        return twice.index_select(0, self.rows.owners).flatten(2, 3)

    def give_back(self, pieces: Tensor, tail: Tensor) -> None:
        """Writes the new tokens into the rings of their sequences."""
        tail[self.rows.owners, :, self._places] = pieces[self.rows.givers, :, self._slots]


class DecodeBatch:
    """One token of each of up to ``rows`` sequences.

    Args:
        rows: R, with those that have no sequence.
        pool: whose pages they are in.

    Attributes:
        tokens: R; at first none of them has a sequence.
        positions: (R,) int64, the place of each token in its sequence; of `unpack`.
        layers: a `RaggedLayer` for each of the model's; of `unpack`.
    """

    prefill = "stored"

    def __init__(self, rows: int, pool: PagePool) -> None:
        self.tokens, self._pool = rows, pool
        # A number of all rows is one line, so that lines that are not in use need no copy; lines begin where a GPU
        # reads 16 bytes at once, for Triton compiles other kernels for those that do not.
        shape = (NUMBERS + pool.pages_per_row, -(-rows // 4) * 4)
        self._host = torch.zeros(shape, dtype=torch.int32)
        self._host[NUMBERS:] = NO_PAGE
        self._lines: Any = self._host.numpy()
        self._pages: list[Sequence[int]] = [[] for _ in range(rows)]
        self._used = NUMBERS
        self._given = torch.empty(shape, dtype=torch.int32, device=pool.device).copy_(self._host)
        self.positions: Tensor
        self.layers: list[RaggedLayer] = []

    @staticmethod
    def why_not(stretches: Sequence[Stretch], pool: PagePool) -> str | None:
        """None where these can be rows of such a batch, else the reason they cannot."""
        if any(stretch.tokens > 1 for stretch in stretches):
            return "a sequence has more than one new token"
        if any(stretch.start < pool.sink_len for stretch in stretches):
            return "a sequence still writes its sinks"
        return None

    def fill(self, tokens: Sequence[int], stretches: Sequence[Stretch]) -> None:
        """Puts a token of each sequence into the first rows, and nothing into the others.

        Raises:
            ValueError: no sequences, more than rows, or one that `why_not` names.
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
        # The copy is waited for: the next call writes into what is copied from.
        self._given[:changed].copy_(self._host[:changed])

    def _put_pages(self, row: int, pages: Sequence[int]) -> None:
        """Notes the pages of a row; most have those of the step before."""
        pages = list(pages[: self._pool.pages_per_row])
        if pages != self._pages[row]:
            column, self._pages[row] = self._lines[NUMBERS:, row], pages
            column[: len(pages)] = pages
            column[len(pages) :] = NO_PAGE

    def unpack(self) -> Tensor:
        """Makes of the numbers what a model asks for, by ops alone: part of what is recorded.

        Returns:
            (R,) int64, the tokens.
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
