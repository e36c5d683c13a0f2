"""Row lengths of a cache, and which tokens its fp16 rings hold.

All decisions use the host copy; the device copy is never read back, so no step waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Counts = int | Sequence[int] | Tensor


class RowLengths:
    """Lengths of B rows.

    Attributes:
        host: list of B ints.
        seq_lens: (B,) int32 on the device, updated in place, equal to ``host``.
        newest: tokens of the last append, padding included; 0 after any other change.
        query_lens: (B,) int32, how many of these are real in each row; None for all.
        memory: on a CPU, the address of ``seq_lens`` and a `memoryview` of it, to write without an op; None until used.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.host = [0] * batch_size
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.newest = 0
        self.query_lens: Tensor | None = None
        self.memory: tuple[int, memoryview] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the memory, which copies have of their own."""
        return {**vars(self), "memory": None}

    def check_room(
        self, tokens: int, added: Sequence[int], max_seq_len: int, where: str = ""
    ) -> None:
        """Raises ValueError unless row b can take ``added[b]`` of ``tokens``; ``where`` goes into the message."""
        for row, (length, count) in enumerate(zip(self.host, added, strict=True)):
            if not 0 <= count <= tokens:
                raise ValueError(f"new_lens[{row}] is {count}; 0 to T={tokens} is allowed")
            if length + count > max_seq_len:
                raise ValueError(
                    f"row {row} holds {length} tokens{where} and cannot take {count} more: "
                    f"max_seq_len is {max_seq_len}"
                )

    def on_device(self, counts: Sequence[int]) -> Tensor:
        """``counts`` as a (B,) int32 tensor on the device of ``seq_lens``."""
        given = torch.tensor(counts, dtype=torch.int32, device="cpu")
        return given.to(self.seq_lens.device, non_blocking=True)

    def advance(self, tokens: int, added: Sequence[int], query_lens: Tensor | None) -> None:
        """Row b grows by ``added[b]`` of ``tokens``; ``query_lens`` is ``added`` on the device, or None for all."""
        self.host = [length + count for length, count in zip(self.host, added, strict=True)]
        self.seq_lens.add_(tokens if query_lens is None else query_lens)
        self.newest, self.query_lens = tokens, query_lens

    def set(self, lengths: Sequence[int]) -> None:
        """Replaces all lengths."""
        self.host = list(lengths)
        self.seq_lens.copy_(
            torch.tensor(self.host, dtype=torch.int32, device="cpu"), non_blocking=True
        )
        self.newest, self.query_lens = 0, None

    def select_rows(self, rows: Sequence[int]) -> RowLengths:
        """Lengths of a cache whose row b is row ``rows[b]`` of this one."""
        other = RowLengths(len(rows), self.seq_lens.device)
        other.set([self.host[row] for row in rows])
        return other

    def per_row(self, name: str, counts: Counts) -> list[int]:
        """``counts`` as B host ints.

        Raises TypeError unless it is an int, a sequence of ints or a CPU integer tensor; ValueError for a wrong number.
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


class TailKeeper:
    """Tracks, per row, the lowest position whose fp16 values are in the ring.

    Cropping up to tail_slack tokens loses nothing. A deeper crop needs positions whose slots were overwritten; these
    are restored from their codes, so that every read stays correct, at the codes' precision. Appends are not reported
    here: what they overwrite follows from a row's length.

    Attributes:
        size: slots of the ring; 0 for no ring.
        lowest: the lowest positions when rows were last shortened or reordered; see `held_from`.
    """

    def __init__(self, batch_size: int, size: int) -> None:
        self.size = size
        self.lowest = [0] * batch_size

    def held_from(self, lengths: Sequence[int]) -> list[int]:
        """The lowest position of rows of ``lengths`` tokens whose fp16 values are in the ring."""
        if not self.size:
            return list(self.lowest)
        return [max(low, n - self.size) for low, n in zip(self.lowest, lengths, strict=True)]

    def lost(self, before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, int]]:
        """(row, start, stop) of positions missing from the ring when rows go from ``before`` to ``after`` tokens."""
        found = []
        held = zip(before, after, self.held_from(before), strict=True)
        for row, (old, new, low) in enumerate(held):
            needed = self._needed(new)
            if new < old and low > needed and new > needed:
                found.append((row, needed, min(low, new)))
        return found

    def shortened(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Records that rows shrank from ``before`` to ``after`` tokens and that `lost` positions were restored."""
        held = zip(before, after, self.held_from(before), strict=True)
        for row, (old, new, low) in enumerate(held):
            if new < old:
                self.lowest[row] = min(low, self._needed(new))

    def _needed(self, length: int) -> int:
        """The lowest position that may be read from the ring again, even if newest tokens are cropped and replaced."""
        return max(0, length - self.size + 1)

    def select_rows(self, rows: Sequence[int]) -> TailKeeper:
        """The keeper of a cache whose row b is row ``rows[b]`` of this one."""
        other = TailKeeper(len(rows), self.size)
        other.lowest = [self.lowest[row] for row in rows]
        return other

    def reordered_unknown(self) -> None:
        """Records a permutation unknown to the host: assumes the worst case for every row."""
        self.lowest = [max(self.lowest)] * len(self.lowest)

    def reordered(self, rows: Sequence[int]) -> None:
        """Records that row b is now the former row ``rows[b]``."""
        self.lowest = [self.lowest[row] for row in rows]
