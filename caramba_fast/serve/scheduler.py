"""Scheduler: which tokens of which answers the next forward pass reads, and who gives way when pages run out.

Turns are in order of tickets, and last so many tokens. What decodes takes its token, prompts take what is left of the
budget in chunks, and those that wait come in behind them. Where they cannot, whoever holds more places than one of
them wants, or has got the ``fair_tokens`` of its turn, gives way and takes a new ticket, behind everybody. So a request
waits for no more than the turns of those before it, however long their answers are. A turn brings as many tokens as
had to be read again for it, so that no more than half of the work is repeated. Who has to give its pages back
because they have run out is the one with the newest ticket, so the oldest always gets on.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from caramba_fast.cache import PagePool
from caramba_fast.serve.block_manager import Holdings
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import Answer, Request
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
        self._tickets = itertools.count()
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
        if answer.ticket < 0:
            answer.ticket = next(self._tickets)
        insort(self.waiting, answer, key=lambda a: a.age)

    def fork(self, answer: Answer, other: Answer) -> None:
        """``other`` goes on from what ``answer`` has in its pages, which both hold then."""
        self.holdings.fork(answer, other)
        other.ticket, other.furthest = answer.ticket, answer.furthest
        other.turn, other.said = answer.turn, answer.said
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
        prompts = [answer for answer in by_age if answer.pending > 1]
        for answer in by_age:
            if answer.pending == 1 and budget:
                budget -= self._take_part(answer, budget, found)
        for place, answer in enumerate(prompts):
            if budget:
                behind = prompts[place + 1 :] + self._next_in_line()
                budget -= self._take_part(answer, self._share(answer, budget, behind), found)
        # Who was pushed out just now would come back at once.
        if self.counters.preemptions == before:
            budget -= self._admit(budget, found)
        self._add_drafts(budget, found)
        return sorted(found.values(), key=Work.order)

    def _next_in_line(self) -> list[Answer]:
        """The first of those that wait, if there is a place for it."""
        if self.places_left < 1:
            return []
        line = (answer for answer in self.waiting if not answer.request.paused)
        return list(itertools.islice(line, 1))

    @staticmethod
    def _share(answer: Answer, budget: int, behind: Iterable[Answer]) -> int:
        """What a prompt may take of a budget: half of it is for shorter prompts behind it, if they need so much."""
        shorter = sum(other.pending for other in behind if other.pending < answer.pending)
        return budget - min(budget // 2, shorter)

    @property
    def places_left(self) -> int:
        """How many more answers may run."""
        return self.settings.max_batch_size - sum(self._slots(other) for other in self.running)

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
            for victim in [] if count else self._who_gives_way(answer):
                out = found.pop(victim, None)
                spent -= 0 if out is None else out.count
                self.preempt(victim)
                victim.ticket = -1  # it takes a new one
                self._leave(self.waiting, victim)
                self.add(victim)
                count = self._begin_if_possible(answer, budget - spent)
                if count:
                    break
            if not count and self._holds_places(answer.request):
                continue  # its request is being answered; the next in line may have none
            if not count:
                break
            self._leave(self.waiting, answer)
            insort(self.running, answer, key=lambda a: a.age)
            found[answer] = Work(answer, count)
            spent += count
        return spent

    def _begin_if_possible(self, answer: Answer, budget: int) -> int:
        """Tokens to read of an answer that has got a place and pages now; 0 if there are none."""
        if self._slots(answer) > self.places_left:
            return 0
        left = self.places_left - self._slots(answer)
        line = itertools.dropwhile(lambda other: other is not answer, self.waiting)
        behind = itertools.islice(line, 1, 2) if left else ()
        return self._begin(answer, self._share(answer, budget, behind))

    def _holds_places(self, request: Request) -> int:
        return sum(self._slots(other) for other in self.running if other.request is request)

    def _who_gives_way(self, answer: Answer) -> list[Answer]:
        """Answers that run and have to make room for one that waits, in order; none if that would not be enough.

        Of requests that hold more places than it wants, the newest answers down to so many; and whoever has had
        its turn, the longest first.
        """
        wanted = self._slots(answer)
        others = [
            a for a in self.running if a.request is not answer.request and self._slots(a) == 1
        ]
        ended = sorted((a for a in others if self._had_its_turn(a)), key=lambda a: -a.turn_tokens)
        if self._holds_places(answer.request) or wanted <= self.places_left:
            return ended
        several: list[Answer] = []
        for request in dict.fromkeys(other.request for other in others):
            mine = [other for other in others if other.request is request]
            several += mine[max(wanted, self._holds_places(request) - len(mine)) :]
        found = list(dict.fromkeys([*ended, *reversed(several)]))
        return found if len(found) + self.places_left >= wanted else []

    def _had_its_turn(self, answer: Answer) -> bool:
        """Whether it has got the tokens of a turn: so many, and as many as were read again for it."""
        paid = answer.furthest >= 2 * answer.turn
        return paid and answer.turn_tokens >= self.settings.fair_tokens

    @staticmethod
    def _slots(answer: Answer) -> int:
        """Places it takes: the first answer keeps those of the others that have not begun."""
        request = answer.request
        return 1 + (request.wanted - len(request.answers) if answer.index == 0 else 0)

    def _begin(self, answer: Answer, budget: int) -> int:
        """Gives a waiting answer pages, its own back or those of others; tokens to read, 0 if there is no room."""
        holdings, count = self.holdings, min(answer.pending, budget)
        if answer.swapped is not None:
            back = holdings.swap_in(answer, count, len(self.running))
            answer.turn, answer.said = answer.furthest, answer.new
            return count if back else 0
        needed = holdings.take_up(answer)
        count = min(answer.pending, budget)
        # All of its tokens must fit, and a page more for each that runs: else it would soon be pushed out again.
        if needed + len(self.running) > holdings.pages.available or not holdings.reserve(
            answer, count
        ):
            holdings.release(answer)
            return 0
        holdings.learn(answer)
        answer.turn, answer.said = answer.furthest, answer.new
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
        answer.furthest = max(answer.furthest, cached)
        self.holdings.settle(answer, cached)

    def problems(self) -> list[str]:
        """What is wrong with the pages; nothing ever should be."""
        return self.holdings.problems(self.running, self.waiting)
