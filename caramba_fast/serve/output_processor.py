"""OutputProcessor: the live requests, their deadlines, and the events they emit."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence

from caramba_fast.infer.sequence import FinishReason
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import ENDED_BADLY, Event, PagedSequence, Request, RequestOutput
from caramba_fast.serve.scheduler import Scheduler
from caramba_fast.serve.undo import Undo


class OutputProcessor:
    """The requests of an engine.

    Attributes:
        requests: live requests by id, oldest first.
        cancelling: requests to cancel with the next step.
        due: a heap of (deadline, request number, id, finish reason).
    """

    def __init__(self, scheduler: Scheduler, counters: Counters, undo: Undo) -> None:
        self.scheduler, self.counters, self.undo = scheduler, counters, undo
        self.requests: dict[str, Request] = {}
        self.cancelling: deque[Request] = deque()
        self.due: list[tuple[float, int, str, FinishReason]] = []

    def enter(self, request: Request, deadline: float | None) -> None:
        """Adds a request to the waiting ones; ``deadline`` is in seconds from its arrival."""
        name = request.request_id
        self.undo.added.add(request)
        self.requests[name] = request
        limits: dict[FinishReason, float | None] = dict(
            deadline=deadline, time=request.config.max_time
        )
        for why, seconds in limits.items():
            if seconds is not None:
                entry = (request.times.arrived + seconds, request.number, name, why)
                heapq.heappush(self.due, entry)
        self.scheduler.add(request.sequences[0])

    @property
    def next_due(self) -> float | None:
        """Time (``time.monotonic``) of the next deadline or max_time; None without any."""
        return self.due[0][0] if self.due else None

    @property
    def anything_to_do(self) -> bool:
        """Whether a request can be scheduled or is to end."""
        due = self.next_due
        if self.cancelling or (due is not None and due <= time.monotonic()):
            return True
        return any(not request.paused for request in self.requests.values())

    def end(
        self, request: Request, reason: FinishReason, error: BaseException | None = None
    ) -> list[Event]:
        """Ends all sequences of a request whose end was not emitted; those that have not begun never will."""
        self.undo.keep(request)
        if error is not None:
            request.error = f"{type(error).__name__}: {error}"
        going = [sequence for sequence in request.sequences if not sequence.is_over]
        for sequence in going:
            sequence.finish_reason = reason
            self.scheduler.remove(sequence)
        request.begun = True
        return [self.emit(sequence) for sequence in going]

    def end_early(self, now: float | None = None) -> list[Event]:
        """Ends cancelled and late requests; the first part of every step."""
        now = time.monotonic() if now is None else now
        events: list[Event] = []
        while self.cancelling:
            request = self.cancelling[0]
            self.undo.cancelling.append(request)
            self.cancelling.popleft()
            if not request.is_over:
                events += self.end(request, "cancelled")
        while self.due and self.due[0][0] <= now:
            self.undo.due.append(self.due[0])
            _, number, name, why = heapq.heappop(self.due)
            late = self.requests.get(name)
            if late is not None and late.number == number:
                events += self.end(late, why)
        if len(self.due) > 64 + 4 * len(self.requests):  # mostly requests that ended long before
            numbers = {request.number for request in self.requests.values()}
            self.due = sorted(entry for entry in self.due if entry[1] in numbers)
        return events

    def emit(self, sequence: PagedSequence) -> Event:
        """The event with a sequence's new tokens; at its end its pages are freed, and its request may be over."""
        request, output = sequence.request, None
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)
            sequence.is_over = True
            self._close_text(sequence)
            if request.is_over:
                output = self._close(request)
        new = list(sequence.tokens[len(request.prompt) + sequence.emitted :])
        pieces = tuple(sequence.written[sequence.emitted_pieces :])
        logprobs, reason = sequence.logprobs[sequence.emitted :], sequence.finish_reason
        ending = request.stopping.stop_text(sequence) if reason == "stop" else ""
        event = Event(
            request.request_id, sequence.index, new, "".join(pieces), reason, output, logprobs, pieces, ending
        )  # fmt: skip
        sequence.emitted += len(new)
        sequence.emitted_pieces = len(sequence.written)
        return event

    def _close_text(self, sequence: PagedSequence) -> None:
        """Writes the rest of its text; an error of the tokenizer is noted in the request."""
        try:
            if sequence.writer is not None:
                sequence.writer.close()
        except Exception as error:
            request = sequence.request
            request.error = request.error or f"{type(error).__name__}: {error}"

    def _close(self, request: Request) -> RequestOutput:
        del self.requests[request.request_id]
        ends = {sequence.finish_reason for sequence in request.sequences}
        bad = ends & set(ENDED_BADLY)
        self.counters.cancelled += bad == {"cancelled"}
        self.counters.failed += bool(bad - {"cancelled"})
        self.counters.finished += not bad
        return request.output()

    def rebuild(self, requests: Sequence[Request], running: list[PagedSequence]) -> None:
        """Recomputes everything after an interrupt, from the live requests and the sequences that ran."""
        self.requests = {request.request_id: request for request in requests}
        going = [a for request in requests for a in request.sequences if a.finish_reason is None]
        self.scheduler.rebuild(going, running)

    def problems(self) -> list[str]:
        """Inconsistencies of pages and requests; empty unless there is a bug."""
        there = {sequence.request.request_id for sequence in self.scheduler.sequences}
        found = self.scheduler.problems()
        if there != set(self.requests):
            found.append(f"requests {sorted(there ^ set(self.requests))} are lost or left over")
        return found
