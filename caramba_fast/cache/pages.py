"""Pages (blocks): fixed-size units of a pool that rows allocate as they grow, share, and free.

Pages are reference-counted. A shared page is copied before a row writes to it (copy-on-write).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than an append needs; nothing was written."""


class PageAllocator:
    """A pool of ``num_pages`` pages with reference counts."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; 1 or more is needed")
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """Allocates a page with one reference; raises OutOfPagesError if none is free."""
        if not self._free:
            raise OutOfPagesError(f"all {len(self.references)} pages are in use")
        page = self._free.pop()
        self.references[page] = 1
        return page

    def share(self, page: int) -> int:
        """Adds a reference to a page in use; returns the page."""
        self._check_held(page, "shared")
        self.references[page] += 1
        return page

    def release(self, page: int) -> None:
        """Drops a reference; the last one frees the page."""
        self._check_held(page, "released")
        self.references[page] -= 1
        if not self.references[page]:
            self._free.append(page)

    def _check_held(self, page: int, verb: str) -> None:
        if not 0 <= page < len(self.references):
            raise ValueError(
                f"page {page} does not exist; 0 to {len(self.references) - 1} is allowed"
            )
        if self.references[page] < 1:
            raise ValueError(f"page {page} is free and cannot be {verb}")


class PageTable:
    """The block table: pages of each row, on the host and as the (B, pages) int32 tensor that kernels read.

    A row has at most ``pages_per_row`` pages of ``page_size`` tokens; the tensor holds -1 where it has none.
    """

    def __init__(
        self,
        batch_size: int,
        pages_per_row: int,
        page_size: int,
        allocator: PageAllocator,
        device: torch.device,
    ) -> None:
        self.page_size, self.allocator = page_size, allocator
        self.rows: list[list[int]] = [[] for _ in range(batch_size)]
        self._width = pages_per_row
        self.tensor = torch.full((batch_size, pages_per_row), -1, dtype=torch.int32, device=device)

    def reserve(self, held: Sequence[int], added: Sequence[int]) -> list[tuple[int, int]]:
        """Makes room for ``added[b]`` tokens after the ``held[b]`` of each row.

        Returns (from, to) pages to copy before writing, because they were shared. Raises OutOfPagesError, changing
        nothing, if too few pages are free.
        """
        growing = [row for row, count in enumerate(added) if count]
        new = {
            row: -(-(held[row] + added[row]) // self.page_size) - len(self.rows[row])
            for row in growing
        }
        split = [row for row in growing if held[row] % self.page_size]
        place = {
            row: held[row] // self.page_size for row in split
        }  # of the page that is written to
        writers = Counter(self.rows[row][place[row]] for row in split)
        copies = sum(
            count - (self.allocator.references[page] == count) for page, count in writers.items()
        )
        needed = copies + sum(max(count, 0) for count in new.values())
        if needed > self.allocator.free:
            raise OutOfPagesError(
                f"{needed} pages are needed and {self.allocator.free} of "
                f"{len(self.allocator.references)} are free"
            )
        moved = []
        for row in split:
            old = self.rows[row][place[row]]
            if self.allocator.references[old] > 1:
                self.rows[row][place[row]] = self.allocator.take()
                self.allocator.release(old)
                moved.append((old, self.rows[row][place[row]]))
        for row, count in new.items():
            self.rows[row] += [self.allocator.take() for _ in range(count)]
        if moved or any(count > 0 for count in new.values()):
            self._publish()
        return moved

    def take_back(self, moved: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Undoes a `reserve` that returned ``moved``, for rows that hold ``lengths``, if the copies failed."""
        shared = {copy: old for old, copy in moved}
        for row in self.rows:
            for place, page in enumerate(row):
                if page in shared:
                    row[place] = self.allocator.share(shared[page])
                    self.allocator.release(page)
        self.shrink(lengths)
        self._publish()

    def shrink(self, lengths: Sequence[int]) -> None:
        """Frees the pages past each row's length."""
        changed = False
        for row, length in enumerate(lengths):
            keep = -(-length // self.page_size)
            for page in self.rows[row][keep:]:
                self.allocator.release(page)
                changed = True
            del self.rows[row][keep:]
        if changed:
            self._publish()

    def reorder(self, order: Sequence[int]) -> None:
        """Row b gets the pages of row ``order[b]``, shared, not copied."""
        rows = [[self.allocator.share(page) for page in self.rows[row]] for row in order]
        for row in self.rows:
            for page in row:
                self.allocator.release(page)
        self.rows = rows
        self._publish()

    def select_rows(self, rows: Sequence[int]) -> PageTable:
        """A table over the same pool whose row b shares the pages of row ``rows[b]``."""
        other = PageTable(
            len(rows), self._width, self.page_size, self.allocator, self.tensor.device
        )
        other.rows = [[self.allocator.share(page) for page in self.rows[row]] for row in rows]
        other._publish()
        return other

    def _publish(self) -> None:
        padded = [row + [-1] * (self._width - len(row)) for row in self.rows]
        host = torch.tensor(padded, dtype=torch.int32, device="cpu")
        self.tensor.copy_(host, non_blocking=True)

    def columns(self, longest: int) -> Tensor:
        """The part of the tensor that covers ``longest`` tokens."""
        return self.tensor[:, : max(1, -(-longest // self.page_size))]
