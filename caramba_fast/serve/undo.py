"""Undo: what a call changes, as it was before, so that an interrupt at any moment leaves nothing half done.

A call notes what it is about to change of a request, changes it, and is done with one assignment
(`Engine`). Where it does not get there, because of Ctrl-C or a fault, the requests are put back, and all that follows
from them (lists, counts of pages, what is known of pages) is worked out anew. What stands in pages an answer
kept need not be put back: the same tokens are written to the same places again. An answer that had to give its pages
away stays without them, since others may have written there: it goes on from host memory, or is read again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from caramba_fast.infer.drafts import NGramIndex
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import Answer, Request

if TYPE_CHECKING:
    from caramba_fast.serve.output_processor import Books

#: What is put back as it is.
FIELDS = ("reason", "hit", "told", "is_over", "epoch", "ticket", "furthest", "turn", "said")
#: What says where its tokens are stored, of which lists are copied.
STORED, LISTS = ("cached", "swapped", "preemptions"), ("pages", "keys")


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

    def begin(self, running: Sequence[Answer], noted: bool) -> None:
        """A call begins while these answers run; their requests are ``noted`` if it may change any of them."""
        self.may_be_anything = noted
        self._requests: dict[Request, Any] = {}
        self.added: set[Request] = set()
        self.cancelling: list[Request] = []
        self.due: list[tuple[float, int, str, str]] = []
        self._running, self._counted = list(running), self._counters.saved()
        for answer in running if noted else ():
            self.keep(answer.request)

    def keep(self, request: Request) -> None:
        """Notes a request before anything of it changes."""
        if request not in self._requests:
            answers = [(answer, _saved(answer)) for answer in request.answers]
            times = request.times.saved()
            self._requests[request] = (request.begun, request.error, times, answers)

    @property
    def is_empty(self) -> bool:
        """Whether nothing can have changed."""
        changed = self._requests or self.added or self.cancelling or self.due
        return not (self.may_be_anything or changed)

    def put_back(self, books: Books) -> None:
        """Everything is as it was when the call began; may be done again if it is interrupted itself."""
        pushed_out: list[Answer] = []
        for request, (begun, error, times, answers) in self._requests.items():
            request.begun, request.error = begun, error
            request.times.put_back(times)
            request.answers = [answer for answer, _ in answers]
            for answer, saved in answers:
                if _put_back(answer, saved):
                    pushed_out.append(answer)
        books.cancelling.extendleft(reversed(self.cancelling))
        for entry in self.due:
            heapq.heappush(books.due, entry)
        there = {*books.requests.values(), *self._requests} - self.added
        running = [answer for answer in self._running if answer not in pushed_out]
        books.rebuild(sorted(there, key=lambda request: request.number), running)
        self._counters.put_back(self._counted)
        self._counters.preemptions += len(pushed_out)
        self._counters.swaps += sum(answer.swapped is not None for answer in pushed_out)


def _saved(answer: Answer) -> Any:
    fields = {name: getattr(answer, name) for name in FIELDS}
    pages = {name: list(getattr(answer, name)) for name in LISTS}
    pages |= {name: getattr(answer, name) for name in STORED}
    writer = None if answer.writer is None else answer.writer.state
    taken = None if answer.points is None else answer.points.taken
    return fields, pages, len(answer.history), list(answer.written), writer, taken


def _put_back(answer: Answer, saved: Any) -> bool:
    """Puts an answer back; whether it has given its pages away meanwhile, and stays so."""
    fields, pages, length, written, writer, taken = saved
    pushed_out: bool = answer.preemptions > pages["preemptions"]
    vars(answer).update(fields)
    for name, value in () if pushed_out else pages.items():
        setattr(answer, name, list(value) if name in LISTS else value)
    answer.history.cut(length)
    answer.written[:] = written
    answer.contents = []  # what its pages would contain is worked out again, and so are drafts
    if answer.writer is not None:
        answer.writer.state = writer
    if answer.points is not None:
        answer.points.rewind(taken)
    if answer.drafts is not None:
        answer.drafts = NGramIndex(answer.drafts.sizes[0], answer.drafts.sizes[-1])
    return pushed_out
