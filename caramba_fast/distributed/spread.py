"""PageSpread: which rank holds which page of a row, known to every rank without asking.

Page ``p`` of a row holds tokens ``p * page_size`` and on. Pages go round the ranks in turn; a rank that has no room
left is passed over. Where a page goes depends on its number alone, never on the row or on what was removed before,
so that every rank finds the same answer on its own, and so that a rank's n-th page is always the same page of the
row: the phases that centered keys are stored with can follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
#: Pages are made of whole tiles of 32 tokens.
PAGE_MULTIPLE = 32
PAGE_SIZE = 128


class PageSpread:
    """Pages of rows of up to ``max_seq_len`` tokens over ``world_size`` ranks.

    Args:
        max_seq_len: tokens a row can hold over all ranks.
        world_size: ranks.
        page_size: tokens of a page, a multiple of 32.
        rank_tokens: most tokens of a row that each rank holds, in whole pages; by default the ranks share
            ``max_seq_len`` evenly.

    Attributes:
        owners: (pages,) int64, the rank of each page of a row.

    Raises:
        ValueError: a size that is not positive or does not fit, or room for less than ``max_seq_len``.
    """

    def __init__(
        self,
        max_seq_len: int,
        world_size: int,
        page_size: int = PAGE_SIZE,
        rank_tokens: Sequence[int] | None = None,
    ) -> None:
        check_page_size(page_size)
        if max_seq_len < 1 or world_size < 1:
            raise ValueError(
                f"max_seq_len is {max_seq_len} and world_size is {world_size}; 1 or more is needed"
            )
        self.max_seq_len, self.world_size, self.page_size = max_seq_len, world_size, page_size
        pages = -(-max_seq_len // page_size)
        self.owners = _in_turn(pages, self._room(pages, rank_tokens))
        held = self.owners[:, None] == np.arange(world_size)
        self._before = np.vstack((np.zeros((1, world_size), np.int64), held.cumsum(0)))
        self._held = np.vstack((held, np.zeros((1, world_size), bool)))  # no page behind the last

    def _room(self, pages: int, rank_tokens: Sequence[int] | None) -> list[int]:
        """Pages of a row that each rank has room for."""
        if rank_tokens is None:
            return [pages] * self.world_size
        check_rank_tokens(rank_tokens, self.world_size)
        room = [tokens // self.page_size for tokens in rank_tokens]
        if sum(room) < pages:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}, {pages} pages of {self.page_size} tokens; the ranks have "
                f"room for {sum(room)} ({list(rank_tokens)} tokens)"
            )
        return room

    @property
    def first_rank(self) -> int:
        """The rank that holds the first page of every row."""
        return int(self.owners[0])

    def pages_of(self, rank: int) -> Counts:
        """Pages of a row that ``rank`` holds, in order."""
        return np.flatnonzero(self.owners == rank)

    def tokens_of(self, rank: int) -> int:
        """Most tokens of a row that ``rank`` holds."""
        return len(self.pages_of(rank)) * self.page_size

    def held(self, rank: int, position: Counts) -> Flags:
        """Whether ``rank`` holds the tokens at ``position`` (any shape), 0 to the end of the last page."""
        return self._held[position // self.page_size, rank]

    def count(self, rank: int, tokens: Counts) -> Counts:
        """How many of the first ``tokens`` (any shape) of a row ``rank`` holds; none of a negative number."""
        tokens = np.clip(tokens, 0, self.max_seq_len)
        page, rest = np.divmod(tokens, self.page_size)
        whole = self._before[page, rank] * self.page_size
        return whole + np.where(self._held[page, rank], rest, 0)

    def positions_of(self, rank: int, start: int, stop: int) -> Counts:
        """Which of the positions ``start`` to ``stop`` of a row ``rank`` holds."""
        position = np.arange(start, stop)
        return position[self.held(rank, position)]


def check_page_size(page_size: int) -> None:
    """Raises ValueError unless pages of this size can be read."""
    if type(page_size) is not int or page_size < 1 or page_size % PAGE_MULTIPLE:
        raise ValueError(f"page_size is {page_size!r}; a multiple of {PAGE_MULTIPLE} is needed")


def check_rank_tokens(rank_tokens: Sequence[int], world_size: int) -> None:
    """Raises ValueError unless there is a count for each rank."""
    if len(rank_tokens) != world_size or min(rank_tokens) < 0:
        raise ValueError(
            f"rank_tokens is {list(rank_tokens)}; one count of 0 or more for each of {world_size} ranks is needed"
        )


def _in_turn(pages: int, room: list[int]) -> Counts:
    """The owner of each page: ranks in turn, those that are full left out."""
    left, owners = list(room), np.empty(pages, np.int64)
    rank = 0
    for page in range(pages):
        while not left[rank % len(left)]:
            rank += 1
        owners[page] = rank % len(left)
        left[owners[page]] -= 1
        rank = int(owners[page]) + 1
    return owners
