"""Scheduler: which tokens of which sequences the next forward pass reads, and who gives way when pages run out.

Turns are in order of tickets, and last so many tokens. What decodes takes its token, prompts take what is left of the
budget in chunks, and those that wait come in behind them. Where they cannot, whoever holds more places than one of
them wants, or has got the ``fair_tokens`` of its turn, gives way and takes a new ticket, behind everybody. So a request
waits for no more than the turns of those before it, however long their sequences are. A turn brings as many tokens as
had to be read again for it, so that no more than half of the work is repeated. Who has to give its pages back
because they have run out is the one with the newest ticket, so the oldest always gets on.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from caramba_fast.cache import PagePool
from caramba_fast.serve.block_manager import BlockManager
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import PagedSequence, Request
from caramba_fast.serve.undo import Undo


@dataclass(eq=False)
class Work:
    """What one sequence takes part in a step with.

    Attributes:
        sequence: whose.
        count: how many of its pending tokens are read.
        draft: tokens that are read behind them, and may be thrown away.
    """

    sequence: PagedSequence
    count: int
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are read."""
        start = self.sequence.cached
        return [*self.sequence.tokens[start : start + self.count], *self.draft]

    def order(self) -> tuple[bool, tuple[int, int]]:
        """Single tokens first, then by age."""
        return self.count + len(self.draft) > 1, self.sequence.age

    @property
    def is_whole(self) -> bool:
        """Whether a token is to be chosen behind it."""
        return self.count == self.sequence.pending


class Scheduler:
    """The sequences there are, and their pages.

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
        self.blocks = BlockManager(settings, pool, counters)
        self._tickets = itertools.count()
        #: Both by age.
        self.running: list[PagedSequence] = []
        self.waiting: list[PagedSequence] = []
        #: Of those that wait, how many have begun and gave their pages back.
        self.returned = 0

    @property
    def sequences(self) -> list[PagedSequence]:
        """All there are."""
        return [*self.running, *self.waiting]

    def add(self, sequence: PagedSequence) -> None:
        """It waits for its turn."""
        self.returned += sequence.preemptions > 0
        if sequence.ticket < 0:
            sequence.ticket = next(self._tickets)
        insort(self.waiting, sequence, key=lambda a: a.age)

    def fork(self, sequence: PagedSequence, other: PagedSequence) -> None:
        """``other`` goes on from what ``sequence`` has in its pages, which both hold then."""
        self.blocks.fork(sequence, other)
        other.ticket, other.furthest = sequence.ticket, sequence.furthest
        other.turn, other.turn_start = sequence.turn, sequence.turn_start
        insort(self.running, other, key=lambda a: a.age)

    def remove(self, sequence: PagedSequence) -> None:
        """It has ended: its pages go back."""
        for place in (self.running, self.waiting):
            if sequence in place:
                self._leave(place, sequence)
        self.blocks.drop_swapped(sequence)
        self.blocks.ended(sequence)
        self.blocks.release(sequence)

    def _leave(self, place: list[PagedSequence], sequence: PagedSequence) -> None:
        place.remove(sequence)
        if place is self.waiting:
            self.returned -= sequence.preemptions > 0

    @property
    def fresh(self) -> int:
        """Sequences that wait and have not begun."""
        return len(self.waiting) - self.returned

    def rebuild(self, going: Sequence[PagedSequence], running: list[PagedSequence]) -> None:
        """Works everything out anew, after an interrupt, from all sequences that have not ended and those that ran."""
        there = set(running)
        self.running = list(running)
        self.waiting = sorted((a for a in going if a not in there), key=lambda a: a.age)
        self.returned = sum(sequence.preemptions > 0 for sequence in self.waiting)
        self.blocks.rebuild(going)

    # -- a step -------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """What the next forward pass reads, single tokens first; the pages for it are there."""
        found: dict[PagedSequence, Work] = {}
        budget, before = self.settings.max_batch_tokens, self.counters.preemptions
        by_age = [sequence for sequence in self.running if not sequence.request.paused]
        prompts = [sequence for sequence in by_age if sequence.pending > 1]
        for sequence in by_age:
            if sequence.pending == 1 and budget:
                budget -= self._take_part(sequence, budget, found)
        for place, sequence in enumerate(prompts):
            if budget:
                behind = prompts[place + 1 :] + self._next_in_line()
                budget -= self._take_part(sequence, self._share(sequence, budget, behind), found)
        # Who was pushed out just now would come back at once.
        if self.counters.preemptions == before:
            budget -= self._admit(budget, found)
        self._add_drafts(budget, found)
        return sorted(found.values(), key=Work.order)

    def _next_in_line(self) -> list[PagedSequence]:
        """The first of those that wait, if there is a place for it."""
        if self.places_left < 1:
            return []
        line = (sequence for sequence in self.waiting if not sequence.request.paused)
        return list(itertools.islice(line, 1))

    @staticmethod
    def _share(sequence: PagedSequence, budget: int, behind: Iterable[PagedSequence]) -> int:
        """What a prompt may take of a budget: half of it is for shorter prompts behind it, if they need so much."""
        shorter = sum(other.pending for other in behind if other.pending < sequence.pending)
        return budget - min(budget // 2, shorter)

    @property
    def places_left(self) -> int:
        """How many more sequences may run."""
        return self.blocks.places - sum(self._slots(other) for other in self.running)

    def _push_out_paused(self) -> bool:
        """The newest that is paused gives way to one that waits; False if none is."""
        paused = [sequence for sequence in self.running if sequence.request.paused]
        if paused:
            self.preempt(paused[-1])
        return bool(paused)

    def _take_part(
        self, sequence: PagedSequence, budget: int, found: dict[PagedSequence, Work]
    ) -> int:
        """Schedules pending tokens of a sequence that runs, pushing newer ones out for their pages.

        Returns:
            how many, less those of sequences that were scheduled already and are not any more.
        """
        count, freed = self.blocks.most(sequence, min(sequence.pending, budget)), 0
        while sequence in self.running and not self.blocks.reserve(sequence, count):
            paused = [other for other in self.running if other.request.paused]
            victim = (paused or self.running)[-1]
            self.preempt(victim)
            out = found.pop(victim, None)
            freed += 0 if out is None else out.count
        if sequence not in self.running:
            return -freed
        found[sequence] = Work(sequence, count)
        return count - freed

    def _add_drafts(self, budget: int, found: dict[PagedSequence, Work]) -> None:
        """Guesses for those that decode, while neither budget nor pages are scarce."""
        most = self.settings.lookup_tokens
        for work in list(found.values()) if most else []:
            sequence = work.sequence
            count = min(most, budget, sequence.left - 1, self.blocks.most(sequence, most + 1) - 1)
            if (
                not (work.is_whole and work.count == 1 and sequence.new)
                or sequence.drafts is None
                or count < 1
            ):
                continue
            draft = sequence.drafts.draft(sequence.tokens, count)
            if draft and self.blocks.reserve(sequence, 1 + len(draft)):
                work.draft = draft
                budget -= len(draft)

    # -- coming in ----------------------------------------------------------------------

    def _admit(self, budget: int, found: dict[PagedSequence, Work]) -> int:
        """Lets those that wait begin, in order, while there is room; tokens scheduled for them."""
        spent = 0
        for sequence in list(self.waiting):
            if sequence.request.paused:
                continue
            if spent >= budget:
                break
            self.undo.keep(sequence.request)
            count = self._begin_if_possible(sequence, budget - spent)
            while not count and self._push_out_paused():
                count = self._begin_if_possible(sequence, budget - spent)
            for victim in [] if count else self._who_gives_way(sequence):
                out = found.pop(victim, None)
                spent -= 0 if out is None else out.count
                self.preempt(victim)
                victim.ticket = -1  # it takes a new one
                self._leave(self.waiting, victim)
                self.add(victim)
                count = self._begin_if_possible(sequence, budget - spent)
                if count:
                    break
            if not count and self._holds_places(sequence.request):
                continue  # its request is being answered; the next in line may have none
            if not count:
                break
            self._leave(self.waiting, sequence)
            insort(self.running, sequence, key=lambda a: a.age)
            found[sequence] = Work(sequence, count)
            spent += count
        return spent

    def _begin_if_possible(self, sequence: PagedSequence, budget: int) -> int:
        """Tokens to read of a sequence that has got a place and pages now; 0 if there are none."""
        if self._slots(sequence) > self.places_left:
            return 0
        left = self.places_left - self._slots(sequence)
        line = itertools.dropwhile(lambda other: other is not sequence, self.waiting)
        behind = itertools.islice(line, 1, 2) if left else ()
        return self._begin(sequence, self._share(sequence, budget, behind))

    def _holds_places(self, request: Request) -> int:
        return sum(self._slots(other) for other in self.running if other.request is request)

    def _who_gives_way(self, sequence: PagedSequence) -> list[PagedSequence]:
        """Sequences that run and have to make room for one that waits, in order; none if that would not be enough.

        Of requests that hold more places than it wants, the newest sequences down to so many; and whoever has had
        its turn, the longest first.
        """
        wanted = self._slots(sequence)
        others = [
            a for a in self.running if a.request is not sequence.request and self._slots(a) == 1
        ]
        ended = sorted((a for a in others if self._had_its_turn(a)), key=lambda a: -a.turn_tokens)
        if self._holds_places(sequence.request) or wanted <= self.places_left:
            return ended
        several: list[PagedSequence] = []
        for request in dict.fromkeys(other.request for other in others):
            mine = [other for other in others if other.request is request]
            several += mine[max(wanted, self._holds_places(request) - len(mine)) :]
        found = list(dict.fromkeys([*ended, *reversed(several)]))
        return found if len(found) + self.places_left >= wanted else []

    def _had_its_turn(self, sequence: PagedSequence) -> bool:
        """Whether it has got the tokens of a turn: so many, and as many as were read again for it."""
        paid = sequence.furthest >= 2 * sequence.turn
        return paid and sequence.turn_tokens >= self.settings.fair_tokens

    @staticmethod
    def _slots(sequence: PagedSequence) -> int:
        """Places it takes: the first sequence keeps those of the others that have not begun."""
        request = sequence.request
        return 1 + (request.wanted - len(request.sequences) if sequence.index == 0 else 0)

    def _begin(self, sequence: PagedSequence, budget: int) -> int:
        """Gives a waiting sequence pages, its own back or those of others; tokens to read, 0 if there is no room."""
        blocks = self.blocks
        count = blocks.most(sequence, min(sequence.pending, budget))
        if sequence.swapped is not None:
            back = blocks.swap_in(sequence, count, len(self.running))
            sequence.turn, sequence.turn_start = sequence.furthest, sequence.new
            return count if back else 0
        needed = blocks.take_up(sequence)
        count = blocks.most(sequence, min(sequence.pending, budget))
        # All of its tokens must fit, and a page more for each that runs: else it would soon be pushed out again.
        if needed + len(self.running) > blocks.pages.available or not blocks.reserve(
            sequence, count
        ):
            blocks.release(sequence)
            return 0
        blocks.learn(sequence)
        sequence.turn, sequence.turn_start = sequence.furthest, sequence.new
        if not sequence.preemptions:
            sequence.prefix_hit = sequence.cached
            self.counters.prefix_hit_tokens += sequence.cached
            self.counters.prompt_tokens += len(sequence)
        return count

    # -- going out ----------------------------------------------------------------------

    def preempt(self, sequence: PagedSequence) -> None:
        """Takes a sequence's pages back; it waits, and goes on where it was when there is room again."""
        self.blocks.give_back(sequence)
        self._leave(self.running, sequence)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.add(sequence)

    def mark_cached(self, sequence: PagedSequence, cached: int) -> None:
        """So many of its tokens are cached now, and stay."""
        sequence.furthest = max(sequence.furthest, cached)
        self.blocks.mark_cached(sequence, cached)

    def problems(self) -> list[str]:
        """What is wrong with the pages; nothing ever should be."""
        return self.blocks.problems(self.running, self.waiting)
