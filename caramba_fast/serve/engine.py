"""Engine: many requests at once over one paged cache, each answered as if it were alone.

A step is: end what was cancelled or is late, schedule tokens, one forward pass over all of them, choose the next
tokens, tell. Requests come and go between steps, so that none waits for the longest.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import Calibration, PagePool, RaggedBatch, Stretch
from caramba_fast.infer.config import AUTO, GenerateConfig
from caramba_fast.infer.edits import LogitEdits
from caramba_fast.infer.fields import CacheFields, OutputFields
from caramba_fast.infer.history import TokenHistory
from caramba_fast.infer.lookup import NGramIndex
from caramba_fast.infer.stopping import Stopping, row_limits
from caramba_fast.infer.text import TextTokenizer, TextWriter
from caramba_fast.models.registry import as_language_model
from caramba_fast.policy.settings import CachePolicyFields, DecodePlanFields
from caramba_fast.serve.choosing import Choice, choose
from caramba_fast.serve.metrics import Counters, EngineMetrics, RequestTimes, percentiles
from caramba_fast.serve.request import (
    ENDED_BADLY,
    Answer,
    Event,
    Points,
    Request,
    RequestOutput,
)
from caramba_fast.serve.scheduler import Scheduler, StorageError, Work
from caramba_fast.serve.settings import EngineConfig

#: Runs of tokens that prompt lookup looks for.
LOOKUP = (3, 1)
#: Settings that belong to the engine, not to one request.
ENGINE_FIELDS = {
    name
    for part in (CacheFields, CachePolicyFields, DecodePlanFields, OutputFields)
    for name in part.model_fields
}


@dataclass(frozen=True)
class Prepared:
    """A request that was checked and is not yet taken on."""

    tokens: list[int]
    config: GenerateConfig
    limit: int
    request_id: str | None
    deadline: float | None
    times: RequestTimes


class EngineFullError(RuntimeError):
    """As many requests wait as may; add this one again later."""


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
        self.config = _shareable((config or GenerateConfig()).updated(**overrides))
        self.model: Any = _ragged(model)
        limit = getattr(self.model, "ragged_limit", None)
        if limit is not None and self.config.max_seq_len > limit:
            raise ValueError(
                f"max_seq_len is {self.config.max_seq_len}; this model's RoPE changes with the length beyond "
                f"{limit}, and would change for every request in a batch: {limit} or less is allowed"
            )
        self.tokenizer = None if tokenizer is None else TextTokenizer.of(tokenizer)
        self._counters = Counters()
        self.pool = self._make_pool()
        self._scheduler = Scheduler(self.settings, self.pool, self._counters)
        self._requests: dict[str, Request] = {}
        self._numbers, self._names = itertools.count(), itertools.count()
        #: (when it must have ended, its number, its id, why), a heap.
        self._due: list[tuple[float, int, str, str]] = []
        self._cancelling: deque[Request] = deque()
        self._kept: list[Event] = []
        #: The `AsyncEngine` whose engine it is, if any.
        self.driver: Any = None
        self._check(self.config)

    def _make_pool(self) -> PagePool:
        settings, config = self.settings, self.config
        storage, layout = config.stream_configs(), self.model.cache_layout
        length = config.max_seq_len
        size, wanted = settings.page_size, settings.num_pages
        if settings.cache_bytes is not None:
            page = PagePool.bytes_per_page(layout, size, **storage)
            wanted = settings.cache_bytes // page
            if not wanted:
                raise ValueError(
                    f"cache_bytes is {settings.cache_bytes}; a page of {size} tokens takes {page}, so much or more "
                    "is allowed"
                )
        if wanted is None:
            wanted = settings.max_batch_size * -(-length // size)
        calibration = None
        if config.cache_calibration is not None:
            calibration = Calibration.load(config.cache_calibration)
        return PagePool(
            layout, size, wanted, length, self.model.device, calibration=calibration, **storage
        )  # fmt: skip

    # -- requests -----------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int] | Tensor,
        config: GenerateConfig | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        **overrides: Any,
    ) -> str:
        """Takes a request on.

        Args:
            prompt: token ids (T,), or text if there is a tokenizer.
            config: settings of its generation; by default the engine's. Answer i of ``num_return_sequences`` is
                the one ``seed + i`` gives alone.
            request_id: a name; by default one is made.
            deadline: seconds from now after which it is ended as it is.
            overrides: fields of GenerateConfig to change.

        Returns:
            its id.

        Raises:
            ValueError, TypeError: an empty prompt, one that cannot fit, an id that is in use, or settings that
                do not go with an engine; the request is not taken on.
            EngineFullError: ``max_waiting`` requests wait.
        """
        return self.take_on(
            self.prepared(prompt, config, request_id=request_id, deadline=deadline, **overrides)
        )

    def prepared(
        self,
        prompt: str | Sequence[int] | Tensor,
        config: GenerateConfig | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        **overrides: Any,
    ) -> Prepared:
        """A request that was checked, for `take_on`; arguments and errors as in `add_request`."""
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise TypeError(f"request_id is {request_id!r}; a name is needed")
        settings = self._config_of(config, overrides)
        tokens = self._tokens(prompt)
        limit = self._limit(tokens, settings)
        if deadline is not None and (
            isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0
        ):
            raise ValueError(f"deadline is {deadline!r}; seconds above 0 are allowed")
        return Prepared(tokens, settings, limit, request_id, deadline, RequestTimes())

    def take_on(self, prepared: Prepared) -> str:
        """Takes a prepared request on; its id.

        Raises:
            ValueError: its id is in use.
            EngineFullError: ``max_waiting`` requests wait.
        """
        name, config, times = self._name(prepared.request_id), prepared.config, prepared.times
        if not self.free_places:
            raise EngineFullError(
                f"max_waiting={self.settings.max_waiting} requests wait already; add this one again later"
            )
        edits = LogitEdits(config, self.model.vocab_size, self._eos_ids(config), self.model.device)
        request = Request(name, next(self._numbers), prepared.tokens, config, edits, times)
        request.answers.append(self._answer(request, 0, prepared.limit))
        self._requests[name] = request
        limits = (("deadline", prepared.deadline), ("time", config.max_time))
        for why, seconds in limits:
            if seconds is not None:
                entry = (times.arrived + seconds, request.number, name, why)
                heapq.heappush(self._due, entry)
        self._scheduler.add(request.answers[0])
        return name

    def _answer(self, request: Request, index: int, limit: int) -> Answer:
        config, points = request.config, None
        if config.samples:
            seed = int(torch.randint(2**62, (1,))) if config.seed is None else config.seed
            points = Points((seed + index) % 2**63, self.model.device)
        stopping = Stopping(
            config, self._eos_ids(config), self.tokenizer, (), [limit], 0, request.times.arrived
        )
        answer = Answer(request, index, TokenHistory(request.prompt), points, stopping)
        if self.settings.lookup_tokens:
            answer.drafts = NGramIndex(*LOOKUP)
        if self.tokenizer is not None:
            answer.writer = TextWriter(
                self.tokenizer.decode, answer.written.append, request.prompt[-8:]
            )
        return answer

    def cancel(self, request_id: str) -> None:
        """Ends a request with the next step; it keeps the tokens it has.

        Raises:
            KeyError: no such request is under way.
        """
        self._cancelling.append(self._request(request_id))

    cancel_request = cancel

    def pause(self, request_id: str) -> None:
        """Schedules nothing for a request until `resume`; it gives way only where others need its place or pages."""
        self._request(request_id).paused = True

    def resume(self, request_id: str) -> None:
        """Goes on with a paused request."""
        self._request(request_id).paused = False

    def _request(self, request_id: str) -> Request:
        if request_id not in self._requests:
            raise KeyError(f"request {request_id!r} is not under way")
        return self._requests[request_id]

    def is_under_way(self, request_id: str) -> bool:
        """Whether a request was added and has not ended."""
        return request_id in self._requests

    @property
    def under_way(self) -> list[str]:
        """The ids of all requests that have not ended, oldest first."""
        return list(self._requests)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is under way."""
        return bool(self._requests)

    @property
    def next_due(self) -> float | None:
        """When (``time.monotonic``) the next deadline or max_time is over; None without any."""
        return self._due[0][0] if self._due else None

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything: not all requests are paused, or one of them is late."""
        due = self.next_due
        if self._cancelling or self._kept or (due is not None and due <= time.monotonic()):
            return True
        return any(not request.paused for request in self._requests.values())

    @property
    def free_places(self) -> int:
        """How many more requests may wait; those that have begun and gave their pages back do not count."""
        return max(0, self.settings.max_waiting - self._scheduler.fresh)

    # -- checks -------------------------------------------------------------------------

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("the prompt is text; that needs Engine(tokenizer=...)")
            prompt = self.tokenizer.encode(prompt)
        ids = _as_ids(prompt)
        tokens: list[int] = ids.tolist()
        wrong = [token for token in tokens if not 0 <= token < self.model.vocab_size]
        if wrong:
            raise ValueError(
                f"the prompt holds token id {wrong[0]}; 0 to {self.model.vocab_size - 1} is allowed"
            )
        return tokens

    def _config_of(
        self, config: GenerateConfig | None, overrides: dict[str, Any]
    ) -> GenerateConfig:
        if config is not None and not isinstance(config, GenerateConfig):
            raise TypeError(f"config is a {type(config).__name__}; a GenerateConfig is needed")
        found = self.config if config is None else config
        found = found.updated(**overrides) if overrides else found
        if found is self.config:
            return found
        for name in sorted(ENGINE_FIELDS & found.model_fields_set):
            if getattr(found, name) != getattr(self.config, name):
                raise ValueError(
                    f"{name} belongs to the engine; give it to Engine(...), not with a request"
                )
        self._check(found)
        return found

    def _check(self, config: GenerateConfig) -> None:
        """Raises ValueError for settings an engine cannot serve."""
        if config.num_beams > 1:
            raise ValueError(f"num_beams is {config.num_beams}; an engine allows 1")
        if config.num_return_sequences > self.settings.max_batch_size:
            raise ValueError(
                f"num_return_sequences is {config.num_return_sequences}; 1 to "
                f"max_batch_size={self.settings.max_batch_size} is allowed"
            )
        if config.stop_strings and self.tokenizer is None:
            raise ValueError(
                f"stop holds the string {config.stop_strings[0]!r}, which needs Engine(tokenizer=...)"
            )
        LogitEdits(config, self.model.vocab_size, self._eos_ids(config), torch.device("cpu"))

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            fresh = (f"req_{number}" for number in self._names)
            return next(name for name in fresh if name not in self._requests)
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is under way; another id is needed")
        return request_id

    def _limit(self, tokens: list[int], config: GenerateConfig) -> int:
        """Most new tokens; raises ValueError if they cannot fit."""
        limit = row_limits(config, [len(tokens)])[0]
        most = self.config.max_seq_len
        whole = len(tokens) + limit - 1
        room = self.settings.page_size * self.pool.num_pages
        positions = getattr(self.model, "max_positions", None)
        for what, count in (
            ("max_seq_len", most), ("the pool", room), ("the model's positions", positions)
        ):  # fmt: skip
            if count is not None and whole > count:
                raise ValueError(
                    f"the prompt of {len(tokens)} tokens and {limit} new ones need room for {whole}; "
                    f"{what} allows {count}"
                )
        return limit

    def _eos_ids(self, config: GenerateConfig) -> frozenset[int]:
        given = config.eos_token_id
        if config.ignore_eos:
            return frozenset()
        if given is None:
            given = getattr(self.model, "eos_token_ids", None) or self.model.eos_token_id
        return frozenset((given,) if isinstance(given, int) else tuple(given or ()))

    # -- steps --------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One forward pass; what it brought, and what ended before it.

        A failure of the model fails the requests that took part, and their pages come back; the others go on.
        """
        kept, self._kept = self._kept, []
        return kept + self._step()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self) -> list[Event]:
        began = time.monotonic()
        events = self.end_early(began)
        works, failed = self._scheduled()
        events += failed
        if works:
            for work in works:
                work.answer.request.times.scheduled(began)
            try:
                choices = self._forward(works)
            except Exception as error:
                for request in dict.fromkeys(work.answer.request for work in works):
                    events += self._end_request(request, "error", error)
            else:
                events += self._advance(works, choices, time.monotonic())
        self._counters.busy_s += time.monotonic() - began
        return events

    def _scheduled(self) -> tuple[list[Work], list[Event]]:
        """What the next forward pass reads, and the ends of those whose pages could not be moved for it."""
        events: list[Event] = []
        while True:
            try:
                return self._scheduler.schedule(), events
            except StorageError as error:
                events += self._end_request(error.answer.request, "error", error)

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
                    for answer in (work.answer, *self._branches(work.answer))
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
        self._counters.steps += 1
        self._counters.step_tokens += end
        return choices

    def _branches(self, answer: Answer) -> list[Answer]:
        """The other answers to its prompt, which begin where the first one does."""
        request = answer.request
        if answer.index or answer.new:
            return []
        limit = answer.stopping.limits[0]
        return [self._answer(request, index, limit) for index in range(1, request.wanted)]

    def _advance(
        self, works: Sequence[Work], choices: dict[Answer, list[Choice]], now: float
    ) -> list[Event]:
        """Takes note of what was cached and chosen."""
        events = []
        for work in works:
            if (
                work.answer.reason is None
            ):  # else another answer to its prompt has failed in this step
                try:
                    events += self._give(work, choices.get(work.answer, []), now)
                except Exception as error:
                    events += self._end_request(work.answer.request, "error", error)
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
        self._counters.drafted += len(work.draft)
        self._counters.accepted += accepted
        if chosen[1:]:
            self._fork(answer, cached, [choice.answer for choice in chosen[1:]])
        for choice in chosen:
            self._push(choice.answer, choice.tokens)
        self._scheduler.settle(answer, min(cached, len(answer.history)))
        if chosen:
            self._note_time(answer.request, now)
        return [self._told(choice.answer) for choice in chosen]

    def _fork(self, answer: Answer, cached: int, others: Sequence[Answer]) -> None:
        """The other answers hold the prompt's pages too, before the first can end."""
        self._scheduler.settle(answer, cached)
        for other in others:
            self._scheduler.fork(answer, other)
            answer.request.answers.append(other)

    def _note_time(self, request: Request, now: float) -> None:
        gap = request.times.got_token(now)
        if gap is None:
            self._counters.ttft.append(now - request.times.arrived)
        elif gap > 0.0:
            self._counters.gaps.append(gap)

    def _push(self, answer: Answer, tokens: Sequence[int]) -> None:
        """Adds tokens up to where the answer ends."""
        for token in tokens:
            answer.history.push(token)
            self._counters.new_tokens += 1
            if answer.writer is not None:
                answer.writer.put(token)
            answer.reason = answer.stopping.after(token, answer.history, answer.new, 0)
            if answer.reason is not None:
                return

    # -- ends ---------------------------------------------------------------------------

    def _told(self, answer: Answer) -> Event:
        """What is new of an answer; with its end its pages go back, and with the last one's the request is over."""
        request, output = answer.request, None
        if answer.reason is not None:
            self._scheduler.remove(answer)
            answer.is_over = True
            self._close_text(answer)
            if request.is_over:
                output = self._close(request)
        told = list(answer.history.tokens[len(request.prompt) + answer.told :])
        text = "".join(answer.written)
        event = Event(request.request_id, answer.index, told, text, answer.reason, output)
        answer.told += len(told)
        answer.written.clear()
        return event

    def _close_text(self, answer: Answer) -> None:
        """Writes what is left of its text; a tokenizer that fails now changes nothing but the text."""
        try:
            if answer.writer is not None:
                answer.writer.close()
        except Exception as error:
            request = answer.request
            request.error = request.error or f"{type(error).__name__}: {error}"

    def _close(self, request: Request) -> RequestOutput:
        """The request is over."""
        del self._requests[request.request_id]
        bad = any(answer.reason in ENDED_BADLY for answer in request.answers)
        self._counters.failed += bad
        self._counters.finished += not bad
        return request.output(None if self.tokenizer is None else self.tokenizer.decode)

    def _end_request(
        self, request: Request, reason: str, error: BaseException | None = None
    ) -> list[Event]:
        """Ends all answers of a request that have not ended; answers that have not begun never will."""
        if error is not None:
            request.error = f"{type(error).__name__}: {error}"
        going = [answer for answer in request.answers if answer.reason is None]
        for answer in going:
            answer.reason = reason
            self._scheduler.remove(answer)
        request.begun = True
        return [self._told(answer) for answer in going]

    def end_early(self, now: float | None = None) -> list[Event]:
        """Ends what was cancelled, or is late; a step begins with it."""
        now = time.monotonic() if now is None else now
        events: list[Event] = []
        while self._cancelling:
            request = self._cancelling.popleft()
            if not request.is_over:
                events += self._end_request(request, "cancelled")
        while self._due and self._due[0][0] <= now:
            _, number, name, why = heapq.heappop(self._due)
            late = self._requests.get(name)
            if late is not None and late.number == number:
                events += self._end_request(late, why)
        if len(self._due) > 64 + 4 * len(self._requests):  # of requests that ended long before
            numbers = {request.number for request in self._requests.values()}
            self._due = [entry for entry in self._due if entry[1] in numbers]
            heapq.heapify(self._due)
        return events

    def withdraw(self, request_id: str) -> None:
        """`cancel`, if the request is under way."""
        request = self._requests.get(request_id)
        if request is not None:
            self._cancelling.append(request)

    def set_paused(self, request_id: str, paused: bool) -> None:
        """`pause` or `resume`, if the request is under way."""
        request = self._requests.get(request_id)
        if request is not None:
            request.paused = paused

    # -- whole runs ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Steps until no request is under way; requests may be added meanwhile.

        Raises:
            RuntimeError: every request is paused.
        """
        while self.has_unfinished or self._kept:
            if not self.can_step:
                raise RuntimeError("every request is paused; resume one, or cancel it")
            events = deque(self.step())
            try:
                while events:
                    yield events.popleft()
            finally:  # whoever stops iterating misses nothing
                self._kept = [*events, *self._kept]

    def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int] | Tensor],
        config: GenerateConfig | None = None,
        **overrides: Any,
    ) -> list[RequestOutput]:
        """Answers all prompts; what else is under way goes on beside them, and its events come with the next `step`.

        Args:
            prompts, config, overrides: as in `add_request`.

        Returns:
            what became of each, in order.

        Raises:
            ValueError, TypeError: a prompt or setting that `add_request` refuses; none is answered then.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is text; a list of prompts is needed")
        waiting = list(prompts)
        ids: list[str] = []
        own: set[str] = set()
        found: dict[str, RequestOutput] = {}
        try:
            checked = [self._checked(prompt, config, overrides) for prompt in waiting]
            while len(found) < len(waiting):
                if len(ids) == len(found) and not self.free_places and not self.can_step:
                    raise EngineFullError(
                        "every request that waits is paused; resume one, or cancel it"
                    )
                while len(ids) < len(waiting) and self.free_places:
                    ids.append(self.add_request(checked[len(ids)], config, **overrides))
                    own.add(ids[-1])
                for event in self._step():
                    if event.request_id not in own:
                        self._kept.append(event)
                    elif event.output is not None:
                        found[event.request_id] = event.output
        except BaseException:
            for name in ids:
                if name in self._requests:
                    self._end_request(self._requests[name], "cancelled")
            raise
        return [found[name] for name in ids]

    def _checked(
        self, prompt: Any, config: GenerateConfig | None, overrides: dict[str, Any]
    ) -> list[int]:
        tokens = self._tokens(prompt)
        self._limit(tokens, self._config_of(config, dict(overrides)))
        return tokens

    # -- figures ------------------------------------------------------------------------

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine has done, and holds now."""
        counted, scheduler = self._counters, self._scheduler
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
            pages=self.pool.num_pages,
            pages_held=scheduler.pages.held,
            pages_kept=scheduler.pages.kept,
            cache_bytes=self.pool.nbytes,
            swapped_bytes=scheduler.swapped_bytes,
            busy_s=counted.busy_s,
            tokens_per_s=counted.new_tokens / counted.busy_s if counted.busy_s else float("nan"),
            ttft_p50_s=ttft[0],
            ttft_p99_s=ttft[1],
            inter_token_p50_s=gaps[0],
            inter_token_p99_s=gaps[1],
        )

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

    def clear_prefixes(self) -> None:
        """Forgets what kept pages hold; for a model whose weights have changed."""
        self._scheduler.pages.forget_all()

    def problems(self) -> list[str]:
        """What is wrong with the bookkeeping of pages and requests; nothing ever should be. For tests and doctors."""
        there = {answer.request.request_id for answer in self._scheduler.answers}
        found = self._scheduler.problems()
        if there != set(self._requests):
            found.append(f"requests {sorted(there ^ set(self._requests))} are lost or left over")
        return found


def _ragged(model: Any) -> Any:
    """The model, if it can take tokens of many requests side by side."""
    found = as_language_model(model)
    reason = getattr(found, "why_not_ragged", None)
    if not callable(getattr(found, "forward_ragged", None)) or reason:
        raise TypeError(
            f"{type(model).__name__} cannot be served by an Engine: "
            f"{reason or 'it has no forward_ragged(ids, batch, rows)'}; the native Transformer and transformers "
            "models with the attention interface can, others go through Generator"
        )
    return found


def _shareable(config: GenerateConfig) -> GenerateConfig:
    """Settings whose cache can be cut into pages that requests share.

    Raises:
        ValueError: one that was asked for and cannot be had.
    """
    for name in ("cache_residual_len", "cache_sink_len"):
        if getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)}; an engine allows 0: pages are shared between requests, and fp16 "
                "tails and sinks belong to one"
            )
    if config.cache_kind == AUTO:
        raise ValueError(
            "cache_kind is 'auto'; an engine needs a kind: caramba_fast.choose_cache measures, and names one"
        )
    if "prefill" in config.model_fields_set and config.prefill != "stored":
        raise ValueError(
            f"prefill is {config.prefill!r}; an engine allows 'stored': prompts are cut into chunks"
        )
    for name in ("prefill_chunk", "cuda_graph"):
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)!r} is for a Generator")
    given = [n for n in DecodePlanFields.model_fields if n in config.model_fields_set]
    if given:
        raise ValueError(f"{given[0]} is for a Generator; an engine reads whole caches")
    outputs = [name for name in OutputFields.model_fields if getattr(config, name)]
    if outputs:
        raise ValueError(f"{outputs[0]} is for a Generator; an engine gives a RequestOutput")
    return config.updated(cache_residual_len=0, cache_sink_len=0, prefill="stored")


def _as_ids(prompt: Any) -> Tensor:
    """(T,) int64, T of 1 or more.

    Raises:
        ValueError: anything else.
    """
    if isinstance(prompt, Tensor):
        ids = prompt
    else:
        wrong = f"the prompt is {type(prompt).__name__}; one row of one or more token ids is needed"
        if isinstance(prompt, (dict, set, frozenset, bytes)) or not hasattr(prompt, "__len__"):
            raise ValueError(wrong)
        if any(isinstance(token, (bool, str, bytes)) for token in prompt):
            raise ValueError(wrong)
        try:
            ids = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{wrong}: {error}") from error
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 1 or not len(ids) or not whole:
        raise ValueError(
            f"the prompt has shape {tuple(ids.shape)}, {ids.dtype}; one row of one or more token ids is needed"
        )
    return ids.to(torch.int64)
