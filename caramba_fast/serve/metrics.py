"""Figures of a request, and of an engine."""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from caramba_fast.serve.request import Request
    from caramba_fast.serve.scheduler import Scheduler

#: Gaps between tokens an engine remembers for its percentiles.
REMEMBERED = 10_000
NAN = float("nan")


@dataclass(frozen=True)
class RequestMetrics:
    """What one request took.

    Attributes:
        prompt_tokens, new_tokens: tokens read and generated, over all answers.
        prefix_hit_tokens: tokens of the prompt found in pages that were there already.
        preemptions: times an answer gave its pages back.
        queue_s: seconds from arrival to its first step; nan if it had none.
        ttft_s: seconds from arrival to the first token; nan if there is none.
        inter_token_p50_s, inter_token_p99_s: seconds between steps that brought it tokens; nan below two.
        total_s: seconds from arrival to the end.
        tokens_per_s: new tokens over total_s.
    """

    prompt_tokens: int
    new_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    queue_s: float
    ttft_s: float
    inter_token_p50_s: float
    inter_token_p99_s: float
    total_s: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


class RequestTimes:
    """When things happened to one request."""

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        self.started: float | None = None
        self.first_token: float | None = None
        self.latest = NAN
        self.gaps = array("d")

    def scheduled(self, now: float) -> None:
        """It is part of a step."""
        if self.started is None:
            self.started = now

    def got_token(self, now: float) -> float | None:
        """A step brought a token; seconds since the one before, if there was one."""
        if self.first_token is None:
            self.first_token = self.latest = now
            return None
        gap, self.latest = now - self.latest, now
        if gap > 0.0:
            self.gaps.append(gap)
        return gap

    def saved(self) -> tuple[object, ...]:
        """What `put_back` goes back to."""
        return self.started, self.first_token, self.latest, len(self.gaps)

    def put_back(self, saved: tuple[Any, ...]) -> None:
        """Goes back to what was saved."""
        self.started, self.first_token, self.latest, gaps = saved
        del self.gaps[gaps:]

    def report(self, request: Request) -> RequestMetrics:
        """The figures so far."""
        total = time.monotonic() - self.arrived
        new = sum(answer.new for answer in request.answers)
        p50, p99 = percentiles(self.gaps)
        return RequestMetrics(
            prompt_tokens=len(request.prompt),
            new_tokens=new,
            prefix_hit_tokens=request.answers[0].hit if request.answers else 0,
            preemptions=sum(answer.preemptions for answer in request.answers),
            queue_s=NAN if self.started is None else self.started - self.arrived,
            ttft_s=NAN if self.first_token is None else self.first_token - self.arrived,
            inter_token_p50_s=p50,
            inter_token_p99_s=p99,
            total_s=total,
            tokens_per_s=new / total if total else NAN,
        )


@dataclass(frozen=True)
class EngineMetrics:
    """What an engine has done, and holds now.

    Attributes:
        running, waiting: answers that are worked on, and that wait (preempted ones too).
        steps: forward passes.
        prompt_tokens, new_tokens, step_tokens: tokens of prompts that were fed or found, tokens generated, and
            tokens that went through the model (fed again after a preemption, and drafted ones, included).
        prefix_hit_tokens, prefix_hit_rate: tokens of prompts found in pages, and their share.
        preemptions, swaps: times an answer gave its pages back, and of these how often to host memory.
        drafted, accepted: tokens of prompt lookup.
        finished, failed: requests.
        pages, pages_held, pages_kept: of the pool; held by answers; held by none with content still known.
        cache_bytes, swapped_bytes: of the pool, and on the host.
        busy_s: seconds spent in steps.
        tokens_per_s: new tokens over busy_s.
        ttft_p50_s, ttft_p99_s, inter_token_p50_s, inter_token_p99_s: over the latest requests and tokens.
    """

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    new_tokens: int
    step_tokens: int
    prefix_hit_tokens: int
    prefix_hit_rate: float
    preemptions: int
    swaps: int
    drafted: int
    accepted: int
    finished: int
    failed: int
    pages: int
    pages_held: int
    pages_kept: int
    cache_bytes: int
    swapped_bytes: int
    busy_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    inter_token_p50_s: float
    inter_token_p99_s: float

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


class Counters:
    """What an engine counts as it goes."""

    def __init__(self) -> None:
        self.steps = self.prompt_tokens = self.new_tokens = self.step_tokens = 0
        self.prefix_hit_tokens = self.preemptions = self.swaps = 0
        self.drafted = self.accepted = self.finished = self.failed = 0
        self.busy_s = 0.0
        self.ttft: deque[float] = deque(maxlen=REMEMBERED)
        self.gaps: deque[float] = deque(maxlen=REMEMBERED)

    def saved(self) -> dict[str, float]:
        """What `put_back` goes back to; times of tokens stay remembered."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, deque)}

    def put_back(self, saved: dict[str, float]) -> None:
        """Goes back to what was saved."""
        vars(self).update(saved)


def percentiles(values: array[float] | deque[float]) -> tuple[float, float]:
    """The median and the 99th percentile; nan for none."""
    if not values:
        return NAN, NAN
    p50, p99 = np.percentile(np.asarray(values, dtype=float), [50, 99])
    return float(p50), float(p99)


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
