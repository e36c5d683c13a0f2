"""Holdings: which pages an answer holds, copies, swaps and gives back, and what is known of them.

Bytes are moved first and noted afterwards, so that a move that fails leaves the books as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from caramba_fast.cache import OutOfPagesError, PageBytes, PagePool
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.pages import Content, SharedPages, content_of
from caramba_fast.serve.request import Answer
from caramba_fast.serve.settings import EngineConfig


class StorageError(RuntimeError):
    """Bytes of an answer's pages could not be moved; the bookkeeping is as it was before.

    Attributes:
        answer: whose.
        cause: why.
    """

    def __init__(self, answer: Answer, cause: Exception) -> None:
        super().__init__(f"pages could not be moved: {type(cause).__name__}: {cause}")
        self.answer, self.cause = answer, cause


class Holdings:
    """The pages of all answers.

    Args:
        settings: limits and policies.
        pool: where the bytes are.
        counters: what is counted.
    """

    def __init__(self, settings: EngineConfig, pool: PagePool, counters: Counters) -> None:
        self.settings, self.pool, self.counters = settings, pool, counters
        self.pages = SharedPages(pool.num_pages, pool.page_size, settings.prefix_caching)
        self.swapped_bytes = 0

    def take_up(self, answer: Answer) -> int:
        """Gives an answer that begins the pages in which others have its first tokens; pages the rest needs.

        The last token is read again in any case: what follows it is wanted.
        """
        tokens, size = answer.history.tokens, self.pages.page_size
        if answer.epoch != self.pages.epoch:
            answer.epoch, answer.contents = self.pages.epoch, []
        hit = self.pages.find(self.contents(answer)) if self.pages.keeps else []
        self.pages.hold(hit)
        answer.pages, answer.cached = hit, min(len(hit) * size, len(tokens) - 1)
        needed = self.missing(answer, answer.pending)
        if needed > self.pages.available and self.fixed(answer) is not None:
            # Rather than copy the last page to write one token into it, read its tokens again.
            self.pages.release(answer.pages.pop())
            answer.cached = len(answer.pages) * size
            needed = self.missing(answer, answer.pending)
        return needed

    def fork(self, answer: Answer, other: Answer) -> None:
        """``other`` goes on from what ``answer`` has in its pages, which both hold then."""
        self.pages.hold(answer.pages)
        other.pages, other.cached, other.keys = list(answer.pages), answer.cached, list(answer.keys)
        other.epoch = answer.epoch

    def swap_in(self, answer: Answer, count: int, spare: int) -> bool:
        """Brings its pages back, with room for ``count`` more tokens, if ``spare`` pages are left then.

        Raises:
            StorageError: the bytes could not be moved.
        """
        assert answer.swapped is not None
        held = -(-answer.cached // self.pages.page_size)
        more = -(-(answer.cached + count) // self.pages.page_size) - held
        if held + more + spare > self.pages.available:
            return False
        pages = self.pages.take_many(held)
        try:
            self.pool.write(pages, answer.swapped)
        except Exception as error:
            self.pages.release_all(pages)
            raise StorageError(answer, error) from error
        answer.pages = pages
        self.drop_swapped(answer)
        self.learn(answer)
        return self.reserve(answer, count)

    def give_back(self, answer: Answer) -> None:
        """Takes its pages; what was in them is in host memory, or will be worked out again.

        Raises:
            StorageError: the bytes could not be moved.
        """
        swapped, cached = self.swapped_out(answer), answer.cached
        self.release(answer)
        answer.swapped, answer.cached = swapped, cached if swapped is not None else 0

    def swapped_out(self, answer: Answer) -> PageBytes | None:
        """What its pages hold, if that is to go to host memory and there is room; it is counted."""
        held = -(-answer.cached // self.pages.page_size)
        size = held * self.pool.page_bytes
        if self.settings.preemption != "swap" or not held:
            return None
        if self.swapped_bytes + size > self.settings.swap_bytes:
            return None
        try:
            found = self.pool.read(answer.pages[:held])
        except Exception as error:
            raise StorageError(answer, error) from error
        self.swapped_bytes += size
        self.counters.swaps += 1
        return found

    def drop_swapped(self, answer: Answer) -> None:
        """What it had in host memory is there no more."""
        if answer.swapped is not None:
            held = -(-answer.cached // self.pages.page_size)
            self.swapped_bytes -= held * self.pool.page_bytes
            answer.swapped = None

    def forget_alone(self, answer: Answer) -> None:
        """It has ended: what nobody else may find, or holds, is not worth keeping."""
        if answer.request.is_private:
            for page in answer.pages:
                if self.pages.references[page] == 1:
                    self.pages.forget(page)

    def release(self, answer: Answer) -> None:
        """Its pages go back, and what was cached with them."""
        self.pages.release_all(answer.pages)
        answer.pages, answer.keys, answer.cached = [], [], 0

    def missing(self, answer: Answer, count: int) -> int:
        """Pages ``count`` more tokens of an answer need, the copy of one it must not write into included."""
        size = self.pages.page_size
        more = max(0, -(-(answer.cached + count) // size) - len(answer.pages))
        return more + (self.fixed(answer) is not None)

    def fixed(self, answer: Answer) -> int | None:
        """Which of its pages its next token goes into and must not: others read it."""
        place = answer.cached // self.pages.page_size
        if place < len(answer.pages) and self.pages.is_fixed(answer.pages[place]):
            return place
        return None

    def reserve(self, answer: Answer, count: int) -> bool:
        """Makes room for ``count`` more tokens; False, and nothing has changed, if there is none."""
        try:
            taken = self.pages.take_many(self.missing(answer, count))
        except OutOfPagesError:
            return False
        place = self.fixed(answer)
        if place is not None:
            old, copy = answer.pages[place], taken.pop()
            try:
                self.pool.copy([(old, copy)])
            except Exception as error:
                self.pages.release_all([copy, *taken])
                raise StorageError(answer, error) from error
            answer.pages[place] = copy
            self.pages.release(old)
        answer.pages += taken
        return True

    def contents(self, answer: Answer) -> list[Content]:
        """What full pages of its tokens contain; worked out once."""
        pages, size, tokens = self.pages, self.pages.page_size, answer.history.tokens
        scope = pages.scope_of(answer.request.scope, answer.epoch)
        for place in range(len(answer.contents), len(tokens) // size):
            parent = answer.contents[-1] if place else None
            part = tokens[place * size : (place + 1) * size]
            answer.contents.append(content_of(scope, parent, part))
        return answer.contents

    def settle(self, answer: Answer, cached: int) -> None:
        """So many of its tokens are cached now, and stay."""
        answer.cached = cached
        self.learn(answer)

    def learn(self, answer: Answer) -> None:
        """Full pages get to be known by what they hold."""
        pages, size, tokens = self.pages, self.pages.page_size, answer.history.tokens
        scope = pages.scope_of(answer.request.scope, answer.epoch)
        while (len(answer.keys) + 1) * size <= answer.cached:
            place = len(answer.keys)
            parent = answer.keys[-1] if place else None
            part = tokens[place * size : (place + 1) * size]
            answer.keys.append(pages.learn(answer.pages[place], content_of(scope, parent, part)))

    def rebuild(self, answers: Sequence[Answer]) -> None:
        """Works out anew which pages are held, and how much is swapped, from all answers there are."""
        self.pages.rebuild((answer.pages, len(answer.keys)) for answer in answers)
        self.swapped_bytes = self._swapped(answers)

    def _swapped(self, answers: Iterable[Answer]) -> int:
        """Bytes of these answers in host memory."""
        pages = sum(-(-a.cached // self.pages.page_size) for a in answers if a.swapped is not None)
        return pages * self.pool.page_bytes

    def problems(self, running: Iterable[Answer], waiting: Iterable[Answer]) -> list[str]:
        """What is wrong with the pages; nothing ever should be."""
        running, waiting = list(running), list(waiting)
        found = self.pages.problems(answer.pages for answer in [*running, *waiting])
        size = self.pages.page_size
        for answer in running:
            if answer.cached > len(answer.pages) * size:
                found.append(
                    f"{answer.request.request_id} has more tokens cached than pages for them"
                )
        swapped = self._swapped(waiting)
        if swapped != self.swapped_bytes:
            found.append(f"{self.swapped_bytes} bytes are counted as swapped; {swapped} are")
        return found
