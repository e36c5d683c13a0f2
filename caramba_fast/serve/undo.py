"""Undo: restores an engine after an interrupted call (Ctrl-C or an error), so that nothing is half done.

A call saves each request before changing it, and ends with one assignment (`Engine`). If it does not get there, the
saved requests are restored, and all that follows from them (lists, counts and content of pages) is recomputed. The
pages a sequence kept need no restoring, since the same tokens are written to them again. A sequence that was preempted
stays so, since others may have written to its pages: it is swapped in or recomputed later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from caramba_fast.infer.lookup import NGramIndex
from caramba_fast.infer.run import is_running
from caramba_fast.infer.sequence import FinishReason
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import Event, PagedSequence, Request

#: Fields of a sequence that are restored as they were.
FIELDS = (
    "finish_reason", "prefix_hit", "emitted", "emitted_pieces", "is_over", "epoch", "ticket", "furthest", "paid_at",
    "turn_start",
)  # fmt: skip
#: Fields that say where its tokens are stored; the lists are copied.
STORED, LISTS = ("cached", "ring", "swapped", "preemptions"), ("pages", "keys")


class Undone(Protocol):
    """What `Undo.put_back` restores: an `OutputProcessor`."""

    requests: dict[str, Request]
    cancelling: deque[Request]
    due: list[tuple[float, int, str, FinishReason]]

    def rebuild(self, requests: Sequence[Request], running: list[PagedSequence]) -> None:
        """Recomputes everything from the live requests and the sequences that ran."""


class Undo:
    """The changes of one call.

    Attributes:
        added: requests that are new.
        cancelling: requests taken off the list of those to cancel.
        due: entries taken off the heap of deadlines.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.begin((), noted=False)

    def begin(self, running: Sequence[PagedSequence], noted: bool) -> None:
        """Begins a call; with ``noted`` it may change any running request, and all are saved."""
        self.may_be_anything = noted
        self._requests: dict[Request, Any] = {}
        self.added: set[Request] = set()
        self.cancelling: list[Request] = []
        self.due: list[tuple[float, int, str, FinishReason]] = []
        self._running, self._counted = list(running), self._counters.saved()
        for sequence in running if noted else ():
            self.keep(sequence.request)

    def keep(self, request: Request) -> None:
        """Saves a request before it changes."""
        if request not in self._requests:
            sequences = [(sequence, _saved(sequence)) for sequence in request.sequences]
            times = request.times.saved()
            self._requests[request] = (request.begun, request.error, times, sequences)

    @property
    def is_empty(self) -> bool:
        """Whether nothing can have changed."""
        changed = self._requests or self.added or self.cancelling or self.due
        return not (self.may_be_anything or changed)

    def put_back(self, outputs: Undone) -> None:
        """Restores the state before the call; can be repeated if it is interrupted itself."""
        pushed_out: list[PagedSequence] = []
        for request, (begun, error, times, sequences) in self._requests.items():
            request.begun, request.error = begun, error
            request.times.put_back(times)
            request.sequences = [sequence for sequence, _ in sequences]
            for sequence, saved in sequences:
                if _put_back(sequence, saved):
                    pushed_out.append(sequence)
        self._forget_pages_of_ended()
        outputs.cancelling.extendleft(reversed(self.cancelling))
        for entry in self.due:
            heapq.heappush(outputs.due, entry)
        there = {*outputs.requests.values(), *self._requests} - self.added
        running = [sequence for sequence in self._running if sequence not in pushed_out]
        outputs.rebuild(sorted(there, key=lambda request: request.number), running)
        self._counters.put_back(self._counted)
        self._counters.preemptions += len(pushed_out)
        self._counters.swaps += sum(sequence.swapped is not None for sequence in pushed_out)

    def _forget_pages_of_ended(self) -> None:
        """Cancelled and late requests end again, and keep no page: a pass behind their end may have written to it."""
        late = {number for _, number, _, _ in self.due}
        for request in self._requests:
            if request in self.cancelling or request.number in late:
                for sequence in request.sequences:
                    sequence.keys = []


def _saved(sequence: PagedSequence) -> Any:
    fields = {name: getattr(sequence, name) for name in FIELDS}
    pages = {name: list(getattr(sequence, name)) for name in LISTS}
    pages |= {name: getattr(sequence, name) for name in STORED}
    writer = None if sequence.writer is None else sequence.writer.state
    taken = None if sequence.random is None else sequence.random.taken
    return fields, pages, len(sequence), len(sequence.written), writer, taken


def _put_back(sequence: PagedSequence, saved: Any) -> bool:
    """Restores a sequence; returns whether it was preempted meanwhile, and stays so."""
    fields, pages, length, written, writer, taken = saved
    pushed_out: bool = sequence.preemptions > pages["preemptions"]
    vars(sequence).update(fields)
    for name, value in () if pushed_out else pages.items():
        setattr(sequence, name, list(value) if name in LISTS else value)
    sequence.cut(length)
    del sequence.written[written:]
    sequence.contents = []  # recomputed on demand, as are drafts
    if sequence.writer is not None:
        sequence.writer.state = writer
    if sequence.random is not None:
        sequence.random.rewind(taken)
    if sequence.drafts is not None:
        sequence.drafts = NGramIndex(sequence.drafts.sizes[0], sequence.drafts.sizes[-1])
    return pushed_out


Method = TypeVar("Method", bound=Callable[..., Any])


class EngineFullError(RuntimeError):
    """``max_waiting`` requests are waiting; add this one again later."""


@dataclass(frozen=True, eq=False)
class Turn:
    """State of an engine between or in its calls; replaced as a whole, so that a call is done or is not.

    Attributes:
        pending: events not returned yet.
        is_open: whether a call is running or was interrupted; `Undo` has its changes.
    """

    pending: tuple[Event, ...] = ()
    is_open: bool = False


def whole(method: Method) -> Method:
    """Makes a method of an engine atomic; it may change ``_left``, the events still pending."""
    notes = method.__name__ in ("step", "_advance", "_close", "clear_prefixes")

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        self._put_back()
        turn = Turn(self._turn.pending, True)
        self._undo.begin(self._outputs.scheduler.running, noted=notes)
        try:
            self._turn, self._left = turn, turn.pending
            result = method(self, *args, **options)
            self._turn = Turn(self._left)
            return result
        except BaseException:
            self._turn = turn
            self._put_back(mine=True)
            raise

    return cast(Method, call)


def _is_under_way(turn: Turn) -> bool:
    """Whether the call of an open turn still runs, in any thread, rather than having been interrupted."""
    return is_running(turn, __file__, "call")
