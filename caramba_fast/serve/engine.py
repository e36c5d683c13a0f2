"""Engine: continuous batching over one paged cache; a request gets the tokens it would get alone.

A step ends cancelled and late requests, schedules tokens, runs one forward pass over all of them, samples, and emits
events. Requests join and leave between steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from caramba_fast.cache import PagePool
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.engine_core import EngineCore, engine_metrics
from caramba_fast.serve.input_processor import (
    InputProcessor,
    Prepared,
    pool_for,
    servable,
    shareable,
)
from caramba_fast.serve.metrics import Counters, EngineMetrics
from caramba_fast.serve.model_runner import ModelRunner
from caramba_fast.serve.output_processor import OutputProcessor
from caramba_fast.serve.prefix_store import store_for
from caramba_fast.serve.request import Event, Request, RequestOutput
from caramba_fast.serve.scheduler import Scheduler
from caramba_fast.serve.undo import EngineFullError, Turn, Undo, _is_under_way, whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.serve.options import CallOptions, EngineOptions, RequestOptions


class EngineRequests:
    """The part of an engine that queries, pauses and cancels requests."""

    config: GenerateConfig
    settings: EngineConfig
    pool: PagePool
    _outputs: OutputProcessor
    _core: EngineCore
    _turn: Turn

    @property
    def _pending(self) -> tuple[Event, ...]:
        return self._turn.pending

    def cancel(self, request_id: str) -> None:
        """Ends a request at the next step; it keeps the tokens it has.

        Raises:
            KeyError: no such request is under way.
        """
        self._outputs.cancelling.append(self._request(request_id))

    cancel_request = cancel

    def pause(self, request_id: str) -> None:
        """Schedules nothing for a request until `resume`; others may preempt it if they need its place or pages.

        Raises KeyError if no such request is under way.
        """
        self._request(request_id).paused = True

    def resume(self, request_id: str) -> None:
        """Resumes a paused request; raises KeyError if no such request is under way."""
        self._request(request_id).paused = False

    def _request(self, request_id: str) -> Request:
        if request_id not in self._outputs.requests:
            raise KeyError(f"request {request_id!r} is not under way")
        return self._outputs.requests[request_id]

    def is_under_way(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return request_id in self._outputs.requests

    @property
    def under_way(self) -> list[str]:
        """The ids of all requests that have not ended, oldest first."""
        return list(self._outputs.requests)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._outputs.requests) or self._turn.is_open

    @property
    def next_due(self) -> float | None:
        """Time (``time.monotonic``) of the next deadline or max_time; None without any."""
        return self._outputs.next_due

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything: not all requests are paused, or one of them is late."""
        return bool(self._turn.pending) or self._turn.is_open or self._outputs.anything_to_do

    @property
    def free_places(self) -> int:
        """How many more requests may wait; preempted ones do not count."""
        return max(0, self.settings.max_waiting - self._outputs.scheduler.fresh)

    def withdraw(self, request_id: str) -> None:
        """`cancel`, if the request is under way."""
        request = self._outputs.requests.get(request_id)
        if request is not None:
            self._outputs.cancelling.append(request)

    def set_paused(self, request_id: str, paused: bool) -> None:
        """`pause` or `resume`, if the request is under way."""
        request = self._outputs.requests.get(request_id)
        if request is not None:
            request.paused = paused

    @property
    def metrics(self) -> EngineMetrics:
        """Counters and current state."""
        return engine_metrics(self._outputs.scheduler)

    @property
    def report(self) -> dict[str, Any]:
        """Settings in force, storage and size of the cache."""
        return {
            **self.settings.model_dump(),
            "cache_kind": self.config.cache_name,
            **self._core.runner.graphs.report,
            "cache_bytes": self.pool.nbytes,
            "page_size": self.pool.page_size,
            "num_pages": self.pool.num_pages,
            "cache_tokens": self.pool.page_size * self.pool.num_pages,
            "bytes_per_token": self.pool.page_bytes / self.pool.page_size,
            "left_out": "fp16 tails: pages are shared between requests",
        }

    def problems(self) -> list[str]:
        """Inconsistencies in the bookkeeping of pages and requests; always empty unless there is a bug."""
        return self._outputs.problems()


class Engine(EngineRequests):
    """Continuous batching over a paged, shared cache.

    It takes one call at a time; `step`, `add_request` and the like raise RuntimeError during another.

    Args:
        model: the native `Transformer`, or a causal language model of transformers whose attention reads packed
            caches (`caramba_fast.hf`).
        config: how the cache is stored, and the default settings of requests. Pages are shared between requests, so
            there are no fp16 tails (``cache_residual_len`` is 0) and prompts are read as with ``prefill="stored"``.
            Each request has its own sinks; those of a shared prefix are kept with its first page.
        settings: memory, limits and policies; by default `EngineConfig()`.
        tokenizer: a path, a `tokenizers.Tokenizer` or a transformers tokenizer; needed for text in or out.
        overrides: fields of either.

    Raises:
        TypeError: the model cannot run a ragged batch; the message says why.
        ValueError: settings that are invalid by themselves, for this model, or for an engine.
    """

    def __init__(
        self,
        model: Any,
        config: GenerateConfig | None = None,
        settings: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        **overrides: Unpack[EngineOptions],
    ) -> None:
        rest: dict[str, Any] = dict(overrides)
        own = {name: rest.pop(name) for name in EngineConfig.model_fields if name in rest}
        given = (settings or EngineConfig()).model_dump(exclude_unset=True)
        self.settings = EngineConfig(**{**given, **own})
        self.config = shareable((config or GenerateConfig()).updated(**rest))
        self.model: Any = servable(model, self.config.max_seq_len)
        self.tokenizer = None if tokenizer is None else TextTokenizer.of(tokenizer)
        self.pool = pool_for(self.model, self.config, self.settings)
        self.inputs = InputProcessor(
            self.model, self.config, self.settings, self.tokenizer, self.pool
        )
        self.inputs.check(self.config)
        self._undo, self._turn = Undo(counters := Counters()), Turn()
        self._left: tuple[Event, ...] = ()
        scheduler = Scheduler(self.settings, self.pool, counters, self._undo)
        self._outputs = OutputProcessor(scheduler, counters, self._undo)
        runner = ModelRunner(self.model, self.pool, self.inputs, counters)
        self._core = EngineCore(runner, self._outputs)
        # Last, so that what cannot be made does not keep the folder locked.
        self.store = scheduler.blocks.store = store_for(self.model, self.pool, self.settings)
        self._numbers, self._names = itertools.count(), itertools.count()
        #: The `AsyncEngine` whose engine it is, if any.
        self.driver: Any = None

    @whole
    def add_request(
        self,
        prompt: str | Sequence[int] | Tensor,
        config: GenerateConfig | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        cache_salt: str | None = None,
        **overrides: Unpack[CallOptions],
    ) -> str:
        """Adds a request.

        Args:
            prompt: token ids (T,), or text if there is a tokenizer.
            config: generation settings; by default the engine's. Answer i of ``num_return_sequences`` is the one that
                ``seed + i`` gives alone.
            request_id: a name; by default one is generated.
            deadline: seconds from now after which it ends with the tokens it has.
            cache_salt: requests of the same salt share prefixes, as in vLLM. By default the engine's; without one it
                shares with nobody.
            overrides: fields of GenerateConfig to change.

        Returns:
            its id.

        Raises:
            ValueError, TypeError: an empty prompt, one that cannot fit, an id that is in use, or settings that
                do not go with an engine; the request is not taken on.
            EngineFullError: ``max_waiting`` requests wait.
        """
        prepared = self.inputs.prepared(
            prompt, config, request_id=request_id, deadline=deadline, cache_salt=cache_salt, **overrides
        )  # fmt: skip
        return self._enter(prepared)

    def _put_back(self, mine: bool = False) -> None:
        """Undoes an interrupted call; ``mine`` if the caller is that call.

        Raises:
            RuntimeError: a call is under way, in this thread or another.
        """
        turn = self._turn
        if not turn.is_open:
            return
        if not mine and _is_under_way(turn):
            raise RuntimeError("a step is under way; an engine takes one call at a time")
        if not self._undo.is_empty:
            self._undo.put_back(self._outputs)
        self._turn = Turn(turn.pending)

    def prepared(
        self, prompt: Any, config: Any = None, **options: Unpack[RequestOptions]
    ) -> Prepared:
        """A checked request, for `take_on`; arguments and errors as in `add_request`."""
        return self.inputs.prepared(prompt, config, **options)

    @whole
    def take_on(self, prepared: Prepared) -> str:
        """Adds a prepared request; returns its id. One past its deadline needs no place: it ends at the next step.

        Raises:
            ValueError: its id is in use.
            EngineFullError: ``max_waiting`` requests wait.
        """
        return self._enter(prepared)

    def _enter(self, prepared: Prepared) -> str:
        name = self._name(prepared.request_id)
        if not (self.free_places or prepared.is_late):
            raise EngineFullError(
                f"max_waiting={self.settings.max_waiting} requests wait already; add this one again later"
            )
        request = self.inputs.request(prepared, name, next(self._numbers))
        self._outputs.enter(request, prepared.deadline)
        if prepared.is_cancelled:
            self._outputs.cancelling.append(request)
        return name

    def _name(self, request_id: str | None) -> str:
        requests = self._outputs.requests
        if request_id is None:
            fresh = (f"req_{number}" for number in self._names)
            return next(name for name in fresh if name not in requests)
        if request_id in requests:
            raise ValueError(f"request {request_id!r} is under way; another id is needed")
        return request_id

    @whole
    def step(self) -> list[Event]:
        """Runs one forward pass; returns its events, after those of requests that ended before it.

        If the model fails, the requests in the pass fail and their pages are freed; the others continue.

        An interrupted step (Ctrl-C or any exception) has no effect: requests, pages and random numbers are as before,
        and the next step gives the same tokens; only sequences that it preempted stay preempted. Likewise an
        interrupted `add_request` adds nothing, interrupted iteration returns its events with the next one, and an
        interrupted `generate_batch` cancels its requests and leaves the events of others to the next step.

        Raises:
            RuntimeError: a step is under way, in this thread or another.
        """
        events = [*self._pending, *self._core.step()]
        self._left = ()
        return events

    @whole
    def _advance(self, own: Collection[str] = ()) -> list[Event]:
        """Runs a step; returns the events of the ``own`` requests and keeps the others pending."""
        events = self._core.step()
        others = (event for event in events if event.request_id not in own)
        self._left = (*self._pending, *others)
        return [event for event in events if event.request_id in own]

    @whole
    def end_early(self) -> list[Event]:
        """Ends cancelled and late requests, as every step does first."""
        return self._outputs.end_early()

    def __iter__(self) -> Iterator[Event]:
        """Steps until all requests have ended. Requests may be added meanwhile; leaving the loop early loses no event.

        Raises:
            RuntimeError: every request is paused.
        """
        return self

    def __next__(self) -> Event:
        while not (pending := self._pending):
            if not self.has_unfinished:
                raise StopIteration
            if not self.can_step:
                raise RuntimeError("every request is paused; resume one, or cancel it")
            self._advance()
        try:
            self._turn = Turn(pending[1:])
            return pending[0]
        except BaseException:
            self._turn = Turn(pending)
            raise

    def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int] | Tensor],
        config: GenerateConfig | None = None,
        **overrides: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Generates for all prompts; other requests continue meanwhile, and their events come with the next `step`.

        Args:
            prompts, config, overrides: as in `add_request`. Without a ``cache_salt`` they share prefixes with each
                other only.

        Returns:
            the output of each prompt, in order.

        Raises:
            ValueError, TypeError: a prompt or setting that `add_request` refuses; then none is generated.
            EngineFullError: every place in the queue is taken, and every request is paused.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is text; a list of prompts is needed")
        waiting = list(prompts)
        own: dict[str, None] = {}  # in order
        scope = f"batch {next(self._numbers)}"
        found: dict[str, RequestOutput] = {}
        try:
            checked = [self.inputs.prepared(prompt, config, **overrides) for prompt in waiting]
            while len(found) < len(waiting):
                if len(own) == len(found) and not self.free_places and not self.can_step:
                    raise EngineFullError(
                        "every request that waits is paused; resume one, or cancel it"
                    )
                while len(own) < len(waiting) and self.free_places:
                    prepared = checked[len(own)]
                    name = self._name(prepared.request_id)
                    own[name] = None
                    self.take_on(replace(prepared, request_id=name, scope=prepared.scope or scope))
                for event in self._advance(own):
                    if event.output is not None:
                        found[event.request_id] = event.output
        finally:
            self._close(own, scope)
        return [found[name] for name in own]

    @whole
    def _close(self, names: Iterable[str], scope: str) -> None:
        """Cancels what is left of a batch and drops its prefixes."""
        for name in names:
            if name in self._outputs.requests:
                self._outputs.end(self._outputs.requests[name], "cancelled")
        self._outputs.scheduler.blocks.pages.forget_scope(scope)

    @whole
    def clear_prefixes(self) -> None:
        """Drops all cached prefixes; call it after the model's weights have changed."""
        self._outputs.scheduler.blocks.pages.forget_all()
