"""Prompt-lookup decoding: the draft is what followed the latest earlier occurrence of a row's last n-gram.

Needs no model; suits answers that quote their prompt, repetitive code and lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from caramba_fast.infer.drafts import Drafted
from caramba_fast.infer.sequence import TokenSequence


class NGramIndex:
    """Maps each n-gram of a row, of ``shortest`` to ``longest`` tokens, to the position after its latest occurrence."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._behind: dict[tuple[int, ...], int] = {}
        self.read = 0  #: Tokens indexed.
        self._last = -1

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest n-gram at the end of the row."""
        self._catch_up(tokens)
        for size in self.sizes:
            if size <= len(tokens):
                start = self._behind.get(tuple(tokens[len(tokens) - size :]))
                if start is not None:
                    return self._follow(tokens, start, count)
        return []

    def _follow(self, tokens: Sequence[int], start: int, count: int) -> list[int]:
        """``count`` tokens from ``start`` on; past the end of the row they repeat."""
        period = len(tokens) - start
        return [tokens[start + index % period] for index in range(count)]

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Indexes new tokens; starts over if the row has lost tokens or is another one."""
        length = len(tokens)
        if length < self.read or (self.read and tokens[self.read - 1] != self._last):
            self._behind.clear()
            self.read = 0
        for place in range(max(self.read, 1), length):
            for size in self.sizes:
                if size <= place:
                    self._behind[tuple(tokens[place - size : place])] = place
        self.read, self._last = length, tokens[-1] if length else -1


class LookupDraft:
    """Drafts for each row by prompt lookup, with n-grams of ``shortest`` to ``longest`` tokens."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = longest, shortest
        self._rows: list[NGramIndex] = []

    def feed(self, rows: Sequence[TokenSequence]) -> None:
        """Starts over if the number of rows has changed."""
        if len(self._rows) != len(rows):
            self._rows = [NGramIndex(*self._sizes) for _ in rows]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row b is now what row ``rows[b]`` was."""
        self._rows = [NGramIndex(*self._sizes) for _ in rows]

    def propose(
        self,
        rows: Sequence[TokenSequence],
        counts: Sequence[int],
    ) -> Drafted:
        """Up to ``counts[b]`` tokens for row b, each drafted with probability 1."""
        found = [
            index.draft(row.tokens, count) if count else []
            for index, row, count in zip(self._rows, rows, counts, strict=True)
        ]
        return Drafted(found, None)

    def follow(self, rows: Sequence[TokenSequence], agreed: Sequence[int]) -> None:
        """Drops the index of rows that have lost tokens; after `load` or `prefill` rows may be new."""
        self.feed(rows)
        self._rows = [
            NGramIndex(*self._sizes) if index.read > length else index
            for index, length in zip(self._rows, agreed, strict=True)
        ]

    def reset(self) -> None:
        """Forgets every row."""
        self._rows = []

    def snapshot(self, *, tails: bool = False) -> int:  # noqa: ARG002 - it has none
        """State for `restore`: the number of rows."""
        return len(self._rows)

    def restore(self, before: int) -> None:
        """Restores a snapshot; rows are indexed again, since an interrupt may have left an index incomplete."""
        self._rows = [NGramIndex(*self._sizes) for _ in range(before)]
