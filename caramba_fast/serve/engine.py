"""Engine: many requests at once over one paged cache, each answered as if it were alone.

A step is: end what was cancelled or is late, schedule tokens, one forward pass over all of them, choose the next
tokens, tell. Requests come and go between steps, so that none waits for the longest.

Stepper: one step of an engine, from what is scheduled to what is told of it.

Whatever fails, fails for the requests it concerns: the model for those in the pass, bytes that cannot be moved, a
tokenizer or logits that are no numbers for one.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from caramba_fast.cache import PagePool, RaggedBatch, Stretch
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.serve.block_manager import StorageError
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.input_processor import Intake, Prepared, pool_for, servable, shareable
from caramba_fast.serve.metrics import Counters, EngineMetrics
from caramba_fast.serve.model_runner import Choice, choose
from caramba_fast.serve.output_processor import Books
from caramba_fast.serve.request import Answer, Event, Request, RequestOutput, percentiles
from caramba_fast.serve.scheduler import Scheduler, Work
from caramba_fast.serve.undo import Undo

if TYPE_CHECKING:
    from caramba_fast.serve.request import Request
    from caramba_fast.serve.scheduler import Scheduler


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


Method = TypeVar("Method", bound=Callable[..., Any])


class EngineFullError(RuntimeError):
    """As many requests wait as may; add this one again later."""


@dataclass(frozen=True, eq=False)
class _Turn:
    """Where an engine is between its calls, or in one; replaced as a whole, so that a call is done or is not.

    Attributes:
        untold: events nobody has been given.
        is_open: whether a call is under way, or was interrupted: what it changed is in `Undo`.
    """

    untold: tuple[Event, ...] = ()
    is_open: bool = False


def _whole(method: Method) -> Method:
    """A method of an engine that is done, or has changed nothing; it may change ``_left``, the events still untold."""
    notes = method.__name__ in ("step", "_advance", "_close", "clear_prefixes")

    @wraps(method)
    def call(self: Engine, *args: Any, **options: Any) -> Any:
        self._put_back()
        turn = _Turn(self._turn.untold, True)
        self._undo.begin(self._books.scheduler.running, noted=notes)
        try:
            self._turn, self._left = turn, turn.untold
            result = method(self, *args, **options)
            self._turn = _Turn(self._left)
            return result
        except BaseException:
            self._turn = turn
            self._put_back(mine=True)
            raise

    return cast(Method, call)


def _is_under_way(turn: _Turn) -> bool:
    """Whether the call of an open turn goes on, in any thread, or was left half done."""
    for newest in sys._current_frames().values():
        frame: FrameType | None = newest
        while frame is not None:
            whole = frame.f_code.co_filename == __file__ and frame.f_code.co_name == "call"
            if whole and frame.f_locals.get("turn") is turn:
                return True
            frame = frame.f_back
    return False


class Engine:
    """Continuous batching over a paged, shared cache.

    Args:
        model: the native `Transformer`, or a causal language model of transformers whose attention reads packed
            caches (`caramba_fast.hf`).
        config: how the cache is stored, and what requests get that say nothing else. Pages are shared between
            requests, so fp16 tails and sinks are left out (``cache_residual_len`` and ``cache_sink_len`` are 0) and
            prompts are read as with ``prefill="stored"``.
        settings: memory, limits and policies; by default `EngineConfig()`.
        tokenizer: a path, a `tokenizers.Tokenizer` or a transformers tokenizer; needed for text in or out.
        overrides: fields of either.

    Raises:
        TypeError: a model that cannot take a ragged batch, and what it lacks.
        ValueError: settings that are wrong in themselves, for this model, or for an engine.
    """

    def __init__(
        self,
        model: Any,
        config: GenerateConfig | None = None,
        settings: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        **overrides: Any,
    ) -> None:
        own = {name: overrides.pop(name) for name in EngineConfig.model_fields if name in overrides}
        given = (settings or EngineConfig()).model_dump(exclude_unset=True)
        self.settings = EngineConfig(**{**given, **own})
        self.config = shareable((config or GenerateConfig()).updated(**overrides))
        self.model: Any = servable(model, self.config.max_seq_len)
        self.tokenizer = None if tokenizer is None else TextTokenizer.of(tokenizer)
        self.pool = pool_for(self.model, self.config, self.settings)
        self._intake = Intake(
            self.model, self.config, self.settings, self.tokenizer, self.pool.num_pages
        )
        self._intake.check(self.config)
        self._undo, self._turn = Undo(counters := Counters()), _Turn()
        self._left: tuple[Event, ...] = ()
        scheduler = Scheduler(self.settings, self.pool, counters, self._undo)
        decode = None if self.tokenizer is None else self.tokenizer.decode
        self._books = Books(scheduler, counters, self._undo, decode)
        self._stepper = Stepper(self.model, self.pool, self._intake, self._books)
        self._numbers, self._names = itertools.count(), itertools.count()
        #: The `AsyncEngine` whose engine it is, if any.
        self.driver: Any = None

    # -- requests -----------------------------------------------------------------------

    @_whole
    def add_request(
        self,
        prompt: str | Sequence[int] | Tensor,
        config: GenerateConfig | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        cache_salt: str | None = None,
        **overrides: Any,
    ) -> str:
        """Takes a request on.

        Args:
            prompt: token ids (T,), or text if there is a tokenizer.
            config: settings of its generation; by default the engine's. Answer i of ``num_return_sequences`` is
                the one ``seed + i`` gives alone.
            request_id: a name; by default one is made.
            deadline: seconds from now after which it is ended as it is.
            cache_salt: who shares its prefixes: requests of the same salt, as in vLLM. By default that of the
                engine, and without one nobody.
            overrides: fields of GenerateConfig to change.

        Returns:
            its id.

        Raises:
            ValueError, TypeError: an empty prompt, one that cannot fit, an id that is in use, or settings that
                do not go with an engine; the request is not taken on.
            EngineFullError: ``max_waiting`` requests wait.
        """
        prepared = self._intake.prepared(
            prompt,
            config,
            request_id=request_id,
            deadline=deadline,
            cache_salt=cache_salt,
            **overrides,
        )
        return self._enter(prepared)

    @property
    def _untold(self) -> tuple[Event, ...]:
        return self._turn.untold

    def _put_back(self, mine: bool = False) -> None:
        """Undoes a call that was interrupted; ``mine`` if it is the one that asks.

        Raises:
            RuntimeError: a call is under way, in this thread or another.
        """
        turn = self._turn
        if not turn.is_open:
            return
        if not mine and _is_under_way(turn):
            raise RuntimeError("a step is under way; an engine takes one call at a time")
        if not self._undo.is_empty:
            self._undo.put_back(self._books)
        self._turn = _Turn(turn.untold)

    def prepared(self, prompt: Any, config: Any = None, **options: Any) -> Prepared:
        """A request that was checked, for `take_on`; arguments and errors as in `add_request`."""
        return self._intake.prepared(prompt, config, **options)

    @_whole
    def take_on(self, prepared: Prepared) -> str:
        """Takes a prepared request on; its id.

        Raises:
            ValueError: its id is in use.
            EngineFullError: ``max_waiting`` requests wait.
        """
        return self._enter(prepared)

    def _enter(self, prepared: Prepared, name: str | None = None) -> str:
        name = self._name(prepared.request_id) if name is None else name
        if not self.free_places:
            raise EngineFullError(
                f"max_waiting={self.settings.max_waiting} requests wait already; add this one again later"
            )
        self._books.enter(
            self._intake.request(prepared, name, next(self._numbers)), prepared.deadline
        )
        return name

    def _name(self, request_id: str | None) -> str:
        requests = self._books.requests
        if request_id is None:
            fresh = (f"req_{number}" for number in self._names)
            return next(name for name in fresh if name not in requests)
        if request_id in requests:
            raise ValueError(f"request {request_id!r} is under way; another id is needed")
        return request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request with the next step; it keeps the tokens it has.

        Raises:
            KeyError: no such request is under way.
        """
        self._books.cancelling.append(self._request(request_id))

    cancel_request = cancel

    def pause(self, request_id: str) -> None:
        """Schedules nothing for a request until `resume`; it gives way only where others need its place or pages."""
        self._request(request_id).paused = True

    def resume(self, request_id: str) -> None:
        """Goes on with a paused request."""
        self._request(request_id).paused = False

    def _request(self, request_id: str) -> Request:
        if request_id not in self._books.requests:
            raise KeyError(f"request {request_id!r} is not under way")
        return self._books.requests[request_id]

    def is_under_way(self, request_id: str) -> bool:
        """Whether a request was added and has not ended."""
        return request_id in self._books.requests

    @property
    def under_way(self) -> list[str]:
        """The ids of all requests that have not ended, oldest first."""
        return list(self._books.requests)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is under way."""
        return bool(self._books.requests) or self._turn.is_open

    @property
    def next_due(self) -> float | None:
        """When (``time.monotonic``) the next deadline or max_time is over; None without any."""
        return self._books.next_due

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything: not all requests are paused, or one of them is late."""
        return bool(self._turn.untold) or self._turn.is_open or self._books.anything_to_do

    @property
    def free_places(self) -> int:
        """How many more requests may wait; those that have begun and gave their pages back do not count."""
        return max(0, self.settings.max_waiting - self._books.scheduler.fresh)

    def withdraw(self, request_id: str) -> None:
        """`cancel`, if the request is under way."""
        request = self._books.requests.get(request_id)
        if request is not None:
            self._books.cancelling.append(request)

    def set_paused(self, request_id: str, paused: bool) -> None:
        """`pause` or `resume`, if the request is under way."""
        request = self._books.requests.get(request_id)
        if request is not None:
            request.paused = paused

    # -- steps ---------------------------------------------------------------------------

    @_whole
    def step(self) -> list[Event]:
        """One forward pass; what it brought, and what ended before it.

        A failure of the model fails the requests that took part, and their pages come back; the others go on.

        A step that is interrupted (Ctrl-C, or anything else that comes out of it) has not happened: requests, pages
        and random numbers are as they were before, and the next step is that step, with the same tokens; only answers
        that had to give their pages away in it wait meanwhile. So are `add_request` (nothing is taken on), iterating
        (the events come with the next) and `generate_batch` (its requests are cancelled; the events of others come
        with the next step).

        Raises:
            RuntimeError: a step is under way, in this thread or another.
        """
        events = [*self._untold, *self._stepper.step()]
        self._left = ()
        return events

    @_whole
    def _advance(self, own: Collection[str] = ()) -> list[Event]:
        """A step that returns the events of the ``own`` requests alone; the others stay untold."""
        events = self._stepper.step()
        others = (event for event in events if event.request_id not in own)
        self._left = (*self._untold, *others)
        return [event for event in events if event.request_id in own]

    @_whole
    def end_early(self) -> list[Event]:
        """Ends what was cancelled, or is late; a step begins with it."""
        return self._books.end_early()

    # -- whole runs ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Steps until no request is under way; requests may be added meanwhile, and whoever stops misses nothing.

        Raises:
            RuntimeError: every request is paused.
        """
        return self

    def __next__(self) -> Event:
        """The next event."""
        while not (untold := self._untold):
            if not self.has_unfinished:
                raise StopIteration
            if not self.can_step:
                raise RuntimeError("every request is paused; resume one, or cancel it")
            self._advance()
        try:
            self._turn = _Turn(untold[1:])
            return untold[0]
        except BaseException:
            self._turn = _Turn(untold)
            raise

    def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int] | Tensor],
        config: GenerateConfig | None = None,
        **overrides: Any,
    ) -> list[RequestOutput]:
        """Answers all prompts; what else is under way goes on beside them, and its events come with the next `step`.

        Args:
            prompts, config, overrides: as in `add_request`. Without a ``cache_salt`` they share prefixes with each
                other, and with nobody else.

        Returns:
            what became of each, in order.

        Raises:
            ValueError, TypeError: a prompt or setting that `add_request` refuses; none is answered then.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is text; a list of prompts is needed")
        waiting = list(prompts)
        own: dict[str, None] = {}  # in order
        scope = f"batch {next(self._numbers)}"
        found: dict[str, RequestOutput] = {}
        try:
            checked = [self._intake.prepared(prompt, config, **overrides) for prompt in waiting]
            while len(found) < len(waiting):
                if len(own) == len(found) and not self.free_places and not self.can_step:
                    raise EngineFullError(
                        "every request that waits is paused; resume one, or cancel it"
                    )
                while len(own) < len(waiting) and self.free_places:
                    prepared = checked[len(own)]
                    name = self._name(prepared.request_id)
                    own[name] = None
                    self._take_on_as(name, replace(prepared, scope=prepared.scope or scope))
                for event in self._advance(own):
                    if event.output is not None:
                        found[event.request_id] = event.output
        finally:
            self._close(own, scope)
        return [found[name] for name in own]

    @_whole
    def _take_on_as(self, name: str, prepared: Prepared) -> str:
        return self._enter(prepared, name)

    @_whole
    def _close(self, names: Iterable[str], scope: str) -> None:
        """A batch is over, or given up: nobody wants to hear of its requests, or asks for its pages."""
        for name in names:
            if name in self._books.requests:
                self._books.end(self._books.requests[name], "cancelled")
        self._books.scheduler.holdings.pages.forget_scope(scope)

    # -- figures ------------------------------------------------------------------------

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine has done, and holds now."""
        return engine_metrics(self._books.scheduler)

    @property
    def report(self) -> dict[str, Any]:
        """What is in force: how the cache is stored, and how much of it there is."""
        return {
            **self.settings.model_dump(),
            "cache_kind": self.config.cache_name,
            "cache_bytes": self.pool.nbytes,
            "page_size": self.pool.page_size,
            "num_pages": self.pool.num_pages,
            "cache_tokens": self.pool.page_size * self.pool.num_pages,
            "bytes_per_token": self.pool.page_bytes / self.pool.page_size,
            "left_out": "fp16 tails and sinks: pages are shared between requests",
        }

    @_whole
    def clear_prefixes(self) -> None:
        """Forgets what kept pages hold; for a model whose weights have changed."""
        self._books.scheduler.holdings.pages.forget_all()

    def problems(self) -> list[str]:
        """What is wrong with the bookkeeping of pages and requests; nothing ever should be. For tests and doctors."""
        return self._books.problems()


def engine_metrics(scheduler: Scheduler) -> EngineMetrics:
    """The figures of an engine, so far."""
    counted, pool = scheduler.counters, scheduler.pool
    ttft, gaps = percentiles(counted.ttft), percentiles(counted.gaps)
    prompts = counted.prompt_tokens
    return EngineMetrics(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        steps=counted.steps,
        prompt_tokens=prompts,
        new_tokens=counted.new_tokens,
        step_tokens=counted.step_tokens,
        prefix_hit_tokens=counted.prefix_hit_tokens,
        prefix_hit_rate=counted.prefix_hit_tokens / prompts if prompts else 0.0,
        preemptions=counted.preemptions,
        swaps=counted.swaps,
        drafted=counted.drafted,
        accepted=counted.accepted,
        finished=counted.finished,
        failed=counted.failed,
        pages=pool.num_pages,
        pages_held=scheduler.holdings.pages.held,
        pages_kept=scheduler.holdings.pages.kept,
        cache_bytes=pool.nbytes,
        swapped_bytes=scheduler.holdings.swapped_bytes,
        busy_s=counted.busy_s,
        tokens_per_s=counted.new_tokens / counted.busy_s if counted.busy_s else float("nan"),
        ttft_p50_s=ttft[0],
        ttft_p99_s=ttft[1],
        inter_token_p50_s=gaps[0],
        inter_token_p99_s=gaps[1],
    )
