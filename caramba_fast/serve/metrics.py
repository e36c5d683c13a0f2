"""Figures of a request, and of an engine."""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from caramba_fast.infer.output import NAN, percentiles

#: Gaps between tokens an engine remembers for its percentiles.
REMEMBERED = 10_000


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
    """When things happened to one request; a caller's time between two steps counts, unlike in a `Generator`."""

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

    def saved(self) -> tuple[object, ...]:
        """What `put_back` goes back to."""
        return self.started, self.first_token, self.latest, len(self.gaps)

    def put_back(self, saved: tuple[Any, ...]) -> None:
        """Goes back to what was saved."""
        self.started, self.first_token, self.latest, gaps = saved
        del self.gaps[gaps:]

    def report(
        self, *, prompt_tokens: int, new_tokens: int, prefix_hit_tokens: int, preemptions: int
    ) -> RequestMetrics:
        """The figures so far."""
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
    """What an engine has done, and holds now.

    Attributes:
        running, waiting: answers that are worked on, and that wait (preempted ones too).
        steps: forward passes.
        graph_steps: of these, how many ran as a CUDA graph, or were the first of a size, which nothing records yet. Why
            the others did not is in ``report["eager_steps"]`` of the engine.
        prompt_tokens, new_tokens, step_tokens: tokens of prompts that were fed or found, tokens generated, and
            tokens that went through the model (fed again after a preemption, and drafted ones, included).
        prefix_hit_tokens, prefix_hit_rate: tokens of prompts found in pages, and their share.
        prefix_store_tokens: of the tokens found in pages, those that came back from the prefix store.
        preemptions, swaps: times an answer gave its pages back, and of these how often to host memory.
        drafted, accepted: tokens of prompt lookup.
        finished, cancelled, failed: requests. A client that went away has cancelled its own; past a deadline or on an
            error one has failed.
        pages, pages_held, pages_kept: of the pool; held by answers; held by none with content still known.
        cache_bytes, swapped_bytes: of the pool, and on the host.
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
        """The figures by name."""
        return asdict(self)


class Counters:
    """What an engine counts as it goes."""

    def __init__(self) -> None:
        self.steps = self.graph_steps = self.prompt_tokens = self.new_tokens = self.step_tokens = 0
        self.prefix_hit_tokens = self.prefix_store_tokens = self.preemptions = self.swaps = 0
        self.drafted = self.accepted = self.finished = self.cancelled = self.failed = 0
        self.busy_s = 0.0
        self.ttft: deque[float] = deque(maxlen=REMEMBERED)
        self.gaps: deque[float] = deque(maxlen=REMEMBERED)

    def got_token(self, times: RequestTimes, now: float) -> None:
        """A step brought a token of a request; what several answers got of one step is one gap."""
        if times.first_token is None:
            times.first_token = now
            self.ttft.append(now - times.arrived)
        elif now > times.latest:
            times.gaps.append(now - times.latest)
            self.gaps.append(now - times.latest)
        times.latest = now

    def saved(self) -> dict[str, Any]:
        """What was counted, by the names in `EngineMetrics`; `put_back` goes back to it, times stay remembered."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, deque)}

    def put_back(self, saved: dict[str, Any]) -> None:
        """Goes back to what was saved."""
        vars(self).update(saved)
