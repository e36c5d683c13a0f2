"""Launches of decode attention under a balanced schedule (`balanced`): schedule, stretches, merge.

What is launched depends on shapes alone, as everywhere: one CUDA graph serves every length, and the host reads none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from .balanced import most_pieces, schedule_kernel
from .launch import made, start
from .splits import MERGE_OVERHEAD, RESIDENT, SHORTEST, processors
from .splits_launch import Call, launch
from .tiles_balanced import balanced_kernel
from .tiles_layout import Shape


class BalancedCall(Call):
    """One call of a decode op whose programs read as many tiles each."""

    @cached_property
    def shape(self) -> Shape:
        """The other constexpr record."""
        return replace(super().shape, balanced=True)

    @property
    def walkers(self) -> int:
        """Programs that take a stretch: as many as run at once."""
        return processors(self.q.device) * RESIDENT

    def run(self) -> tuple[Tensor, Tensor]:
        """The launches."""
        queries = [self._prepared(s) for s in self.keys]
        schedule = self._schedule()
        return self._merged(*self._stretches(queries, schedule), schedule)

    def _schedule(self) -> Tensor:
        """(2 + B,) int32, as `balanced` explains."""
        found = made(self.q, (2 + self.batch,), torch.int32)
        start(
            schedule_kernel, (1,), self._lengths, found, *self._limits[:3], self.walkers,
            triton.cdiv(SHORTEST, self.shape.tile), MERGE_OVERHEAD, self.batch, self.shape,
        )  # fmt: skip
        return found

    def _stretches(self, queries: Sequence[Any], schedule: Tensor) -> tuple[Tensor, Tensor]:
        """Partial outputs (pieces, query rows of a program, D_v) and their base-2 lse."""
        lines, sides = self.batch * self.lanes * self.row_groups, self.sides
        partial, sums = self._room(most_pieces(self.walkers, lines, sides), self.shape.rows)
        start(
            balanced_kernel, (self.walkers + lines * sides,),
            *self._read(queries), schedule, *self._table, partial, sums, *self._limits, self.walkers,
            self.batch, self.softcap, *self._constants, num_warps=self.settings.num_warps,
            num_stages=self.settings.num_stages,
        )  # fmt: skip
        return partial, sums


def launch_decode(*args: Any, num_splits: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs one decode op; arguments as of `launch`. A negative ``num_splits`` asks for a balanced schedule."""
    kind = BalancedCall if num_splits < 0 else Call
    return launch(*args, kind_of_call=kind, num_splits=num_splits, **options)
