"""Metrics of a request, and of an engine."""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from caramba_fast.infer.output import NAN, percentiles

#: Gaps between tokens an engine keeps for its percentiles.
REMEMBERED = 10_000


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of one request.

    Attributes:
        prompt_tokens, new_tokens: prompt tokens, and tokens generated over all answers.
        prefix_hit_tokens: prompt tokens found in cached pages.
        preemptions: times an answer was preempted.
        queue_s: seconds from arrival to its first step; nan if it had none.
        ttft_s: seconds from arrival to the first token; nan if there is none.
        inter_token_p50_s, inter_token_p99_s: seconds between steps that gave it tokens; nan below two.
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
        """The metrics by name."""
        return asdict(self)


class RequestTimes:
    """Times of one request; unlike in a `Generator`, a caller's time between two steps counts."""

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        self.started: float | None = None
        self.first_token: float | None = None
        self.latest = NAN
        self.gaps = array("d")

    def scheduled(self, now: float) -> None:
        """Records that it is part of a step."""
        if self.started is None:
            self.started = now

    def saved(self) -> tuple[object, ...]:
        """State for `put_back`."""
        return self.started, self.first_token, self.latest, len(self.gaps)

    def put_back(self, saved: tuple[Any, ...]) -> None:
        """Restores what was saved."""
        self.started, self.first_token, self.latest, gaps = saved
        del self.gaps[gaps:]

    def report(
        self, *, prompt_tokens: int, new_tokens: int, prefix_hit_tokens: int, preemptions: int
    ) -> RequestMetrics:
        """The metrics so far."""
        total = time.monotonic() - self.arrived
        p50, p99 = percentiles(self.gaps)
        return RequestMetrics(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            prefix_hit_tokens=prefix_hit_tokens,
            preemptions=preemptions,
            queue_s=NAN if self.started is None else self.started - self.arrived,
            ttft_s=NAN if self.first_token is None else self.first_token - self.arrived,
            inter_token_p50_s=p50,
            inter_token_p99_s=p99,
            total_s=total,
            tokens_per_s=new_tokens / total if total else NAN,
        )


@dataclass(frozen=True)
class EngineMetrics:
    """Counters and state of an engine.

    Attributes:
        running, waiting: sequences that run, and that wait (preempted ones too).
        steps: forward passes.
        graph_steps: steps that ran as a CUDA graph, or were the first of a size, before it is recorded. The engine's
            ``report["eager_steps"]`` says why the others did not.
        prompt_tokens, new_tokens, step_tokens: prompt tokens (processed or found in cached pages), generated tokens,
            and tokens that went through the model, recomputed and drafted ones included.
        prefix_hit_tokens, prefix_hit_rate: prompt tokens found in cached pages, and their share.
        prefix_store_tokens: those that came back from the prefix store.
        preemptions, swaps: preemptions, and how many of them swapped pages to host memory.
        drafted, accepted: tokens of prompt lookup.
        finished, cancelled, failed: requests. Those of clients that went away count as cancelled, those past a
            deadline or with an error as failed.
        pages, pages_held, pages_kept: pages in the pool; in use by sequences; unused, but cached for reuse.
        cache_bytes, swapped_bytes: bytes of the pool, and in host memory.
        busy_s: seconds spent in steps.
        tokens_per_s: new tokens over busy_s.
        ttft_p50_s, ttft_p99_s, inter_token_p50_s, inter_token_p99_s: over the latest requests and tokens.
    """

    running: int
    waiting: int
    steps: int
    graph_steps: int
    prompt_tokens: int
    new_tokens: int
    step_tokens: int
    prefix_hit_tokens: int
    prefix_hit_rate: float
    prefix_store_tokens: int
    preemptions: int
    swaps: int
    drafted: int
    accepted: int
    finished: int
    cancelled: int
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
        """The metrics by name."""
        return asdict(self)


class Counters:
    """The counters of an engine."""

    def __init__(self) -> None:
        self.steps = self.graph_steps = self.prompt_tokens = self.new_tokens = self.step_tokens = 0
        self.prefix_hit_tokens = self.prefix_store_tokens = self.preemptions = self.swaps = 0
        self.drafted = self.accepted = self.finished = self.cancelled = self.failed = 0
        self.busy_s = 0.0
        self.ttft: deque[float] = deque(maxlen=REMEMBERED)
        self.gaps: deque[float] = deque(maxlen=REMEMBERED)

    def got_token(self, times: RequestTimes, now: float) -> None:
        """Records a token of a request; tokens of several answers in one step make one gap."""
        if times.first_token is None:
            times.first_token = now
            self.ttft.append(now - times.arrived)
        elif now > times.latest:
            times.gaps.append(now - times.latest)
            self.gaps.append(now - times.latest)
        times.latest = now

    def saved(self) -> dict[str, Any]:
        """The counters, by the names in `EngineMetrics`, for `put_back`; times are not saved."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, deque)}

    def put_back(self, saved: dict[str, Any]) -> None:
        """Restores what was saved."""
        vars(self).update(saved)
