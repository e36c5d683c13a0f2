"""TokenSequence: the tokens and generation state of one row. read_prompts: token ids as callers give them.

Inside, a batch is ragged: rows are right-padded and the cache counts only real tokens, so no attention mask is needed.
Results are left-padded, so that new tokens follow the prompt directly.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Why a generation ended; the last three only in an `Engine`.
FinishReason = Literal[
    "eos", "stop", "length", "time", "criteria", "cancelled", "deadline", "error"
]


class Mark(NamedTuple):
    """State of a `TokenSequence`, for `TokenSequence.restore`."""

    length: int
    start: int
    limit: int
    finish_reason: FinishReason | None


class TokenSequence:
    """The tokens of one row: the prompt and what was generated after it.

    Tokens are pushed and popped one by one, so that a draft can be tried and taken back, and penalties are updated
    incrementally.

    Attributes:
        tokens: array of int64 ids.
        start: number of tokens before the first generated one.
        limit: most new tokens of the current generation.
        finish_reason: why the generation ended; None while it runs.
    """

    def __init__(self, tokens: Iterable[int] = (), limit: int = 0) -> None:
        self.tokens = array("q", tokens)
        self.start, self.limit = len(self.tokens), limit
        self.finish_reason: FinishReason | None = None
        self._seen: _Seen | None = None
        self._ngrams: _NGrams | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def new(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.start

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return list(self.tokens[self.start :])

    def begin(self, limit: int) -> None:
        """Starts a generation of at most ``limit`` tokens."""
        self.start, self.limit, self.finish_reason = len(self.tokens), limit, None

    def mark(self) -> Mark:
        """State for `restore`."""
        return Mark(len(self.tokens), self.start, self.limit, self.finish_reason)

    def restore(self, mark: Mark) -> None:
        """Restores a mark, even after an interrupted push or pop."""
        self.cut(mark.length)
        self.start, self.limit, self.finish_reason = mark[1:]

    def push(self, token: int) -> None:
        """Adds a token."""
        self.tokens.append(token)
        if self._seen is not None:
            self._seen.push(token)
        if self._ngrams is not None:
            self._ngrams.push(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens."""
        for token in tokens:
            self.push(token)

    def pop(self, count: int) -> None:
        """Removes the newest ``count`` tokens."""
        for _ in range(count):
            if self._ngrams is not None:
                self._ngrams.pop(self.tokens)
            token = self.tokens.pop()
            if self._seen is not None:
                self._seen.pop(token)

    def cut(self, length: int) -> None:
        """Keeps the first ``length`` tokens, even after an interrupted push or pop; the rest is rebuilt on demand."""
        self._seen = self._ngrams = None
        del self.tokens[length:]

    def first(self, length: int) -> TokenSequence:
        """A copy of the first ``length`` tokens."""
        other = self.copy()
        other.cut(length)
        return other

    def copy(self) -> TokenSequence:
        """An independent copy."""
        other = TokenSequence(self.tokens, self.limit)
        other.start, other.finish_reason = self.start, self.finish_reason
        other._seen = None if self._seen is None else self._seen.copy()
        other._ngrams = None if self._ngrams is None else self._ngrams.copy()
        return other

    def with_token(self, token: int) -> TokenSequence:
        """A copy with one more token."""
        other = TokenSequence(self.tokens, self.limit)
        other.start = self.start
        other.push(token)
        return other

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the newest tokens are these."""
        count = len(tokens)
        return count == 0 or (count <= len(self) and list(self.tokens[-count:]) == list(tokens))

    def seen(self, vocab_size: int, device: torch.device) -> Tensor:
        """(V,) bool on ``device``: which ids it holds; kept up to date from the first call on."""
        if self._seen is None or self._seen.mask.device != device:
            self._seen = _Seen(self.tokens, vocab_size, device)
        return self._seen.mask

    def repeats(self, size: int) -> Sequence[int]:
        """The ids that would repeat an n-gram of ``size`` tokens."""
        if self._ngrams is None or self._ngrams.size != size:
            self._ngrams = _NGrams(self.tokens, size)
        return self._ngrams.next_of(self.tokens)


class _Seen:
    """A mask of the ids in a row, and how often each occurs."""

    def __init__(self, tokens: Iterable[int], vocab_size: int, device: torch.device) -> None:
        self.counts = Counter(tokens)
        self.mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if self.counts:
            self.mask[torch.tensor(list(self.counts), device=device)] = True

    def copy(self) -> _Seen:
        other = _Seen((), len(self.mask), self.mask.device)
        other.counts, other.mask = self.counts.copy(), self.mask.clone()
        return other

    def push(self, token: int) -> None:
        self.counts[token] += 1
        if self.counts[token] == 1:
            self.mask[token] = True

    def pop(self, token: int) -> None:
        self.counts[token] -= 1
        if not self.counts[token]:
            self.mask[token] = False


class _NGrams:
    """For every (size - 1)-gram in a row, the tokens that followed it."""

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        self.size = size
        self.followers: dict[tuple[int, ...], list[int]] = {}
        for end in range(size, len(tokens) + 1):
            self._add(tokens[end - size : end])

    def copy(self) -> _NGrams:
        other = _NGrams((), self.size)
        other.followers = {run: list(tokens) for run, tokens in self.followers.items()}
        return other

    def _add(self, run: Sequence[int]) -> None:
        self.followers.setdefault(tuple(run[:-1]), []).append(run[-1])

    def push(self, tokens: Sequence[int]) -> None:
        if len(tokens) >= self.size:
            self._add(tokens[-self.size :])

    def pop(self, tokens: Sequence[int]) -> None:
        """``tokens`` still end with the token to remove."""
        if len(tokens) >= self.size:
            self.followers[tuple(tokens[-self.size : -1])].pop()

    def next_of(self, tokens: Sequence[int]) -> Sequence[int]:
        kept = self.size - 1
        if len(tokens) < kept:
            return ()
        return self.followers.get(tuple(tokens[len(tokens) - kept :]), ())


#: Prompts as callers give them; text needs a tokenizer.
TokenIds = (
    Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]
    | str | Sequence[str]
)  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """B non-empty rows of token ids.

    Attributes:
        rows: the tokens of each row, without padding.
        width: columns of the caller's input, padding included.
    """

    rows: list[list[int]]
    width: int

    @property
    def lens(self) -> list[int]:
        """Tokens of each row, without padding."""
        return [len(row) for row in self.rows]

    def padded_front(self, fill: int, device: torch.device) -> Tensor:
        """(B, width) int64, left-padded: the input part of what is returned."""
        return torch.tensor(
            [[fill] * (self.width - len(row)) + row for row in self.rows], device=device
        )


def read_prompts(
    input_ids: TokenIds,
    attention_mask: Tensor | Sequence[Sequence[int]] | None,
    pad_token_id: int | None,
    vocab_size: int,
) -> Prompts:
    """Reads token ids with or without an attention mask.

    Args:
        input_ids: (B, T) or (T,) integer tensor or array, a list of ids, ragged lists, or the output of a transformers
            tokenizer (ids and mask).
        attention_mask: (B, T), 1 for real tokens, which must be contiguous in each row.
        pad_token_id: without a mask, in a tensor of two rows or more, leading and trailing ids equal to it are
            padding. In lists all ids are real.
        vocab_size: ids must be below it.

    Raises:
        TypeError, ValueError: wrong types, empty rows, ids outside the vocabulary, invalid masks.
    """
    if isinstance(input_ids, Mapping) and "input_ids" in input_ids:
        if attention_mask is None:
            attention_mask = input_ids.get("attention_mask")
        input_ids = input_ids["input_ids"]
    if isinstance(input_ids, np.ndarray):
        input_ids = torch.from_numpy(input_ids)
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
            f"input_ids is a {type(input_ids).__name__}; a tensor, lists of token ids, what a tokenizer returns, or "
            "text with Generator(tokenizer=...) is needed"
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
    flags = torch.as_tensor(attention_mask, device="cpu")
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
