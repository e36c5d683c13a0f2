"""Prompts in every shape users have them, brought into one: rows of real tokens.

Inside, a batch is ragged: rows are padded at the end and the cache counts only real tokens, so
no attention mask is needed anywhere. Outside, rows come back padded at the front, so that
new tokens follow the prompt directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TokenIds = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Prompts:
    """B rows of token ids, none empty.

    Attributes:
        rows: the real tokens of each row.
        width: columns of what the caller gave (its padding included).
    """

    rows: list[list[int]]
    width: int

    @property
    def lens(self) -> list[int]:
        """Real tokens in each row."""
        return [len(row) for row in self.rows]

    def padded_end(self, fill: int, device: torch.device) -> Tensor:
        """(B, longest) int64, padded at the end: what a forward pass takes."""
        longest = max(self.lens)
        return torch.tensor(
            [row + [fill] * (longest - len(row)) for row in self.rows], device=device
        )

    def padded_front(self, fill: int, device: torch.device) -> Tensor:
        """(B, width) int64, padded at the front: the input part of what is returned."""
        return torch.tensor(
            [[fill] * (self.width - len(row)) + row for row in self.rows], device=device
        )


def read_prompts(
    input_ids: TokenIds,
    attention_mask: Tensor | Sequence[Sequence[int]] | None,
    pad_token_id: int | None,
    vocab_size: int,
) -> Prompts:
    """Reads token ids with or without a mask.

    Args:
        input_ids: (B, T) or (T,) integer tensor, a list of ids, or ragged lists of ids.
        attention_mask: (B, T), 1 for real tokens; each row one unbroken run of them.
        pad_token_id: without a mask, in a tensor of two rows or more, leading and trailing ids equal
            to it are padding. Lists need no padding: all of their ids are real.
        vocab_size: ids must be below it.

    Raises:
        TypeError, ValueError: wrong types, empty rows, ids outside the vocabulary, broken masks.
    """
    rows = _as_rows(input_ids)
    width = max((len(row) for row in rows), default=0)
    if attention_mask is not None:
        rows = _unmasked(rows, attention_mask)
    elif pad_token_id is not None and len(rows) > 1 and isinstance(input_ids, Tensor):
        rows = [_stripped(row, pad_token_id) for row in rows]
    if not rows:
        raise ValueError("input_ids has no rows; at least one prompt is needed")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} is empty; each needs at least one token")
        if min(row) < 0 or max(row) >= vocab_size:
            wrong = min(row) if min(row) < 0 else max(row)
            raise ValueError(
                f"prompt {index} holds token id {wrong}; 0 to {vocab_size - 1} is allowed"
            )
    return Prompts(rows, width)


def _as_rows(input_ids: TokenIds) -> list[list[int]]:
    if isinstance(input_ids, Tensor):
        if (
            input_ids.ndim not in (1, 2)
            or input_ids.is_floating_point()
            or input_ids.dtype == torch.bool
        ):
            raise TypeError(
                f"input_ids is {tuple(input_ids.shape)} {input_ids.dtype}; "
                "a (B, T) or (T,) integer tensor is needed"
            )
        rows = input_ids.tolist()
        return [rows] if input_ids.ndim == 1 else rows
    if isinstance(input_ids, (str, bytes)) or not isinstance(input_ids, Sequence):
        raise TypeError(
            f"input_ids is a {type(input_ids).__name__}; a tensor or lists of token ids are needed "
            "(encode text with the model's tokenizer first)"
        )
    if len(input_ids) and all(isinstance(item, int) for item in input_ids):
        return [_ints(input_ids)]
    return [_ints(row) for row in input_ids]


def _ints(row: object) -> list[int]:
    values = row.tolist() if isinstance(row, Tensor) else row
    if not isinstance(values, Sequence) or not all(type(item) is int for item in values):
        raise TypeError(f"input_ids holds {row!r}; each prompt must be a list of token ids")
    return list(values)


def _unmasked(
    rows: list[list[int]], attention_mask: Tensor | Sequence[Sequence[int]]
) -> list[list[int]]:
    flags = torch.as_tensor(attention_mask)
    mask = (flags[None] if flags.ndim == 1 else flags).to(torch.bool).tolist()
    if (
        flags.ndim not in (1, 2)
        or len(mask) != len(rows)
        or any(len(a) != len(b) for a, b in zip(mask, rows, strict=True))
    ):
        raise ValueError("attention_mask and input_ids differ in shape")
    kept = []
    for index, (row, marks) in enumerate(zip(rows, mask, strict=True)):
        real = [i for i, mark in enumerate(marks) if mark]
        if real and real[-1] - real[0] + 1 != len(real):
            raise ValueError(
                f"attention_mask row {index} has a gap; real tokens must be one unbroken run"
            )
        kept.append([row[i] for i in real])
    return kept


def _stripped(row: list[int], pad: int) -> list[int]:
    start, end = 0, len(row)
    while start < end and row[start] == pad:
        start += 1
    while end > start and row[end - 1] == pad:
        end -= 1
    return row[start:end]
