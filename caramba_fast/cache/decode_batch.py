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
        given: (R, NUMBERS + pages) int32.
    """

    early = None

    def __init__(self, given: Tensor) -> None:
        numbers = given[:, :NUMBERS].T.contiguous()
        self.ids, self.starts, self.ends, self.query_lens, self.owners, self.givers = numbers
        self.rows, self.table = len(given), given[:, NUMBERS:].contiguous()
        self.owners, self.givers = self.owners.long(), self.givers.long()
        self.rings = torch.arange(self.rows, device=given.device)

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

    def taken(self, tail: Tensor) -> Tensor:
        """(R, lanes, 2 * size, lane_dim): what each row's sequence has in ``tail`` (rings, …)."""
        return tail.index_select(0, self.rows.owners).repeat(1, 1, 2, 1)

    def give_back(self, pieces: Tensor, tail: Tensor) -> None:
        """Writes the new tokens into the rings of their sequences."""
        row = self.rows.givers
        slot = self.rows.starts[row].long() % (2 * self.size)
        tail[self.rows.owners, :, slot % self.size] = pieces[row, :, slot]


class DecodeBatch:
    """One token of each of up to ``rows`` sequences.

    Args:
        rows: R, with those that have no sequence.
        pool: whose pages they are in.

    Attributes:
        tokens: R.
        positions: (R,) int64, the place of each token in its sequence; of `unpack`.
        layers: a `RaggedLayer` for each of the model's; of `unpack`.
    """

    prefill = "stored"

    def __init__(self, rows: int, pool: PagePool) -> None:
        self.tokens, self._pool = rows, pool
        self._given = torch.zeros(
            (rows, NUMBERS + pool.pages_per_row), dtype=torch.int32, device=pool.device
        )
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
        width = self._pool.pages_per_row
        lines = []
        for row, (token, stretch) in enumerate(zip(tokens, stretches, strict=True)):
            start, _, pages, ring = stretch
            numbers = [token, start, start + 1, 1, max(ring, 0), row]
            lines.append([*numbers, *pages[:width], *[NO_PAGE] * (width - len(pages))])
        first = lines[0][NUMBERS - 2]
        lines += [[0, 0, 0, 0, first, 0, *[NO_PAGE] * width]] * (self.tokens - len(lines))
        self._given.copy_(torch.tensor(lines, dtype=torch.int32), non_blocking=True)

    def unpack(self) -> Tensor:
        """Makes of the numbers what a model asks for, by ops alone: part of what is recorded.

        Returns:
            (R,) int64, the tokens.
        """
        rows = _Rows(self._given)
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
