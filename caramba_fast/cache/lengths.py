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
        ends: (B,) int32, where the last append ended, padding of short rows included; this is
            what attention over the newest queries calls ``cache_seqlens``.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.host = [0] * batch_size
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.ends = self.seq_lens
        self.padded_to = 0

    @property
    def longest(self) -> int:
        return max(self.host)

    def advance(self, tokens: int, new_lens: Sequence[int] | None = None) -> None:
        """Adds ``tokens`` to every row, or ``new_lens[b]`` of them to row b."""
        if new_lens is None or all(count == tokens for count in new_lens):
            self.host = [length + tokens for length in self.host]
            self.seq_lens.add_(tokens)
            self.ends = self.seq_lens
            self.padded_to = self.longest
            return
        self.padded_to = self.longest + tokens
        self.ends = self.seq_lens + tokens
        self.set([length + count for length, count in zip(self.host, new_lens, strict=True)], settle=False)

    def set(self, lengths: list[int], *, settle: bool = True) -> None:
        """Replaces all lengths; ``settle`` also forgets the padding of the last append."""
        self.host = lengths
        self.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        if settle:
            self.ends = self.seq_lens
            self.padded_to = self.longest

    def per_row(self, name: str, counts: Counts) -> list[int]:
        """``counts`` as B host ints.

        Raises:
            TypeError: not an int, a sequence of ints or a CPU integer tensor.
            ValueError: a wrong number of rows.
        """
        if isinstance(counts, bool) or not isinstance(counts, (int, Sequence, Tensor)):
            raise TypeError(f"{name} is a {type(counts).__name__}; an int or one int a row is needed")
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
        return [int(count) for count in counts]
