"""Stepper: one step of an engine, from what is scheduled to what is told of it.

Whatever fails, fails for the requests it concerns: the model for those in the pass, bytes that cannot be moved, a
tokenizer or logits that are no numbers for one.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from caramba_fast.cache import PagePool, RaggedBatch, Stretch
from caramba_fast.serve.books import Books
from caramba_fast.serve.choosing import Choice, choose
from caramba_fast.serve.holdings import StorageError
from caramba_fast.serve.intake import Intake
from caramba_fast.serve.request import Answer, Event, Request
from caramba_fast.serve.scheduler import Work


class Stepper:
    """Takes steps.

    Args:
        model: takes ragged batches.
        pool: where keys and values are.
        intake: makes the further answers to a prompt.
        books: the requests.
    """

    def __init__(self, model: Any, pool: PagePool, intake: Intake, books: Books) -> None:
        self.model, self.pool, self.intake, self.books = model, pool, intake, books
        self.scheduler, self.counters = books.scheduler, books.counters
        self._process: int | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Event]:
        """One forward pass; what it brought, and what ended before it.

        Raises:
            RuntimeError: the process was forked from the one that used the engine, and torch would hang.
        """
        self._check_process()
        began = time.monotonic()
        events = self.books.end_early(began)
        works, failed = self._scheduled()
        events += failed
        if works:
            for work in works:
                work.answer.request.times.scheduled(began)
            try:
                choices = self._forward(works)
            except Exception as error:
                for request in dict.fromkeys(work.answer.request for work in works):
                    events += self.books.end(request, "error", error)
            else:
                events += self._advance(works, choices, time.monotonic())
        self.counters.busy_s += time.monotonic() - began
        return events

    def _check_process(self) -> None:
        """Threads of OpenMP do not survive a fork, and whoever waits for them waits for ever."""
        here = os.getpid()
        if self._process not in (None, here) and torch.get_num_threads() > 1:
            raise RuntimeError(
                f"the engine was used in process {self._process}, from which this one was forked; torch's threads are "
                "gone and would be waited for. Call torch.set_num_threads(1) here, or start the process with 'spawn'"
            )
        self._process = here

    def _scheduled(self) -> tuple[list[Work], list[Event]]:
        """What the next forward pass reads, and the ends of those whose pages could not be moved for it."""
        events: list[Event] = []
        while True:
            try:
                return self.scheduler.schedule(), events
            except StorageError as error:
                events += self.books.end(error.answer.request, "error", error)

    def _forward(self, works: Sequence[Work]) -> dict[Answer, list[Choice]]:
        """The model over everything scheduled; what each answer has chosen, and those that branch off from it."""
        tokens = [work.tokens for work in works]
        stretches = [
            Stretch(work.answer.cached, len(fed), work.answer.pages)
            for work, fed in zip(works, tokens, strict=True)
        ]
        rows: list[int] = []
        choices: dict[Answer, list[Choice]] = {}
        end = 0
        for work, fed in zip(works, tokens, strict=True):
            end += len(fed)
            if work.is_whole:
                choices[work.answer] = [
                    Choice(answer, work.draft, len(rows))
                    for answer in (work.answer, *self.intake.branches(work.answer))
                ]
                rows += range(end - len(work.draft) - 1, end)
        device = self.model.device
        ids = torch.tensor(list(itertools.chain(*tokens)), device=device)
        batch = RaggedBatch(stretches, self.pool)
        logits = self.model.forward_ragged(
            ids, batch, torch.tensor(rows, dtype=torch.int64, device=device)
        )
        if rows:
            choose(logits, list(itertools.chain(*choices.values())))
        self.counters.steps += 1
        self.counters.step_tokens += end
        return choices

    def _advance(
        self, works: Sequence[Work], choices: dict[Answer, list[Choice]], now: float
    ) -> list[Event]:
        """Takes note of what was cached and chosen."""
        events = []
        for work in works:
            if work.answer.reason is not None:
                continue  # another answer to its prompt has failed in this step
            try:
                events += self._give(work, choices.get(work.answer, []), now)
            except Exception as error:
                events += self.books.end(work.answer.request, "error", error)
        return events

    def _give(self, work: Work, chosen: Sequence[Choice], now: float) -> list[Event]:
        """Takes note of what one answer has cached and chosen.

        Raises:
            Exception: nothing can be chosen for it, or its tokenizer fails.
        """
        answer = work.answer
        for choice in chosen:
            if choice.error is not None:
                raise choice.error
        accepted = min(len(chosen[0].tokens) - 1, answer.left - 1) if chosen else 0
        cached = answer.cached + work.count + accepted
        self.counters.drafted += len(work.draft)
        self.counters.accepted += accepted
        if chosen[1:]:
            self._fork(answer, cached, [choice.answer for choice in chosen[1:]])
        for choice in chosen:
            self._push(choice.answer, choice.tokens)
        self.scheduler.settle(answer, min(cached, len(answer.history)))
        if chosen:
            self._note_time(answer.request, now)
        return [self.books.told(choice.answer) for choice in chosen]

    def _fork(self, answer: Answer, cached: int, others: Sequence[Answer]) -> None:
        """The other answers hold the prompt's pages too, before the first can end."""
        self.scheduler.settle(answer, cached)
        for other in others:
            self.scheduler.fork(answer, other)
            answer.request.answers.append(other)

    def _note_time(self, request: Request, now: float) -> None:
        gap = request.times.got_token(now)
        if gap is None:
            self.counters.ttft.append(now - request.times.arrived)
        elif gap > 0.0:
            self.counters.gaps.append(gap)

    def _push(self, answer: Answer, tokens: Sequence[int]) -> None:
        """Adds tokens up to where the answer ends."""
        for token in tokens:
            answer.history.push(token)
            self.counters.new_tokens += 1
            if answer.writer is not None:
                answer.writer.put(token)
            answer.reason = answer.stopping.after(token, answer.history, answer.new, 0)
            if answer.reason is not None:
                return
