"""Left- and right-padded layouts for rows of different lengths in one pass, and conversions between them.

Our caches and callers use right padding, which packed reads keep: the op knows every row's length, and the model gets
position ids. Attention over dequantized tensors uses left padding, which transformers models are made and tested for:
the newest token of every row is in the last column, so a two-dimensional mask and position ids suffice for any
attention, including distance biases and sliding windows. Rows have no gaps in either, so distances are preserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class RowLayout:
    """Rows that hold ``held[b]`` tokens and get ``new[b]`` more, padding not counted.

    Attributes:
        tokens: query columns T' = the most new tokens of any row.
        total: the most tokens any row holds after the step.
        past: total - tokens, the length before the step that is reported to the model.
        padded_queries: whether some rows have fewer new tokens than others.
        padded_keys: whether the model sees columns in which some row has no token.
    """

    padded_keys = False

    def __init__(self, held: Sequence[int], new: Sequence[int], device: torch.device) -> None:
        self.held, self.new, self.device = list(held), list(new), device
        self.tokens = max(1, *self.new)
        self.total = max(1, *(a + b for a, b in zip(self.held, self.new, strict=True)))
        self.past = self.total - self.tokens
        self.padded_queries = min(self.new) < self.tokens

    @property
    def attention_mask(self) -> Tensor | None:
        """(B, total) int64, 0 where a row has no token to show; None when every row shows all columns."""
        return None

    @property
    def position_ids(self) -> Tensor:
        """(B, T') int64: where in its row each query token stands."""
        raise NotImplementedError

    def to_layout(self, x: Tensor) -> Tensor:
        """(B, T, …) right-padded -> (B, T', …) in this layout, without columns that are padding in every row."""
        return x[:, : self.tokens]

    def from_layout(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """This layout -> right-padded along ``dim`` to ``length`` (default T'); added columns hold arbitrary values."""
        missing = 0 if length is None else length - self.tokens
        if missing <= 0:
            return x
        filler = x.narrow(dim, 0, 1).expand(*x.shape[:dim], missing, *x.shape[dim + 1 :])
        return torch.cat((x, filler), dim=dim)

    def query_column(self, index: Tensor) -> Tensor:
        """(B,) places in rows padded at the end -> columns of this layout."""
        return index.clamp(max=self.tokens - 1)


class RightPadded(RowLayout):
    """Right-padded rows, the layout of our caches. Nothing attends past a row's end, so there is no mask."""

    @cached_property
    def position_ids(self) -> Tensor:
        """(B, T') int64: where in its row each query token stands; padding never beyond the longest row."""
        columns = torch.arange(self.tokens, device=self.device)
        held = torch.tensor(self.held, device="cpu").to(self.device, non_blocking=True)
        return (held[:, None] + columns).clamp(max=self.total - 1)

    def without_padding(self, ids: Tensor, other: int) -> Tensor:
        """(B, T) ids with ``other`` after each row's end: some models warn about padding ids without a mask."""
        if not self.padded_queries:
            return ids
        columns = torch.arange(ids.shape[1], device=ids.device)
        new = torch.tensor(self.new, device="cpu").to(ids.device, non_blocking=True)
        return torch.where(columns < new[:, None], ids, other)


class LeftPadded(RowLayout):
    """Left-padded rows: the newest token of every row is in the last column.

    With ``window``, for one new token per row, a query sees at most that many tokens, itself included.
    """

    def __init__(
        self,
        held: Sequence[int],
        new: Sequence[int],
        device: torch.device,
        window: int | None = None,
    ) -> None:
        super().__init__(held, new, device)
        self.window = window
        lead = [self.total - a - b for a, b in zip(self.held, self.new, strict=True)]
        query_lead = [self.tokens - count for count in self.new]
        self.padded_keys = any(lead)
        both = torch.tensor([lead, query_lead], device="cpu").to(device, non_blocking=True)
        self._lead, self._query_lead = both[0], both[1]

    @property
    def attention_mask(self) -> Tensor | None:
        """(B, total) int64, 0 where a row has no token to show; None when every row shows all columns."""
        hidden = 0 if self.window is None else max(self.total - self.window, 0)
        if not self.padded_keys and not hidden:
            return None
        columns = torch.arange(self.total, device=self.device)
        return (columns >= self._lead[:, None].clamp(min=hidden)).to(torch.int64)

    @property
    def position_ids(self) -> Tensor:
        """(B, T') int64: where in its row each query token stands; 0 for columns in front of a row."""
        columns = torch.arange(self.past, self.total, device=self.device)
        return (columns - self._lead[:, None]).clamp(min=0)

    def to_layout(self, x: Tensor) -> Tensor:
        """(B, T, …) right-padded -> (B, T', …) left-padded."""
        x = super().to_layout(x)
        return self._taken(x, 1, self._queries_moved) if self.padded_queries else x

    def from_layout(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Left-padded -> right-padded along ``dim``, to ``length`` (default T')."""
        if self.padded_queries:
            x = self._taken(x, dim, self._queries_moved_back)
        return super().from_layout(x, dim, length)

    def keys_to_front(self, x: Tensor) -> Tensor:
        """(B, H, total, D) right-padded -> left-padded."""
        return self._taken(x, 2, self._keys_moved) if self.padded_keys else x

    def query_column(self, index: Tensor) -> Tensor:
        """(B,) places in rows padded at the end -> columns of this layout."""
        return super().query_column(index + self._query_lead)

    @cached_property
    def _keys_moved(self) -> Tensor:
        return self._moved(self.total, self._lead)

    @cached_property
    def _queries_moved(self) -> Tensor:
        return self._moved(self.tokens, self._query_lead)

    @cached_property
    def _queries_moved_back(self) -> Tensor:
        return self._moved(self.tokens, -self._query_lead)

    def _moved(self, length: int, by: Tensor) -> Tensor:
        """(B, length) gather indices that rotate row b by ``by[b]`` places to the right, with wraparound."""
        return (torch.arange(length, device=self.device) - by[:, None]) % length

    def _taken(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        shape = [len(index) if i == 0 else index.shape[1] if i == dim else 1 for i in range(x.ndim)]
        return torch.take_along_dim(x, index.view(shape).to(x.device), dim)
