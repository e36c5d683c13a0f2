"""TailKeeper: which positions the fp16 ring of each row really holds.

The ring has residual_len + tail_slack slots; position j is in slot j modulo that. Cropping up to
tail_slack tokens loses nothing. A deeper crop needs positions whose slots were overwritten: those are put
back from their codes, so that every read stays correct, at the codes' precision.

More tokens than tail_slack at once (a chunk of a prompt) would overwrite what their first queries still
have to read: they are written to a `WideRing` that lives from the append until they have been attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class WideRing:
    """A ring for ``tokens`` new tokens and the residual_len before them, in place of a stream's own.

    Args:
        ring: (B, lanes, R, lane_dim), the stream's ring.
        start: (B,) integer, tokens held before the append.
        tokens: tokens appended.
        residual_len: tokens behind a query that are read from the ring.
    """

    def __init__(self, ring: Tensor, start: Tensor, tokens: int, residual_len: int) -> None:
        self.ring, self.start = ring, start.to(torch.int64)
        shape = (*ring.shape[:2], residual_len + tokens, ring.shape[3])
        self.wide = ring.new_empty(shape)
        back = torch.arange(1, residual_len + 1, device=ring.device)
        _copy(ring, self.wide, self.start[:, None] - back)

    def narrowed(self, end: Tensor) -> Tensor:
        """The stream's ring again, with the newest of the tokens up to ``end`` (B,) in it."""
        position = end.to(torch.int64)[:, None] - torch.arange(
            1, self.ring.shape[2] + 1, device=self.ring.device
        )
        _copy(self.wide, self.ring, position, position >= self.start[:, None])
        return self.ring


def _copy(source: Tensor, target: Tensor, position: Tensor, keep: Tensor | None = None) -> None:
    """Moves positions (B, N) from ring to ring; where ``keep`` is false the target stays as it is."""
    row = torch.arange(len(position), device=position.device)[:, None]
    slot = position % target.shape[2]
    values = source[row, :, position % source.shape[2]]
    if keep is not None:
        values = torch.where(keep[..., None, None], values, target[row, :, slot])
    target[row, :, slot] = values


class TailKeeper:
    """Per row, the lowest position whose fp16 values are in the ring.

    Args:
        batch_size: rows.
        residual_len: tokens behind a query that are read from the ring; 0 for no ring.
        size: slots of the ring.
    """

    def __init__(self, batch_size: int, residual_len: int, size: int) -> None:
        self.residual_len, self.size = residual_len, size
        self.lowest = [0] * batch_size

    def appended(self, lengths: Sequence[int]) -> None:
        """Rows have grown to ``lengths``."""
        if self.residual_len:
            self.lowest = [
                max(low, n - self.size) for low, n in zip(self.lowest, lengths, strict=True)
            ]

    def shortened(
        self, before: Sequence[int], after: Sequence[int], refill: Callable[[int, int, int], None]
    ) -> None:
        """Rows go from ``before`` to ``after`` tokens; calls refill(row, start, stop) where needed."""
        if not self.residual_len:
            return
        for row, (old, new) in enumerate(zip(before, after, strict=True)):
            needed = max(0, new - self.size + 1)  # the newest tokens may be asked again
            if new < old and self.lowest[row] > needed:
                if new > needed:
                    refill(row, needed, min(self.lowest[row], new))
                self.lowest[row] = needed

    def taken(self, rows: Sequence[int]) -> TailKeeper:
        """The keeper of a cache whose row b is what row ``rows[b]`` is here."""
        other = TailKeeper(len(rows), self.residual_len, self.size)
        other.lowest = [self.lowest[row] for row in rows]
        return other

    def reordered_unknown(self) -> None:
        """Rows were permuted by an order the host does not know: assume the worst for each."""
        self.lowest = [max(self.lowest)] * len(self.lowest)

    def reordered(self, rows: Sequence[int]) -> None:
        """Row b is now what row ``rows[b]`` was."""
        self.lowest = [self.lowest[row] for row in rows]
