"""EngineCore: one step of an engine, from scheduling to events.

An error fails only the requests it concerns: one of the model those in the pass; bytes that cannot be moved, a
tokenizer, or logits that are not finite a single request.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence

import torch

from caramba_fast.infer.output import percentiles
from caramba_fast.models.identity import AdaptersInUse
from caramba_fast.serve.block_manager import StorageError
from caramba_fast.serve.metrics import EngineMetrics
from caramba_fast.serve.model_runner import Choice, ModelRunner
from caramba_fast.serve.output_processor import OutputProcessor
from caramba_fast.serve.request import Event, PagedSequence
from caramba_fast.serve.scheduler import Scheduler, Work


class EngineCore:
    """Takes steps: ends due requests, schedules tokens, runs the model, and emits events."""

    def __init__(self, runner: ModelRunner, outputs: OutputProcessor) -> None:
        self.runner, self.outputs = runner, outputs
        self.scheduler, self.counters = outputs.scheduler, outputs.counters
        self._process: int | None = None
        self._adapters = AdaptersInUse(runner.model)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Event]:
        """Runs one forward pass; returns its events, and those of requests that ended before it.

        Raises RuntimeError in a process forked from the one that used the engine, where torch would hang.
        """
        self._check_process()
        self._check_adapters()
        began = time.monotonic()
        self.scheduler.blocks.begin_step()
        events = self.outputs.end_early(began)
        works, failed = self._scheduled()
        events += failed
        if works:
            for work in works:
                work.sequence.request.times.scheduled(began)
            try:
                choices = self.runner.run(works)
            except Exception as error:
                for request in dict.fromkeys(work.sequence.request for work in works):
                    events += self.outputs.end(request, "error", error)
            else:
                events += self._advance(works, choices, time.monotonic())
        self.counters.busy_s += time.monotonic() - began
        return events

    def _check_process(self) -> None:
        """OpenMP threads do not survive a fork, and torch would wait for them for ever."""
        here = os.getpid()
        if self._process not in (None, here) and torch.get_num_threads() > 1:
            raise RuntimeError(
                f"the engine was used in process {self._process}, from which this one was forked; torch's threads are "
                "gone and would be waited for. Call torch.set_num_threads(1) here, or start the process with 'spawn'"
            )
        self._process = here

    def _check_adapters(self) -> None:
        """Forgets cached prefixes if the active adapters of the model have changed.

        All modules are searched while sequences wait, since only those look up pages.
        """
        if not self.scheduler.waiting and self._adapters.unchanged():
            return
        found = AdaptersInUse(self.runner.model)
        if not found.same_as(self._adapters):
            self.scheduler.blocks.pages.forget_all()
            if any(sequence.cached for sequence in self.scheduler.sequences):
                warnings.warn(
                    "the model uses other adapters than those that requests under way were read with so far: what is "
                    "cached of them stays as it is; cancel them, and add them again, for what the model says now",
                    stacklevel=2,
                )
        self._adapters = found

    def _scheduled(self) -> tuple[list[Work], list[Event]]:
        """The work of the next forward pass; none, but events, if a request ends whose pages could not be moved for it.

        A pass would write to the pages it had, and if interrupted bring the request back without them.
        """
        try:
            return self.scheduler.schedule(), []
        except StorageError as error:
            return [], self.outputs.end(error.sequence.request, "error", error)

    def _advance(
        self, works: Sequence[Work], choices: dict[PagedSequence, list[Choice]], now: float
    ) -> list[Event]:
        """Records what was cached and chosen; returns the events."""
        events = []
        for work in works:
            if work.sequence.finish_reason is not None:
                continue  # another sequence of its request has failed in this step
            try:
                events += self._give(work, choices.get(work.sequence, []), now)
            except Exception as error:
                events += self.outputs.end(work.sequence.request, "error", error)
        return events

    def _give(self, work: Work, chosen: Sequence[Choice], now: float) -> list[Event]:
        """Records what one sequence has cached and chosen; raises if no token can be chosen or its tokenizer fails."""
        sequence = work.sequence
        for choice in chosen:
            if choice.error is not None:
                raise choice.error
        accepted = min(len(chosen[0].tokens) - 1, sequence.left - 1) if chosen else 0
        cached = sequence.cached + work.count + accepted
        self.counters.drafted += len(work.draft)
        self.counters.accepted += accepted
        if chosen[1:]:
            self._fork(sequence, cached, [choice.sequence for choice in chosen[1:]])
        for choice in chosen:
            self._push(choice)
        self.scheduler.mark_cached(sequence, min(cached, len(sequence)))
        if chosen:
            self.counters.got_token(sequence.request.times, now)
        return [self.outputs.emit(choice.sequence) for choice in chosen]

    def _fork(self, sequence: PagedSequence, cached: int, others: Sequence[PagedSequence]) -> None:
        """Lets the other sequences hold the prompt's pages too, before the first can end."""
        self.scheduler.mark_cached(sequence, cached)
        for other in others:
            sequence.request.sequences.append(other)  # a fork that fails ends with its request
            self.scheduler.fork(sequence, other)

    def _push(self, choice: Choice) -> None:
        """Adds tokens until the sequence ends."""
        sequence = choice.sequence
        for place, token in enumerate(choice.tokens):
            sequence.push(token)
            sequence.logprobs += choice.logprobs[place : place + 1]
            self.counters.new_tokens += 1
            if sequence.writer is not None:
                sequence.writer.put(token)
            sequence.finish_reason = sequence.request.stopping.after(sequence)
            if sequence.finish_reason is not None:
                return


def engine_metrics(scheduler: Scheduler) -> EngineMetrics:
    """The metrics of an engine so far."""
    counted, pool = scheduler.counters, scheduler.pool
    ttft, gaps = percentiles(counted.ttft), percentiles(counted.gaps)
    prompts = counted.prompt_tokens
    return EngineMetrics(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        prefix_hit_rate=counted.prefix_hit_tokens / prompts if prompts else 0.0,
        pages=pool.num_pages,
        pages_held=scheduler.blocks.pages.held,
        pages_kept=scheduler.blocks.pages.kept,
        cache_bytes=pool.nbytes,
        swapped_bytes=scheduler.blocks.swapped_bytes,
        tokens_per_s=counted.new_tokens / counted.busy_s if counted.busy_s else float("nan"),
        ttft_p50_s=ttft[0],
        ttft_p99_s=ttft[1],
        inter_token_p50_s=gaps[0],
        inter_token_p99_s=gaps[1],
        **counted.saved(),
    )
