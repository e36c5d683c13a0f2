"""EndFrame: ragged rows as our caches lay them out, padded at the end.

With packed reads nothing has to move: the op knows every row's length, and the model is told positions. It has
the names of `Frame`, which moves rows to the front for attention over tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class EndFrame:
    """Rows that hold ``held[b]`` tokens and are given ``new[b]`` more.

    Args:
        held: tokens cached of each row, before this step.
        new: real tokens of each row in this step, padding at the end not counted.
        device: where index tensors go.

    Attributes:
        tokens: query columns T', the most new tokens of a row.
        total: the most tokens any row holds after the step.
        past: total - tokens: what the model is told of the length before.
        padded_queries: whether some row has fewer new tokens than others.
    """

    #: What the model is told of padding: nothing, since what stands behind a row's end is seen by nobody.
    attention_mask = None
    padded_keys = False

    def __init__(self, held: Sequence[int], new: Sequence[int], device: torch.device) -> None:
        self.held, self.new, self.device = list(held), list(new), device
        self.tokens = max(1, *self.new)
        self.total = max(1, *(a + b for a, b in zip(self.held, self.new, strict=True)))
        self.past = self.total - self.tokens
        self.padded_queries = min(self.new) < self.tokens

    @cached_property
    def position_ids(self) -> Tensor:
        """(B, T') int64: where in its row each query token stands; padding never beyond the longest row."""
        columns = torch.arange(self.tokens, device=self.device)
        held = torch.tensor(self.held).to(self.device, non_blocking=True)
        return (held[:, None] + columns).clamp(max=self.total - 1)

    def without_padding(self, ids: Tensor, other: int) -> Tensor:
        """(B, T) ids with ``other`` behind each row's end: some models warn of padding ids without a mask."""
        if not self.padded_queries:
            return ids
        columns = torch.arange(ids.shape[1], device=ids.device)
        new = torch.tensor(self.new).to(ids.device, non_blocking=True)
        return torch.where(columns < new[:, None], ids, other)

    def queries_to_front(self, x: Tensor) -> Tensor:
        """(B, T, …) -> (B, T', …): columns that are padding in every row are left out."""
        return x[:, : self.tokens]

    def queries_to_end(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """The way back: ``length`` long along ``dim`` (default T'), with anything in the new columns."""
        missing = 0 if length is None else length - self.tokens
        if missing <= 0:
            return x
        filler = x.narrow(dim, 0, 1).expand(*x.shape[:dim], missing, *x.shape[dim + 1 :])
        return torch.cat((x, filler), dim=dim)

    def query_column(self, index: Tensor) -> Tensor:
        """(B,) places in rows -> columns."""
        return index.clamp(max=self.tokens - 1)
