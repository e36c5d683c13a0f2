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
    """

    phases: tuple[Tensor, Tensor]
    exact: bool
    query_lens: Sequence[int] | None
