"""Scheduler: which tokens of which answers the next forward pass reads, and who gives way when pages run out.

Oldest first, in everything: what decodes takes its token, prompts take what is left of the budget in chunks, those
that wait come in behind them. Nobody overtakes; who has to give its pages back is the newest, so the oldest
answer always gets on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from caramba_fast.cache import PagePool
from caramba_fast.serve.holdings import Holdings
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import Answer
from caramba_fast.serve.settings import EngineConfig
from caramba_fast.serve.undo import Undo


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
        undo: what a step changes is noted there first.
    """

    def __init__(
        self, settings: EngineConfig, pool: PagePool, counters: Counters, undo: Undo
    ) -> None:
        self.settings, self.pool, self.counters, self.undo = settings, pool, counters, undo
        self.holdings = Holdings(settings, pool, counters)
        #: Both by age.
        self.running: list[Answer] = []
        self.waiting: list[Answer] = []
        #: Of those that wait, how many have begun and gave their pages back.
        self.returned = 0

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
        self.holdings.fork(answer, other)
        insort(self.running, other, key=lambda a: a.age)

    def remove(self, answer: Answer) -> None:
        """It has ended: its pages go back."""
        for place in (self.running, self.waiting):
            if answer in place:
                self._leave(place, answer)
        self.holdings.drop_swapped(answer)
        self.holdings.forget_alone(answer)
        self.holdings.release(answer)

    def _leave(self, place: list[Answer], answer: Answer) -> None:
        place.remove(answer)
        if place is self.waiting:
            self.returned -= answer.preemptions > 0

    @property
    def fresh(self) -> int:
        """Answers that wait and have not begun."""
        return len(self.waiting) - self.returned

    def rebuild(self, going: Sequence[Answer], running: list[Answer]) -> None:
        """Works everything out anew, after an interrupt, from all answers that have not ended and those that ran."""
        there = set(running)
        self.running = list(running)
        self.waiting = sorted((a for a in going if a not in there), key=lambda a: a.age)
        self.returned = sum(answer.preemptions > 0 for answer in self.waiting)
        self.holdings.rebuild(going)

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
        while answer in self.running and not self.holdings.reserve(answer, count):
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
            if draft and self.holdings.reserve(answer, 1 + len(draft)):
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
            self.undo.keep(answer.request)
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
        holdings, count = self.holdings, min(answer.pending, budget)
        if answer.swapped is not None:
            return count if holdings.swap_in(answer, count, len(self.running)) else 0
        needed = holdings.take_up(answer)
        count = min(answer.pending, budget)
        # All of its tokens must fit, and a page more for each that runs: else it would soon be pushed out again.
        if needed + len(self.running) > holdings.pages.available or not holdings.reserve(
            answer, count
        ):
            holdings.release(answer)
            return 0
        holdings.learn(answer)
        if not answer.preemptions:
            answer.hit = answer.cached
            self.counters.prefix_hit_tokens += answer.cached
            self.counters.prompt_tokens += len(answer.history)
        return count

    # -- going out ----------------------------------------------------------------------

    def preempt(self, answer: Answer) -> None:
        """Takes an answer's pages back; it waits, and goes on where it was when there is room again."""
        self.holdings.give_back(answer)
        self._leave(self.running, answer)
        answer.preemptions += 1
        self.counters.preemptions += 1
        self.add(answer)

    def settle(self, answer: Answer, cached: int) -> None:
        """So many of its tokens are cached now, and stay."""
        self.holdings.settle(answer, cached)

    def problems(self) -> list[str]:
        """What is wrong with the pages; nothing ever should be."""
        return self.holdings.problems(self.running, self.waiting)
