"""BlockManager: allocates, shares, copies, swaps and frees the pages of sequences.

Bytes are moved first and recorded afterwards, so that a move that fails leaves the bookkeeping as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from caramba_fast.cache import OutOfPagesError, PagePool
from caramba_fast.serve.block_pool import Content, KeptSinks, SharedPages, content_of
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.prefix_store import PrefixStore, bring_back, put_away
from caramba_fast.serve.request import PagedSequence, SwappedOut


class StorageError(RuntimeError):
    """Bytes of a sequence's pages could not be moved; the bookkeeping is as it was before."""

    def __init__(self, sequence: PagedSequence, cause: Exception) -> None:
        super().__init__(f"pages could not be moved: {type(cause).__name__}: {cause}")
        self.sequence, self.cause = sequence, cause


@contextmanager
def _moving(sequence: PagedSequence) -> Iterator[None]:
    """Turns an error while moving bytes of a sequence into a `StorageError`."""
    try:
        yield
    except Exception as error:
        raise StorageError(sequence, error) from error


class BlockManager:
    """The pages of all sequences in a pool."""

    def __init__(self, settings: EngineConfig, pool: PagePool, counters: Counters) -> None:
        self.settings, self.pool, self.counters = settings, pool, counters
        self.pages = SharedPages(pool.num_pages, pool.page_size, settings.prefix_caching)
        self.free_rings = self._all_rings
        self._sinks = KeptSinks(range(pool.rings, pool.sink_rows), self.pages)
        self.swapped_bytes = 0
        #: The prefix store on disk, if there is one.
        self.store: PrefixStore | None = None

    @property
    def _all_rings(self) -> list[int]:
        return list(range(self.pool.rings if self.pool.has_rings else 0))

    def _take_ring(self, sequence: PagedSequence) -> None:
        """Gives a sequence that begins to run an fp16 ring, if the storage has rings: there is one for each.

        The lowest, since neighbours need no copies. One that became free in this step only if there is no other: if the
        step is interrupted, its answer goes on with it.
        """
        if self.pool.has_rings and sequence.ring < 0:
            sequence.ring = self.free_rings.pop(0)

    def begin_step(self) -> None:
        """Puts free rings in order; those that become free in the step are last."""
        self.free_rings.sort()

    def most(self, sequence: PagedSequence, count: int) -> int:
        """How many of ``count`` tokens a sequence may be fed at once.

        Tokens of an incomplete group are only in the sequence's fp16 ring, which has room for one group. An
        interrupted step is repeated and a draft may be rejected, so neither may overwrite the tokens it started from:
        from within a group, at most the rest of that group is fed. A chunk of a prompt ends with a group if it can.
        """
        group = self.pool.group
        begun = sequence.cached % group
        if begun:
            return min(count, group - begun)
        whole = count - count % group
        return whole if whole and count < sequence.pending else count

    @property
    def places(self) -> int:
        """How many sequences may run at once."""
        return self.pool.places(self.settings.max_batch_size)

    def take_up(self, sequence: PagedSequence) -> int:
        """Gives a starting sequence the cached pages of its prefix; returns how many pages the rest needs.

        The last token is always processed again, since its logits are needed.
        """
        tokens, size = sequence.tokens, self.pages.page_size
        if sequence.epoch != self.pages.epoch:
            sequence.epoch, sequence.contents = self.pages.epoch, []
        hit = self.pages.find(self.contents(sequence)) if self.pages.keeps else []
        sinks = self._sinks.find(self.pages.content(hit[0])) if hit else None
        hit = [] if hit and sinks is None and self.pool.sink_len else hit
        self.pages.hold(hit)
        sequence.pages = hit
        if self.store is not None:
            brought = self._bring_back(self.store, sequence)
            sinks = brought if sinks is None else sinks
        cached = min(len(hit) * size, len(tokens) - 1)
        # With quantization by channel the cached tokens must be whole groups: no ring has the rest.
        sequence.cached = cached - cached % self.pool.group
        self._take_ring(sequence)
        if sinks is not None:
            with _moving(sequence):
                self.pool.copy_sinks(sinks, sequence.ring)
        needed = self.missing(sequence, sequence.pending)
        if needed > self.pages.available and self.fixed(sequence) is not None:
            # Recompute the tokens of the last page rather than copy it to write one token.
            self.pages.release(sequence.pages.pop())
            sequence.cached = len(sequence.pages) * size
            needed = self.missing(sequence, sequence.pending)
        return needed

    def _bring_back(self, store: PrefixStore, sequence: PagedSequence) -> int | None:
        """Adds pages from disk to those found in memory; returns where their sinks are kept, if the first is one."""
        before, contents = len(sequence.pages), self.contents(sequence)
        with _moving(sequence):
            sinks = bring_back(store, self.pages, sequence, contents, self._sinks.keep)
        brought = len(sequence.pages) - before
        self.counters.prefix_store_tokens += brought * self.pages.page_size
        return sinks

    def fork(self, sequence: PagedSequence, other: PagedSequence) -> None:
        """``other`` continues from the pages of ``sequence``, which both then hold."""
        self.pages.hold(sequence.pages)
        other.pages, other.cached, other.keys = (
            list(sequence.pages),
            sequence.cached,
            list(sequence.keys),
        )
        other.epoch = sequence.epoch
        self._take_ring(other)
        if other.ring >= 0:
            self.pool.copy_ring(sequence.ring, other.ring)

    def swap_in(self, sequence: PagedSequence, count: int, spare: int) -> bool:
        """Swaps pages in, with room for ``count`` more tokens; False unless ``spare`` pages are left then.

        Raises StorageError if the bytes could not be moved.
        """
        assert sequence.swapped is not None
        held = -(-sequence.cached // self.pages.page_size)
        more = -(-(sequence.cached + count) // self.pages.page_size) - held
        if held + more + spare > self.pages.available:
            return False
        pages = self.pages.take_many(held)
        self._take_ring(sequence)
        try:
            self.pool.write(pages, sequence.swapped.pages)
            if sequence.ring >= 0:
                self.pool.write_ring(sequence.ring, sequence.swapped.ring)
        except Exception as error:
            self.pages.release_all(pages)
            self._release_ring(sequence)
            raise StorageError(sequence, error) from error
        sequence.pages = pages
        self.drop_swapped(sequence)
        self.learn(sequence)
        return self.reserve(sequence, count)

    def give_back(self, sequence: PagedSequence) -> None:
        """Takes its pages back; they are swapped to host memory, or their tokens are recomputed later.

        Raises StorageError if the bytes could not be moved.
        """
        swapped, cached = self.swapped_out(sequence), sequence.cached
        self.release(sequence)
        sequence.swapped, sequence.cached = swapped, cached if swapped is not None else 0

    def _release_ring(self, sequence: PagedSequence) -> None:
        if sequence.ring >= 0:
            self.free_rings.append(sequence.ring)
            sequence.ring = -1

    def _swap_size(self, sequence: PagedSequence) -> int:
        """Bytes of a sequence's pages and ring."""
        held = -(-sequence.cached // self.pages.page_size)
        return held * self.pool.page_bytes + self.pool.ring_bytes

    def swapped_out(self, sequence: PagedSequence) -> SwappedOut | None:
        """Copies its pages to host memory, if they are to be swapped and there is room."""
        held = -(-sequence.cached // self.pages.page_size)
        size = self._swap_size(sequence)
        if self.settings.preemption != "swap" or not held:
            return None
        if self.swapped_bytes + size > self.settings.swap_bytes:
            return None
        with _moving(sequence):
            ring = self.pool.read_ring(sequence.ring) if sequence.ring >= 0 else []
            found = SwappedOut(self.pool.read(sequence.pages[:held]), ring)
        self.swapped_bytes += size
        self.counters.swaps += 1
        return found

    def drop_swapped(self, sequence: PagedSequence) -> None:
        """Drops what it has in host memory."""
        if sequence.swapped is not None:
            self.swapped_bytes -= self._swap_size(sequence)
            sequence.swapped = None

    def ended(self, sequence: PagedSequence) -> None:
        """Stores its full pages on disk, and forgets the content of pages that no other request may find."""
        if self.store is not None:
            put_away(self.store, self.pages, sequence)
        if sequence.request.is_private:
            for page in sequence.pages:
                if self.pages.references[page] == 1:
                    self.pages.forget(page)

    def release(self, sequence: PagedSequence) -> None:
        """Frees its pages and its ring."""
        self.pages.release_all(sequence.pages)
        self._release_ring(sequence)
        sequence.pages, sequence.keys, sequence.cached = [], [], 0

    def missing(self, sequence: PagedSequence, count: int) -> int:
        """Pages that ``count`` more tokens need, with the copy of one it must not write to."""
        size = self.pages.page_size
        more = max(0, -(-(sequence.cached + count) // size) - len(sequence.pages))
        return more + (self.fixed(sequence) is not None)

    def fixed(self, sequence: PagedSequence) -> int | None:
        """Index of the page its next token goes into, if it must not write to that page."""
        place = sequence.cached // self.pages.page_size
        if place < len(sequence.pages) and self.pages.is_fixed(sequence.pages[place]):
            return place
        return None

    def reserve(self, sequence: PagedSequence, count: int) -> bool:
        """Makes room for ``count`` more tokens; False, and nothing has changed, if there is none."""
        try:
            taken = self.pages.take_many(self.missing(sequence, count))
        except OutOfPagesError:
            return False
        place = self.fixed(sequence)
        if place is not None:
            old, copy = sequence.pages[place], taken.pop()
            try:
                self.pool.copy([(old, copy)])
            except Exception as error:
                self.pages.release_all([copy, *taken])
                raise StorageError(sequence, error) from error
            sequence.pages[place] = copy
            self.pages.release(old)
        sequence.pages += taken
        return True

    def contents(self, sequence: PagedSequence) -> list[Content]:
        """Content of the full pages of its tokens, computed once."""
        pages, size, tokens = self.pages, self.pages.page_size, sequence.tokens
        scope = pages.scope_of(sequence.request.scope, sequence.epoch)
        for place in range(len(sequence.contents), len(tokens) // size):
            parent = sequence.contents[-1] if place else None
            part = tokens[place * size : (place + 1) * size]
            sequence.contents.append(content_of(scope, parent, part))
        return sequence.contents

    def mark_cached(self, sequence: PagedSequence, cached: int) -> None:
        """Records that ``cached`` of its tokens are cached for good."""
        sequence.cached = cached
        self.learn(sequence)

    def learn(self, sequence: PagedSequence) -> None:
        """Records the content of its new full pages."""
        pages, size, tokens = self.pages, self.pages.page_size, sequence.tokens
        scope = pages.scope_of(sequence.request.scope, sequence.epoch)
        while (len(sequence.keys) + 1) * size <= sequence.cached:
            place = len(sequence.keys)
            parent = sequence.keys[-1] if place else None
            part = tokens[place * size : (place + 1) * size]
            page = sequence.pages[place]
            sequence.keys.append(pages.learn(page, content_of(scope, parent, part)))
            if parent is None and pages.find(sequence.keys):
                self._learn_sinks(sequence)

    def _learn_sinks(self, sequence: PagedSequence) -> None:
        """Keeps the sinks of its first page for other sequences."""
        content, ring = sequence.keys[0], sequence.ring
        if not self.pool.sink_len or content in self._sinks:
            return
        # A private request must not evict sinks that others may find.
        if self._sinks.have_room() or not sequence.request.is_private:
            with _moving(sequence):
                self._sinks.keep(content, lambda place: self.pool.copy_sinks(ring, place))

    def rebuild(self, sequences: Sequence[PagedSequence]) -> None:
        """Recomputes held pages, rings and swapped bytes after an interrupt, from all sequences."""
        self.pages.rebuild((sequence.pages, len(sequence.keys)) for sequence in sequences)
        held = {sequence.ring for sequence in sequences}
        self.free_rings = [ring for ring in self._all_rings if ring not in held]
        self._sinks.rebuild()
        self.swapped_bytes = self._swapped(sequences)

    def _swapped(self, sequences: Iterable[PagedSequence]) -> int:
        return sum(self._swap_size(a) for a in sequences if a.swapped is not None)

    def problems(
        self, running: Iterable[PagedSequence], waiting: Iterable[PagedSequence]
    ) -> list[str]:
        """Inconsistencies of the pages; empty unless there is a bug."""
        running, waiting = list(running), list(waiting)
        found = self.pages.problems(sequence.pages for sequence in [*running, *waiting])
        size = self.pages.page_size
        for sequence in running:
            if sequence.cached > len(sequence.pages) * size:
                found.append(
                    f"{sequence.request.request_id} has more tokens cached than pages for them"
                )
        rings = [sequence.ring for sequence in [*running, *waiting] if sequence.ring >= 0]
        wanted = len(running) if self.pool.has_rings else 0
        if len(rings) != wanted or sorted([*rings, *self.free_rings]) != self._all_rings:
            found.append(
                f"rings {rings} are held and {self.free_rings} are free; {wanted} are needed"
            )
        swapped = self._swapped(waiting)
        if swapped != self.swapped_bytes:
            found.append(f"{self.swapped_bytes} bytes are counted as swapped; {swapped} are")
        return found
