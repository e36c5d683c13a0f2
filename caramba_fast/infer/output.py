"""GenerateOutput and GenerationMetrics: what a generation returns besides tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from caramba_fast.infer.logprobs import TokenLogprobs
from caramba_fast.infer.sequence import FinishReason

NAN = float("nan")


def percentiles(seconds: Iterable[float]) -> tuple[float, float]:
    """The median and the 99th percentile; nan if empty."""
    values = np.fromiter(seconds, dtype=float)
    if not len(values):
        return NAN, NAN
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)


@dataclass(frozen=True)
class GenerationMetrics:
    """Metrics of one call of `Generator.generate`.

    Attributes:
        prompt_tokens, new_tokens: prompt tokens (without padding) and generated tokens, over all rows.
        ttft_s: seconds of the first step (prefill and first sample), without tokenizing and allocating the cache.
        inter_token_p50_s, inter_token_p99_s: seconds of a decode step (median, 99th percentile); nan without one.
        total_s: seconds of all steps, without the consumer's time between them.
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


@dataclass(frozen=True)
class GenerateOutput:
    """The result of one call with ``return_dict=True``.

    Attributes:
        sequences: (B, T + new) int64, what the call returns without ``return_dict``.
        finish_reasons: why each row ended: eos, stop, length, time or criteria.
        new_tokens: tokens generated in each row.
        metrics: of the call.
        report: what was in force: cache kind, bytes, decode plan, CUDA graph, speculation.
        scores: processed logits (B, V) float32 of each step, with ``output_scores``; with beams log-probabilities,
            (B * num_beams, V).
        logits: the model's logits (B, V) of each step, with ``output_logits``; with beams (B * num_beams, V).
        sequences_scores: (B,) the final score of each row, with beams.
        logprobs: log-probabilities of the new tokens of each row, with ``logprobs``.
        beam_indices: (B, new) the beam each token was added to, -1 after the end, with beams.
    """

    sequences: Tensor
    finish_reasons: list[FinishReason]
    new_tokens: list[int]
    metrics: GenerationMetrics
    report: dict[str, Any]
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    sequences_scores: Tensor | None = None
    beam_indices: Tensor | None = None
    logprobs: list[list[TokenLogprobs]] | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and getattr(self, name, None) is not None
