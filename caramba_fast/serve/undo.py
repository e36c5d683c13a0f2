"""Undo: what a call changes, as it was before, so that an interrupt at any moment leaves nothing half done.

A call notes what it is about to change of a request, changes it, and is done with one assignment
(`Engine`). Where it does not get there, because of Ctrl-C or a fault, the requests are put back, and all that follows
from them (lists, counts of pages, what is known of pages) is worked out anew. What stands in pages a sequence
kept need not be put back: the same tokens are written to the same places again. A sequence that had to give its pages
away stays without them, since others may have written there: it goes on from host memory, or is read again.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

from caramba_fast.infer.lookup import NGramIndex
from caramba_fast.infer.sequence import FinishReason
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import Event, PagedSequence, Request

#: What is put back as it is.
FIELDS = (
    "finish_reason", "prefix_hit", "emitted", "told", "is_over", "epoch", "ticket", "furthest", "turn", "turn_start",
)  # fmt: skip
#: What says where its tokens are stored, of which lists are copied.
STORED, LISTS = ("cached", "ring", "swapped", "preemptions"), ("pages", "keys")


class Undone(Protocol):
    """What `Undo.put_back` puts right: an `OutputProcessor`."""

    requests: dict[str, Request]
    cancelling: deque[Request]
    due: list[tuple[float, int, str, FinishReason]]

    def rebuild(self, requests: Sequence[Request], running: list[PagedSequence]) -> None:
        """Works everything out anew from the requests under way and the sequences that ran."""


class Undo:
    """What one call has changed.

    Args:
        counters: what is counted.

    Attributes:
        added: requests that were not there before.
        cancelling: those taken off the list of what is to end.
        due: entries taken off the heap of deadlines.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.begin((), noted=False)

    def begin(self, running: Sequence[PagedSequence], noted: bool) -> None:
        """A call begins while these sequences run; their requests are ``noted`` if it may change any of them."""
        self.may_be_anything = noted
        self._requests: dict[Request, Any] = {}
        self.added: set[Request] = set()
        self.cancelling: list[Request] = []
        self.due: list[tuple[float, int, str, FinishReason]] = []
        self._running, self._counted = list(running), self._counters.saved()
        for sequence in running if noted else ():
            self.keep(sequence.request)

    def keep(self, request: Request) -> None:
        """Notes a request before anything of it changes."""
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
        """Everything is as it was when the call began; may be done again if it is interrupted itself."""
        pushed_out: list[PagedSequence] = []
        for request, (begun, error, times, sequences) in self._requests.items():
            request.begun, request.error = begun, error
            request.times.put_back(times)
            request.sequences = [sequence for sequence, _ in sequences]
            for sequence, saved in sequences:
                if _put_back(sequence, saved):
                    pushed_out.append(sequence)
        outputs.cancelling.extendleft(reversed(self.cancelling))
        for entry in self.due:
            heapq.heappush(outputs.due, entry)
        there = {*outputs.requests.values(), *self._requests} - self.added
        running = [sequence for sequence in self._running if sequence not in pushed_out]
        outputs.rebuild(sorted(there, key=lambda request: request.number), running)
        self._counters.put_back(self._counted)
        self._counters.preemptions += len(pushed_out)
        self._counters.swaps += sum(sequence.swapped is not None for sequence in pushed_out)


def _saved(sequence: PagedSequence) -> Any:
    fields = {name: getattr(sequence, name) for name in FIELDS}
    pages = {name: list(getattr(sequence, name)) for name in LISTS}
    pages |= {name: getattr(sequence, name) for name in STORED}
    writer = None if sequence.writer is None else sequence.writer.state
    taken = None if sequence.random is None else sequence.random.taken
    return fields, pages, len(sequence), len(sequence.written), writer, taken


def _put_back(sequence: PagedSequence, saved: Any) -> bool:
    """Puts a sequence back; whether it has given its pages away meanwhile, and stays so."""
    fields, pages, length, written, writer, taken = saved
    pushed_out: bool = sequence.preemptions > pages["preemptions"]
    vars(sequence).update(fields)
    for name, value in () if pushed_out else pages.items():
        setattr(sequence, name, list(value) if name in LISTS else value)
    sequence.cut(length)
    del sequence.written[written:]
    sequence.contents = []  # what its pages would contain is worked out again, and so are drafts
    if sequence.writer is not None:
        sequence.writer.state = writer
    if sequence.random is not None:
        sequence.random.rewind(taken)
    if sequence.drafts is not None:
        sequence.drafts = NGramIndex(sequence.drafts.sizes[0], sequence.drafts.sizes[-1])
    return pushed_out


Method = TypeVar("Method", bound=Callable[..., Any])


class EngineFullError(RuntimeError):
    """As many requests wait as may; add this one again later."""


@dataclass(frozen=True, eq=False)
class Turn:
    """Where an engine is between its calls, or in one; replaced as a whole, so that a call is done or is not.

    Attributes:
        pending: events nobody has been given.
        is_open: whether a call is under way, or was interrupted: what it changed is in `Undo`.
    """

    pending: tuple[Event, ...] = ()
    is_open: bool = False


def whole(method: Method) -> Method:
    """A method of an engine that is done, or has changed nothing; it may change ``_left``, the events still pending."""
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
    """Whether the call of an open turn goes on, in any thread, or was left half done."""
    for newest in sys._current_frames().values():
        frame: FrameType | None = newest
        while frame is not None:
            whole = frame.f_code.co_filename == __file__ and frame.f_code.co_name == "call"
            if whole and frame.f_locals.get("turn") is turn:
                return True
            frame = frame.f_back
    return False
