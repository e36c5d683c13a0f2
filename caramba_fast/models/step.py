"""What every layer of one forward pass needs besides the activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """One forward pass.

    Attributes:
        phases: cos and sin of the query positions.
        exact: a prompt on an empty cache attends to its exact K and V.
        query_lens: real tokens of each row, or None when no row is padded.
        rows: (M,) int64, the rows whose result is wanted, in a layer that none follows; None for all.
    """

    phases: tuple[Tensor, Tensor]
    exact: bool
    query_lens: Sequence[int] | None
    rows: Tensor | None = None

    def wanted(self, x: Tensor) -> Tensor:
        """The rows of x (N, ...) whose result is wanted."""
        return x if self.rows is None else x[self.rows]

    @property
    def query_phases(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions of those rows."""
        cos, sin = self.phases
        return self.wanted(cos), self.wanted(sin)
