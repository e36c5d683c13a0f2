"""Scheduler: which tokens of which sequences the next forward pass processes, and which sequences are preempted.

Sequences get turns in order of their tickets. Decoding sequences get their token first, prompts get the rest of the
budget in chunks, and waiting sequences come after them. If a waiting sequence does not fit, a running one is preempted
and queued last, with a new ticket: one of a request that holds more places than the waiting one wants, or one that has
got the ``fair_tokens`` of its turn. So a request waits for no more than the turns of those before it, however long
their sequences are. A turn also gives as many tokens as had to be recomputed for it, so that at most half of the work
is repeated. When pages run out, the sequence with the newest ticket is preempted, so the oldest always makes progress.
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
    """The part of one sequence in a step.

    Attributes:
        count: number of its pending tokens that are processed.
        draft: drafted tokens after them, which may be rejected.
    """

    sequence: PagedSequence
    count: int
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens to process."""
        start = self.sequence.cached
        return [*self.sequence.tokens[start : start + self.count], *self.draft]

    def order(self) -> tuple[bool, int, tuple[int, int]]:
        """Sort key: single tokens first, by their rings, of which neighbours need no copies; then by age."""
        longer = self.count + len(self.draft) > 1
        return longer, 0 if longer else self.sequence.ring, self.sequence.age

    @property
    def is_whole(self) -> bool:
        """Whether all pending tokens are processed, so that a next token is chosen."""
        return self.count == self.sequence.pending


class Scheduler:
    """The running and waiting sequences of an engine, and their pages."""

    def __init__(
        self, settings: EngineConfig, pool: PagePool, counters: Counters, undo: Undo
    ) -> None:
        self.settings, self.pool, self.counters, self.undo = settings, pool, counters, undo
        self.blocks = BlockManager(settings, pool, counters)
        self._tickets = itertools.count()
        #: Both sorted by age.
        self.running: list[PagedSequence] = []
        self.waiting: list[PagedSequence] = []
        #: Number of waiting sequences that were preempted.
        self.returned = 0

    @property
    def sequences(self) -> list[PagedSequence]:
        """The running and the waiting ones."""
        return [*self.running, *self.waiting]

    def add(self, sequence: PagedSequence) -> None:
        """Adds a sequence to the waiting ones."""
        self.returned += sequence.preemptions > 0
        if sequence.ticket < 0:
            sequence.ticket = next(self._tickets)
        insort(self.waiting, sequence, key=lambda a: a.age)

    def fork(self, sequence: PagedSequence, other: PagedSequence) -> None:
        """``other`` continues from the pages of ``sequence``, which both then hold."""
        self.blocks.fork(sequence, other)
        other.ticket, other.furthest = sequence.ticket, sequence.furthest
        other.paid_at, other.turn_start = sequence.paid_at, sequence.turn_start
        insort(self.running, other, key=lambda a: a.age)

    def remove(self, sequence: PagedSequence) -> None:
        """Removes a sequence that has ended and frees its pages."""
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
        """Number of waiting sequences that have not begun."""
        return len(self.waiting) - self.returned

    def rebuild(self, going: Sequence[PagedSequence], running: list[PagedSequence]) -> None:
        """Recomputes everything after an interrupt, from all live sequences and those that ran."""
        there = set(running)
        self.running = list(running)
        self.waiting = sorted((a for a in going if a not in there), key=lambda a: a.age)
        self.returned = sum(sequence.preemptions > 0 for sequence in self.waiting)
        self.blocks.rebuild(going)

    def schedule(self) -> list[Work]:
        """The work of the next forward pass, single tokens first; its pages are reserved."""
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
        # A sequence that was just preempted would come back at once.
        if self.counters.preemptions == before:
            budget -= self._admit(budget, found)
        self._add_drafts(budget, found)
        return sorted(found.values(), key=Work.order)

    def _next_in_line(self) -> list[PagedSequence]:
        """The first waiting sequence, if there is a place for it."""
        if self.places_left < 1:
            return []
        line = (sequence for sequence in self.waiting if not sequence.request.paused)
        return list(itertools.islice(line, 1))

    @staticmethod
    def _share(sequence: PagedSequence, budget: int, behind: Iterable[PagedSequence]) -> int:
        """A prompt's share of the budget: up to half is left for shorter prompts behind it."""
        shorter = sum(other.pending for other in behind if other.pending < sequence.pending)
        return budget - min(budget // 2, shorter)

    @property
    def places_left(self) -> int:
        """How many more sequences may run."""
        return self.blocks.places - sum(self._slots(other) for other in self.running)

    def _push_out_paused(self) -> bool:
        """Preempts the newest paused sequence; False if there is none."""
        paused = [sequence for sequence in self.running if sequence.request.paused]
        if paused:
            self.preempt(paused[-1])
        return bool(paused)

    def _take_part(
        self, sequence: PagedSequence, budget: int, found: dict[PagedSequence, Work]
    ) -> int:
        """Schedules pending tokens of a running sequence, preempting newer ones for their pages.

        Returns their number, less those of sequences that were scheduled and then preempted.
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
        """Adds drafts to decoding sequences while budget and pages last."""
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

    def _admit(self, budget: int, found: dict[PagedSequence, Work]) -> int:
        """Starts waiting sequences in order while there is room; returns the tokens scheduled for them."""
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
        """Starts a waiting sequence if there is a place and pages; returns the tokens to process, 0 if not."""
        if self._slots(sequence) > self.places_left:
            return 0
        left = self.places_left - self._slots(sequence)
        line = itertools.dropwhile(lambda other: other is not sequence, self.waiting)
        behind = itertools.islice(line, 1, 2) if left else ()
        return self._begin(sequence, self._share(sequence, budget, behind))

    def _holds_places(self, request: Request) -> int:
        return sum(self._slots(other) for other in self.running if other.request is request)

    def _who_gives_way(self, sequence: PagedSequence) -> list[PagedSequence]:
        """Running sequences to preempt for a waiting one, in order; none if they would not be enough.

        The newest sequences of requests that hold more places than it wants, and those whose turn is over, longest
        first.
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
        """Whether it got the tokens of its turn: ``fair_tokens``, and as many as were recomputed for it."""
        paid = sequence.furthest >= sequence.paid_at
        return paid and sequence.turn_tokens >= self.settings.fair_tokens

    @staticmethod
    def _begin_turn(sequence: PagedSequence) -> None:
        recomputed = sequence.furthest - sequence.cached
        sequence.paid_at, sequence.turn_start = sequence.furthest + recomputed, sequence.new

    @staticmethod
    def _slots(sequence: PagedSequence) -> int:
        """Places it takes: the first sequence also has those of the request's sequences that have not begun."""
        request = sequence.request
        return 1 + (request.wanted - len(request.sequences) if sequence.index == 0 else 0)

    def _begin(self, sequence: PagedSequence, budget: int) -> int:
        """Gives a waiting sequence pages, swapped in or shared; returns the tokens to process, 0 without room."""
        blocks = self.blocks
        count = blocks.most(sequence, min(sequence.pending, budget))
        if sequence.swapped is not None:
            back = blocks.swap_in(sequence, count, len(self.running))
            self._begin_turn(sequence)
            return count if back else 0
        needed = blocks.take_up(sequence)
        count = blocks.most(sequence, min(sequence.pending, budget))
        # All its tokens must fit, plus a page for each running sequence, or it would soon be preempted again.
        if needed + len(self.running) > blocks.pages.available or not blocks.reserve(
            sequence, count
        ):
            blocks.release(sequence)
            return 0
        blocks.learn(sequence)
        self._begin_turn(sequence)
        if not sequence.preemptions:
            sequence.prefix_hit = sequence.cached
            self.counters.prefix_hit_tokens += sequence.cached
            self.counters.prompt_tokens += len(sequence)
        return count

    def preempt(self, sequence: PagedSequence) -> None:
        """Takes a sequence's pages back; it waits until there is room again."""
        self.blocks.give_back(sequence)
        self._leave(self.running, sequence)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.add(sequence)

    def mark_cached(self, sequence: PagedSequence, cached: int) -> None:
        """Records that ``cached`` of its tokens are cached for good."""
        sequence.furthest = max(sequence.furthest, cached)
        self.blocks.mark_cached(sequence, cached)

    def problems(self) -> list[str]:
        """Inconsistencies of the pages; empty unless there is a bug."""
        return self.blocks.problems(self.running, self.waiting)
