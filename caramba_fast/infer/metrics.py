"""What a run took: time to first token, time between tokens, and the cache's bytes."""

from __future__ import annotations

import time
from array import array
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class GenerationMetrics:
    """Figures of one call of `Generator.generate`.

    Attributes:
        prompt_tokens, new_tokens: real tokens read and tokens generated, over all rows.
        ttft_s: seconds from the call to the first token (prefill and first sample).
        inter_token_p50_s, inter_token_p99_s: seconds between steps, nan with fewer than two.
        total_s: seconds of the whole call.
        tokens_per_s: new tokens over total_s.
        decode_tokens_per_s: tokens after the first of each row over the time they took.
        cache_bytes: bytes the cache has allocated.
        bytes_per_token: bytes one cached token of one row takes.
    """

    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    inter_token_p50_s: float
    inter_token_p99_s: float
    total_s: float
    tokens_per_s: float
    decode_tokens_per_s: float
    cache_bytes: int
    bytes_per_token: float

    def as_dict(self) -> dict[str, float]:
        """The figures by name, for JSON or CSV."""
        return asdict(self)


class Stopwatch:
    """Collects what steps of a run took; what a consumer does between two of them does not count."""

    def __init__(self) -> None:
        self.steps = array("d")  # 8 bytes a step, however long the text
        self.new_tokens = 0
        self.began = time.monotonic()
        self.resume()

    def resume(self) -> None:
        """Work on the next step begins."""
        self._began = time.perf_counter()

    def step(self, new_tokens: int) -> None:
        """One step is done and gave ``new_tokens`` tokens over all rows."""
        self.steps.append(time.perf_counter() - self._began)
        self.new_tokens += new_tokens

    def report(
        self, rows: int, prompt_tokens: int, cache_bytes: int, bytes_per_token: float
    ) -> GenerationMetrics:
        """The figures so far; at least one step must have been taken."""
        total = sum(self.steps)
        gaps = np.asarray(self.steps[1:])
        p50, p99 = np.percentile(gaps, [50, 99]) if len(gaps) else (np.nan, np.nan)
        decode = float(gaps.sum())
        return GenerationMetrics(
            prompt_tokens=prompt_tokens,
            new_tokens=self.new_tokens,
            ttft_s=self.steps[0],
            inter_token_p50_s=float(p50),
            inter_token_p99_s=float(p99),
            total_s=total,
            tokens_per_s=self.new_tokens / total,
            decode_tokens_per_s=(self.new_tokens - rows) / decode if decode else float("nan"),
            cache_bytes=cache_bytes,
            bytes_per_token=bytes_per_token,
        )
