"""What a generation returns when more than tokens is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from caramba_fast.infer.metrics import GenerationMetrics
from caramba_fast.infer.stopping import FinishReason


@dataclass(frozen=True)
class GenerateOutput:
    """The result of one call with ``return_dict=True``.

    Attributes:
        sequences: (B, T + new) int64, what the call returns without ``return_dict``.
        finish_reasons: why each row ended: eos, stop, length, time or criteria.
        new_tokens: how many were generated in each row.
        metrics: figures of the run.
        report: what was in force: cache kind, bytes, decode plan, CUDA graph, speculation.
        scores: for each step the processed logits (B, V) float32, with ``output_scores``.
        logits: for each step the model's logits (B, V), with ``output_logits``.
        sequences_scores: (B,) the final score of each row, with beams.
        beam_indices: (B, new) the beam each token was added to, -1 behind the end, with beams.
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

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and getattr(self, name, None) is not None
