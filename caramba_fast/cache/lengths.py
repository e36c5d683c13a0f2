"""How many tokens each row of a cache holds: a host mirror, and a device tensor kernels read.

Every decision is taken on the host mirror; the device is written to and never read back, so no
step waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Counts = int | Sequence[int] | Tensor


class RowLengths:
    """Lengths of B rows.

    Attributes:
        host: list of B ints.
        seq_lens: (B,) int32 on the device, updated in place, equal to ``host``.
        newest: tokens of the last append, padding included; 0 after anything else.
        query_lens: (B,) int32, how many of them are real in each row, or None for all.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.host = [0] * batch_size
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.newest = 0
        self.query_lens: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.host)

    def on_device(self, counts: Sequence[int]) -> Tensor:
        """(B,) int32 beside ``seq_lens``."""
        return torch.tensor(counts, dtype=torch.int32).to(self.seq_lens.device, non_blocking=True)

    def advance(self, tokens: int, added: Sequence[int], query_lens: Tensor | None) -> None:
        """Row b grows by ``added[b]`` of the ``tokens`` appended; ``query_lens`` says so on the device."""
        self.host = [length + count for length, count in zip(self.host, added, strict=True)]
        self.seq_lens.add_(tokens if query_lens is None else query_lens)
        self.newest, self.query_lens = tokens, query_lens

    def advance_all(self, tokens: int) -> None:
        """Every row grows by ``tokens``."""
        self.host = [length + tokens for length in self.host]
        self.seq_lens.add_(tokens)
        self.newest, self.query_lens = tokens, None

    def set(self, lengths: Sequence[int]) -> None:
        """Replaces all lengths."""
        self.host = list(lengths)
        self.seq_lens.copy_(torch.tensor(self.host, dtype=torch.int32), non_blocking=True)
        self.newest, self.query_lens = 0, None

    def taken(self, rows: Sequence[int]) -> RowLengths:
        """Lengths of a cache whose row b is what row ``rows[b]`` is here."""
        other = RowLengths(len(rows), self.seq_lens.device)
        other.set([self.host[row] for row in rows])
        return other

    def per_row(self, name: str, counts: Counts) -> list[int]:
        """``counts`` as B host ints.

        Raises:
            TypeError: not an int, a sequence of ints or a CPU integer tensor.
            ValueError: a wrong number of rows.
        """
        if isinstance(counts, bool) or not isinstance(counts, (int, Sequence, Tensor)):
            raise TypeError(
                f"{name} is a {type(counts).__name__}; an int or one int a row is needed"
            )
        if isinstance(counts, int):
            return [counts] * len(self.host)
        if isinstance(counts, Tensor):
            if counts.device.type != "cpu" or counts.is_floating_point() or counts.ndim != 1:
                raise TypeError(
                    f"{name} is a {tuple(counts.shape)} {counts.dtype} tensor on {counts.device}; "
                    "a (B,) integer tensor on cpu is needed (lengths are never read from a device)"
                )
            counts = counts.tolist()
        if len(counts) != len(self.host):
            raise ValueError(f"{name} has {len(counts)} entries for {len(self.host)} rows")
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            raise TypeError(f"{name} is {counts!r}; ints are needed")
        return list(counts)
