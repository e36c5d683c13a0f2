"""SpreadRows: the rows of one layer whose pages are on several ranks, as far as they shrink and move.

Lengths are those of the whole rows, the same on every rank; each rank shortens, permutes and copies what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import LayerCache, Reach, RowLengths
from caramba_fast.cache.lengths import Counts
from caramba_fast.cache.tensor import CacheTensor
from caramba_fast.distributed.group import RankGroup
from caramba_fast.distributed.moving import copy_of, refill
from caramba_fast.distributed.plans import Plans
from caramba_fast.distributed.recent import lost_positions, shorten

if TYPE_CHECKING:
    from typing_extensions import Self


class SpreadRows:
    """See the module.

    Args:
        local: this rank's pages, a paged cache.
        ring: the fp16 tail, None without.
        plans: where tokens go.
        group: the ranks.
        max_seq_len: tokens a row can hold over all ranks.
    """

    def __init__(
        self,
        local: LayerCache,
        ring: LayerCache | None,
        plans: Plans,
        group: RankGroup,
        max_seq_len: int,
    ) -> None:
        self.local, self.ring, self.plans, self.group = local, ring, plans, group
        self.batch_size, self.max_seq_len = local.batch_size, max_seq_len
        self.n_kv_heads, self.device, self.known = local.n_kv_heads, local.device, local.known
        self.residual_len = 0 if ring is None else ring.residual_len
        self.reads_all_slots, self.reach = False, Reach()
        self._by_hand = False
        self._newest: list[int] = []  # real tokens of the last append, by row
        with torch.inference_mode(False):  # as the buffers
            self.lengths = RowLengths(self.batch_size, self.device)

    # -- what it holds ------------------------------------------------------------------

    @property
    def streams(self) -> dict[str, CacheTensor]:
        """The streams as this rank stores them."""
        return self.local.streams

    @property
    def pos(self) -> int:
        """Tokens in the longest row, over all ranks."""
        return self.lengths.longest

    @property
    def seq_lens(self) -> Tensor:
        """(B,) int32 on the device, tokens in each row over all ranks."""
        return self.lengths.seq_lens

    @property
    def is_empty(self) -> bool:
        """Whether no row holds a token on any rank."""
        return self.pos == 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated on this rank."""
        return self.local.nbytes + (0 if self.ring is None else self.ring.nbytes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of codes and scales that one token of one row takes, on the rank that holds it."""
        return self.local.bytes_per_token

    @property
    def _carries(self) -> bool:
        """Whether this rank attends to the ring."""
        return self.group.rank == self.plans.spread.first_rank

    # -- shrinking and moving -----------------------------------------------------------

    def crop(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens of every row, or ``n[b]`` of row b, wherever they are."""
        counts = self.lengths.per_row("n", n)
        for row, (length, count) in enumerate(zip(self.lengths.host, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot crop {count} tokens of row {row}, which holds {length}")
        self.set_lengths([a - b for a, b in zip(self.lengths.host, counts, strict=True)])

    def truncate(self, new_pos: int) -> None:
        """Keeps the first ``new_pos`` tokens of every row; rows that are shorter stay as they are."""
        if type(new_pos) is not int or not 0 <= new_pos <= self.pos:
            raise ValueError(f"new_pos is {new_pos!r}; 0 to {self.pos} (tokens cached) is allowed")
        self.set_lengths([min(length, new_pos) for length in self.lengths.host])

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Shortens rows to ``lengths``, none longer than it is, on every rank."""
        if self.ring is not None:
            self.ring._narrow()
            wanted = [min(a, b) for a, b in zip(lengths, self.ring.lengths.host, strict=True)]
            shorten(self.ring, wanted, refill(self, lost_positions(self.ring, wanted)))
        spread, rank = self.plans.spread, self.group.rank
        held = spread.count(rank, np.array(lengths)).tolist()
        self.local.set_lengths(
            [min(a, b) for a, b in zip(held, self.local.lengths.host, strict=True)]
        )
        self.lengths.set(lengths)

    def reorder(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was; pages are shared until a row writes.

        Args:
            beam_idx: (B,) integer tensor on cpu.
        """
        if beam_idx.device.type != "cpu":
            raise ValueError(
                f"beam_idx is on {beam_idx.device}; cpu is needed where rows have pages"
            )
        self.local.reorder(beam_idx)
        if self.ring is not None:
            self.ring.reorder(beam_idx)
        self.lengths.set([self.lengths.host[row] for row in beam_idx.tolist()])

    def take(self, rows: Sequence[int]) -> Self:
        """A new cache whose row b holds what row ``rows[b]`` holds here, copied; this one stays as it is.

        Raises:
            ValueError: no rows, or one that does not exist.
        """
        other: Any = copy_of(self, rows)
        return other

    def reset(self) -> None:
        """Forgets everything; the memory stays allocated."""
        self.local.reset()
        if self.ring is not None:
            self.ring.reset()
        self.lengths.set([0] * self.batch_size)
        self._by_hand = False

    def tail_state(self) -> tuple[list[Tensor], list[int]]:
        """As `LayerCache.tail_state`; nothing without a tail."""
        return ([], []) if self.ring is None else self.ring.tail_state()

    def restore_tail(self, state: tuple[list[Tensor], list[int]]) -> None:
        """As `LayerCache.restore_tail`."""
        if self.ring is not None:
            self.ring.restore_tail(state)
