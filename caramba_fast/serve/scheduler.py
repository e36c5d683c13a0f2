"""Scheduler: which tokens of which answers the next forward pass reads, and who gives way when pages run out.

Oldest first, in everything: what decodes takes its token, prompts take what is left of the budget in chunks, those
that wait come in behind them. Nobody overtakes; who has to give its pages back is the newest, so the oldest
answer always gets on.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from caramba_fast.cache import OutOfPagesError, PageBytes, PagePool
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.pages import SharedPages, key_of
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


@dataclass(eq=False)
class Work:
    """What one answer takes part in a step with.

    Attributes:
        answer: whose.
        count: how many of its pending tokens are read.
        draft: tokens that are read behind them, and may be thrown away.
    """

    answer: Answer
    count: int
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are read."""
        start = self.answer.cached
        return [*self.answer.history.tokens[start : start + self.count], *self.draft]

    def order(self) -> tuple[bool, tuple[int, int]]:
        """Single tokens first, then by age."""
        return self.count + len(self.draft) > 1, self.answer.age

    @property
    def is_whole(self) -> bool:
        """Whether a token is to be chosen behind it."""
        return self.count == self.answer.pending


class Scheduler:
    """The answers there are, and their pages.

    Args:
        settings: limits and policies.
        pool: where the bytes are.
        counters: what is counted.
    """

    def __init__(self, settings: EngineConfig, pool: PagePool, counters: Counters) -> None:
        self.settings, self.pool, self.counters = settings, pool, counters
        self.pages = SharedPages(pool.num_pages, pool.page_size, settings.prefix_caching)
        #: Both by age.
        self.running: list[Answer] = []
        self.waiting: list[Answer] = []
        #: Of those that wait, how many have begun and gave their pages back.
        self.returned = 0
        self.swapped_bytes = 0

    @property
    def answers(self) -> list[Answer]:
        """All there are."""
        return [*self.running, *self.waiting]

    def add(self, answer: Answer) -> None:
        """It waits for its turn."""
        self.returned += answer.preemptions > 0
        insort(self.waiting, answer, key=lambda a: a.age)

    def fork(self, answer: Answer, other: Answer) -> None:
        """``other`` goes on from what ``answer`` has in its pages, which both hold then."""
        self.pages.hold(answer.pages)
        other.pages, other.cached, other.keys = list(answer.pages), answer.cached, list(answer.keys)
        insort(self.running, other, key=lambda a: a.age)

    def remove(self, answer: Answer) -> None:
        """It has ended: its pages go back."""
        for place in (self.running, self.waiting):
            if answer in place:
                self._leave(place, answer)
        self._drop_swapped(answer)
        self._release(answer)

    def _leave(self, place: list[Answer], answer: Answer) -> None:
        place.remove(answer)
        if place is self.waiting:
            self.returned -= answer.preemptions > 0

    @property
    def fresh(self) -> int:
        """Answers that wait and have not begun."""
        return len(self.waiting) - self.returned

    # -- a step -------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """What the next forward pass reads, single tokens first; the pages for it are there."""
        found: dict[Answer, Work] = {}
        budget, before = self.settings.max_batch_tokens, self.counters.preemptions
        by_age = [answer for answer in self.running if not answer.request.paused]
        for decoding in (True, False):
            for answer in by_age:
                if (answer.pending == 1) is decoding and budget:
                    budget -= self._take_part(answer, budget, found)
        # Who was pushed out just now would come back at once.
        if self.counters.preemptions == before:
            budget -= self._admit(budget, found)
        self._add_drafts(budget, found)
        return sorted(found.values(), key=Work.order)

    def _push_out_paused(self) -> bool:
        """The newest that is paused gives way to one that waits; False if none is."""
        paused = [answer for answer in self.running if answer.request.paused]
        if paused:
            self.preempt(paused[-1])
        return bool(paused)

    def _take_part(self, answer: Answer, budget: int, found: dict[Answer, Work]) -> int:
        """Schedules pending tokens of an answer that runs, pushing newer ones out for their pages.

        Returns:
            how many, less those of answers that were scheduled already and are not any more.
        """
        count, freed = min(answer.pending, budget), 0
        while answer in self.running and not self._reserve(answer, count):
            paused = [other for other in self.running if other.request.paused]
            victim = (paused or self.running)[-1]
            self.preempt(victim)
            out = found.pop(victim, None)
            freed += 0 if out is None else out.count
        if answer not in self.running:
            return -freed
        found[answer] = Work(answer, count)
        return count - freed

    def _add_drafts(self, budget: int, found: dict[Answer, Work]) -> None:
        """Guesses for those that decode, while neither budget nor pages are scarce."""
        most = self.settings.lookup_tokens
        for work in list(found.values()) if most else []:
            answer = work.answer
            count = min(most, budget, answer.left - 1)
            if (
                not (work.is_whole and work.count == 1 and answer.new)
                or answer.drafts is None
                or count < 1
            ):
                continue
            draft = answer.drafts.draft(answer.history.tokens, count)
            if draft and self._reserve(answer, 1 + len(draft)):
                work.draft = draft
                budget -= len(draft)

    # -- coming in ----------------------------------------------------------------------

    def _admit(self, budget: int, found: dict[Answer, Work]) -> int:
        """Lets those that wait begin, in order, while there is room; tokens scheduled for them."""
        spent = 0
        for answer in list(self.waiting):
            if answer.request.paused:
                continue
            if spent >= budget:
                break
            count = self._begin_if_possible(answer, budget - spent)
            while not count and self._push_out_paused():
                count = self._begin_if_possible(answer, budget - spent)
            if not count:
                break
            self._leave(self.waiting, answer)
            insort(self.running, answer, key=lambda a: a.age)
            found[answer] = Work(answer, count)
            spent += count
        return spent

    def _begin_if_possible(self, answer: Answer, budget: int) -> int:
        """Tokens to read of an answer that has got a place and pages now; 0 if there are none."""
        taken = sum(self._slots(other) for other in self.running)
        if taken + self._slots(answer) > self.settings.max_batch_size:
            return 0
        return self._begin(answer, budget)

    @staticmethod
    def _slots(answer: Answer) -> int:
        """Places it takes: the first answer keeps those of the others that have not begun."""
        request = answer.request
        return 1 + (request.wanted - len(request.answers) if answer.index == 0 else 0)

    def _begin(self, answer: Answer, budget: int) -> int:
        """Gives a waiting answer pages, its own back or those of others; tokens to read, 0 if there is no room."""
        if answer.swapped is not None:
            return self._swap_in(answer, budget)
        tokens, size = answer.history.tokens, self.pages.page_size
        hit = self.pages.find(self._names(answer)) if self.pages.keeps else []
        self.pages.hold(hit)
        answer.pages, answer.cached = hit, min(len(hit) * size, len(tokens) - 1)
        needed = self._missing(answer, answer.pending)
        if needed > self.pages.available and self._fixed(answer) is not None:
            # Rather than copy the last page to write one token into it, read its tokens again.
            self.pages.release(answer.pages.pop())
            answer.cached = len(answer.pages) * size
            needed = self._missing(answer, answer.pending)
        count = min(answer.pending, budget)
        # All of its tokens must fit, and a page more for each that runs: else it would soon be pushed out again.
        if needed + len(self.running) > self.pages.available or not self._reserve(answer, count):
            self._release(answer)
            return 0
        self._learn(answer)
        if not answer.preemptions:
            answer.hit = answer.cached
            self.counters.prefix_hit_tokens += answer.cached
            self.counters.prompt_tokens += len(tokens)
        return count

    def _swap_in(self, answer: Answer, budget: int) -> int:
        assert answer.swapped is not None
        held = -(-answer.cached // self.pages.page_size)
        count = min(answer.pending, budget)
        more = -(-(answer.cached + count) // self.pages.page_size) - held
        if held + more + len(self.running) > self.pages.available:
            return 0
        pages = self.pages.take_many(held)
        try:
            self.pool.write(pages, answer.swapped)
        except Exception as error:
            self.pages.release_all(pages)
            raise StorageError(answer, error) from error
        answer.pages = pages
        self._drop_swapped(answer)
        self._learn(answer)
        return count if self._reserve(answer, count) else 0

    # -- going out ----------------------------------------------------------------------

    def preempt(self, answer: Answer) -> None:
        """Takes an answer's pages back; it waits, and goes on where it was when there is room again."""
        swapped = self._swapped_out(answer)
        self._leave(self.running, answer)
        cached = answer.cached
        self._release(answer)
        answer.swapped, answer.cached = swapped, cached if swapped is not None else 0
        answer.preemptions += 1
        self.counters.preemptions += 1
        self.add(answer)

    def _swapped_out(self, answer: Answer) -> PageBytes | None:
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

    def _drop_swapped(self, answer: Answer) -> None:
        if answer.swapped is not None:
            held = -(-answer.cached // self.pages.page_size)
            self.swapped_bytes -= held * self.pool.page_bytes
            answer.swapped = None

    def _release(self, answer: Answer) -> None:
        self.pages.release_all(answer.pages)
        answer.pages, answer.keys, answer.cached = [], [], 0

    # -- pages --------------------------------------------------------------------------

    def _missing(self, answer: Answer, count: int) -> int:
        """Pages ``count`` more tokens of an answer need, the copy of one it must not write into included."""
        size = self.pages.page_size
        more = max(0, -(-(answer.cached + count) // size) - len(answer.pages))
        return more + (self._fixed(answer) is not None)

    def _fixed(self, answer: Answer) -> int | None:
        """Which of its pages its next token goes into and must not: others read it."""
        place = answer.cached // self.pages.page_size
        if place < len(answer.pages) and self.pages.is_fixed(answer.pages[place]):
            return place
        return None

    def _reserve(self, answer: Answer, count: int) -> bool:
        """Makes room for ``count`` more tokens; False, and nothing has changed, if there is none."""
        try:
            taken = self.pages.take_many(self._missing(answer, count))
        except OutOfPagesError:
            return False
        place = self._fixed(answer)
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

    def _names(self, answer: Answer) -> list[bytes]:
        """What full pages of its tokens would be known by; worked out once."""
        pages, tokens = self.pages, answer.history.tokens
        if answer.root != pages.root:
            answer.root, answer.names = pages.root, []
        for place in range(len(answer.names), len(tokens) // pages.page_size):
            parent = answer.names[-1] if answer.names else pages.root
            part = tokens[place * pages.page_size : (place + 1) * pages.page_size]
            answer.names.append(key_of(parent, part))
        return answer.names

    def settle(self, answer: Answer, cached: int) -> None:
        """So many of its tokens are cached now, and stay."""
        answer.cached = cached
        self._learn(answer)

    def _learn(self, answer: Answer) -> None:
        """Full pages get to be known by what they hold."""
        size, tokens = self.pages.page_size, answer.history.tokens
        while (len(answer.keys) + 1) * size <= answer.cached:
            place = len(answer.keys)
            parent = answer.keys[-1] if answer.keys else self.pages.root
            part = tokens[place * size : (place + 1) * size]
            answer.keys.append(self.pages.learn(answer.pages[place], parent, part))

    def problems(self) -> list[str]:
        """What is wrong with the pages; nothing ever should be."""
        found = self.pages.problems(answer.pages for answer in self.answers)
        size = self.pages.page_size
        for answer in self.running:
            if answer.cached > len(answer.pages) * size:
                found.append(
                    f"{answer.request.request_id} has more tokens cached than pages for them"
                )
        swapped = sum(
            -(-a.cached // size) * self.pool.page_bytes
            for a in self.waiting
            if a.swapped is not None
        )
        if swapped != self.swapped_bytes:
            found.append(f"{self.swapped_bytes} bytes are counted as swapped; {swapped} are")
        return found
