"""Times decode steps of the model with each cache: interleaved, medians of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.cache.model import PrefillMode
from caramba_fast.config import cache_configs
from caramba_fast.infer.cuda_graph import DecodeGraph, why_no_graph
from caramba_fast.models import LanguageModel
from caramba_fast.quality.compare import new_session

#: Runs one token per row, (B, 1), through a model and its cache; returns logits.
Step = Callable[[Tensor], Tensor]
#: Makes the step that is timed.
StepMaker = Callable[[LanguageModel, ModelKVCache], Step]
#: Untimed steps: the first may compile and allocate, the second may record a CUDA graph.
WARM_UP = 3
#: Rounds of steps; the caches are truncated in between, so that all rounds start at the same length.
ROUNDS = 7


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decode step: the lowest median of the rounds, and 20th and 80th percentile of all steps.

    The lowest median, because other load only adds time and comes in bursts.
    """

    median: float
    p20: float
    p80: float

    @property
    def spread(self) -> float:
        """(p80 - p20) / 2, relative to the median."""
        return (self.p80 - self.p20) / (2 * self.median)

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> StepTime:
        """From the step times of each round."""
        ranked = sorted(sample for samples in rounds for sample in samples)
        last = len(ranked) - 1
        lowest = min(median(samples) for samples in rounds)
        return cls(lowest, ranked[round(0.2 * last)], ranked[round(0.8 * last)])


def plain_step(model: LanguageModel, cache: ModelKVCache) -> Step:
    """The step as an ordinary forward pass, without a CUDA graph."""
    return lambda tokens: model.forward(tokens, cache)


def recorded_step(model: LanguageModel, cache: ModelKVCache) -> Step:
    """The step a generator runs on CUDA: a replayed graph if possible, so that launch overhead hides no differences."""
    recordable = why_no_graph(model) is None
    return DecodeGraph(model, cache).step if recordable else plain_step(model, cache)


@torch.no_grad()
def step_times(
    model: LanguageModel,
    specs: Sequence[str],
    prompt: Tensor,
    steps: int,
    *,
    prefill: PrefillMode = "exact",
    make_step: StepMaker | None = None,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, StepTime]:
    """Times decode steps of every cache in turn, so that other load slows all of them alike.

    Args:
        model, specs: the model and its caches.
        prompt: (B, T) tokens in the caches when the steps start; every step feeds its last token.
        steps, rounds: decode steps per round, and rounds.
        prefill: as in `ModelKVCache`.
        make_step: makes what is timed; by default `plain_step`.
        clock: returns the time in seconds.
    """
    rows, length = prompt.shape
    newest = prompt[:, -1:].contiguous().to(model.device)
    runs: dict[str, tuple[ModelKVCache, Step]] = {}
    for spec in specs:
        session = new_session(
            model, rows, length + steps + WARM_UP, cache_configs(spec), prefill=prefill
        )
        session.feed(prompt.tolist())
        assert session.cache is not None
        runs[spec] = session.cache, (make_step or plain_step)(model, session.cache)
    for cache, step in runs.values():
        for _ in range(WARM_UP):
            step(newest)
        cache.truncate(length)
    samples: dict[str, list[list[float]]] = {spec: [] for spec in specs}
    for turn in range(rounds):
        for found in samples.values():
            found.append([])
        for index in range(steps):
            for spec in _turned(specs, turn * steps + index):
                samples[spec][-1].append(_timed(runs[spec][1], newest, clock))
        for cache, _ in runs.values():
            cache.truncate(length)
    return {spec: StepTime.of(found) for spec, found in samples.items()}


def _turned(specs: Sequence[str], by: int) -> list[str]:
    """The specs rotated, so that a spec does not always run after the same other one."""
    at = by % len(specs)
    return [*specs[at:], *specs[:at]]


def _timed(step: Step, tokens: Tensor, clock: Callable[[], float]) -> float:
    _wait_for(tokens.device)
    start = clock()
    step(tokens)
    _wait_for(tokens.device)
    return clock() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
