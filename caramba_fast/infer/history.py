"""The tokens of a row, with what edits of the logits have to know of them kept up to date.

Tokens are pushed and popped one by one, so that a speculative draft can be walked through and taken back,
and no step costs more than the tokens it adds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class TokenHistory:
    """A growing row of token ids.

    Args:
        tokens: what it holds at first.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("q", tokens)
        self._seen: _Seen | None = None
        self._ngrams: _NGrams | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def push(self, token: int) -> None:
        """Adds a token."""
        self.tokens.append(token)
        if self._seen is not None:
            self._seen.push(token)
        if self._ngrams is not None:
            self._ngrams.push(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds several."""
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
        """Keeps the first ``length`` tokens, even where a push or a pop was interrupted half way.

        What is kept of the tokens beside them is made anew when it is asked for.
        """
        self._seen = self._ngrams = None
        del self.tokens[length:]

    def copy(self) -> TokenHistory:
        """One that grows apart from this."""
        other = TokenHistory(self.tokens)
        other._seen = None if self._seen is None else self._seen.copy()
        other._ngrams = None if self._ngrams is None else self._ngrams.copy()
        return other

    def with_token(self, token: int) -> TokenHistory:
        """The tokens of this and one more."""
        other = TokenHistory(self.tokens)
        other.push(token)
        return other

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the newest tokens are these."""
        count = len(tokens)
        return count == 0 or (count <= len(self) and list(self.tokens[-count:]) == list(tokens))

    def seen(self, vocab_size: int, device: torch.device) -> Tensor:
        """(V,) bool on ``device``: which ids it holds. Kept up to date from the first call on."""
        if self._seen is None or self._seen.mask.device != device:
            self._seen = _Seen(self.tokens, vocab_size, device)
        return self._seen.mask

    def repeats(self, size: int) -> Sequence[int]:
        """The ids that would complete a run of ``size`` tokens that it holds already."""
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
    """For every run of size - 1 tokens in a row, the tokens that followed it."""

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
        """``tokens`` still end with the token that goes."""
        if len(tokens) >= self.size:
            self.followers[tuple(tokens[-self.size : -1])].pop()

    def next_of(self, tokens: Sequence[int]) -> Sequence[int]:
        kept = self.size - 1
        if len(tokens) < kept:
            return ()
        return self.followers.get(tuple(tokens[len(tokens) - kept :]), ())
