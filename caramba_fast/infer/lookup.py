"""Prompt lookup: drafts from what followed the newest tokens where they occurred last (prompt-lookup decoding).

No model is needed: answers that quote their prompt, code that repeats itself and lists are drafted from the row itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from caramba_fast.infer.drafts import Drafted
from caramba_fast.infer.sequence import TokenSequence


class NGramIndex:
    """For runs of a row's tokens, where the token behind their latest occurrence stands.

    Args:
        longest, shortest: sizes of the runs.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._behind: dict[tuple[int, ...], int] = {}
        self.read = 0  #: Tokens of the row it knows.
        self._last = -1

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the newest ones, the longest run first."""
        self._catch_up(tokens)
        for size in self.sizes:
            if size <= len(tokens):
                start = self._behind.get(tuple(tokens[len(tokens) - size :]))
                if start is not None:
                    return self._follow(tokens, start, count)
        return []

    def _follow(self, tokens: Sequence[int], start: int, count: int) -> list[int]:
        """The tokens from ``start`` on; what would lie behind the row repeats its end."""
        period = len(tokens) - start
        return [tokens[start + index % period] for index in range(count)]

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Notes what came since; a row that has lost tokens or is another one is read anew."""
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
    """Drafts for every row from the row itself.

    Args:
        longest, shortest: sizes of the runs that are looked up.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = longest, shortest
        self._rows: list[NGramIndex] = []

    def feed(self, rows: Sequence[TokenSequence]) -> None:
        """Prompts have arrived."""
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
        """Up to ``counts[b]`` tokens behind row b; each was certain when it was drafted."""
        found = [
            index.draft(row.tokens, count) if count else []
            for index, row, count in zip(self._rows, rows, counts, strict=True)
        ]
        return Drafted(found, None)

    def follow(self, rows: Sequence[TokenSequence], agreed: Sequence[int]) -> None:
        """Keeps nothing of a draft; reads a row that has lost tokens again.

        Feeds the rows first: after `load` or `prefill` nothing was drafted yet.
        """
        self.feed(rows)
        self._rows = [
            NGramIndex(*self._sizes) if index.read > length else index
            for index, length in zip(self._rows, agreed, strict=True)
        ]

    def reset(self) -> None:
        """Forgets every row."""
        self._rows = []

    def snapshot(self, *, tails: bool = False) -> int:  # noqa: ARG002 - it has none
        """What `restore` goes back to: the number of rows."""
        return len(self._rows)

    def restore(self, before: int) -> None:
        """Goes back to a snapshot; rows are read anew, since reading may have been interrupted half way."""
        self._rows = [NGramIndex(*self._sizes) for _ in range(before)]
