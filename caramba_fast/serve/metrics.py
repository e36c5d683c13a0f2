"""Figures of a request, and of an engine."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


#: Gaps between tokens an engine remembers for its percentiles.
REMEMBERED = 10_000


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
