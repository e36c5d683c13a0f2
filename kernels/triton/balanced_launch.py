"""Launches of decode attention under a balanced schedule (`balanced`): schedule, stretches, merge.

What is launched depends on shapes alone, as everywhere: one CUDA graph serves every length, and the host reads none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from .balanced import most_pieces, schedule_kernel
from .launch import made, once, start
from .splits import SHORTEST, processors
from .splits_launch import Call, launch
from .tiles_balanced import balanced_kernel
from .tiles_layout import Settings, Shape, walking


class BalancedCall(Call):
    """One call of a decode op whose programs read as many tiles each."""

    @cached_property
    def settings(self) -> Settings:
        """Launch settings."""
        return walking(super().settings)

    @cached_property
    def shape(self) -> Shape:
        """The other constexpr record."""
        return replace(super().shape, balanced=True)

    @cached_property
    def walkers(self) -> int:
        """Programs that take a stretch: as many as run at once."""
        return processors(self.q.device) * self.resident(balanced_kernel, torch.int32, 1)

    def run(self) -> tuple[Tensor, Tensor]:
        """The launches."""
        schedule = self._schedule()
        return self._merged(*self._stretches(schedule), schedule)

    def _schedule(self) -> Tensor:
        """(2 + B,) int32, as `balanced` explains; layers that share a step's lengths share it."""
        how = (
            *self._limits[:3], self.walkers, triton.cdiv(SHORTEST, self.shape.tile), self.overheads.merge, self.batch,
            self.shape,
        )  # fmt: skip

        def make() -> Tensor:
            found = made(self.q, (2 + self.batch,), torch.int32)
            start(schedule_kernel, (1,), self._lengths, found, *how)
            return found

        return once((schedule_kernel, self.q.device, how), make)

    def _stretches(self, schedule: Tensor) -> tuple[Tensor, Tensor]:
        """Partial outputs (pieces, query rows of a program, D_v) and their base-2 lse."""
        lines, sides = self.batch * self.lanes * self.row_groups, self.sides
        partial, sums = self._room(most_pieces(self.walkers, lines, sides), self.shape.rows)
        arguments = self._arguments(partial, sums, schedule, self.walkers)
        start(balanced_kernel, (self.walkers + lines * sides,), *arguments, **self._compile_options)
        return partial, sums

    def _arguments(self, partial: Any, sums: Any, schedule: Any, walkers: int) -> tuple[Any, ...]:
        """Those of the kernel that leaves partial results."""
        return (
            *self._read, schedule, *self._table, partial, sums, *self._limits, walkers, self.batch, self.softcap,
            *self._constants,
        )  # fmt: skip


def launch_decode(*args: Any, num_splits: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs one decode op; arguments as of `launch`. A negative ``num_splits`` asks for a balanced schedule."""
    kind = BalancedCall if num_splits < 0 else Call
    return launch(*args, kind_of_call=kind, num_splits=num_splits, **options)
