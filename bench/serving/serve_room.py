"""How many requests of the fixed load run at once in the same bytes, by cache kind.

Requests are endless and the engine is limited by pages alone. Counted are the requests running after each step: the
mean once the pool has filled, and the most before the first preemption. Lengths are fixed and end-of-sequence ids
ignored, so that scheduling does not depend on the model's output: its arithmetic is left out, and many steps can be
counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.serving.serve_load import supply
from caramba_fast.bench.serving.serve_systems import GREEDY, PAGE_SIZE
from caramba_fast.serve import Engine

#: Requests of full length that fit into the pages with fp16.
FULL_REQUESTS = 6
STEPS, SEEDS = 1500, (0, 1, 2)
#: Share of steps left out of the mean; after it as many requests end as begin.
FILLING = 1 / 3
#: More requests than can ever run, and enough prompt tokens per step that pages are the bottleneck.
MANY, BATCH_TOKENS = 256, 2048
#: Number of requests kept waiting.
WAITING = 16


@dataclass(frozen=True)
class Room:
    """Concurrency of a run.

    ``mean`` is the mean of running requests after the pool has filled, ``most`` the maximum up to the first preemption,
    if any. ``pages`` and ``cache_bytes`` are of the pool.
    """

    mean: float
    most: int
    preemptions: int
    pages: int
    cache_bytes: int


class Silent:
    """A model that always predicts the same token, with the cache layout of another model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward_ragged(self, _ids: Tensor, _batch: Any, rows: Tensor) -> Tensor:
        """Logits (M, V) for ``rows`` (M,)."""
        return torch.zeros(len(rows), self._model.vocab_size)


def room(
    model: Any, cache: str, cache_bytes: int, text: Sequence[int], seed: int, steps: int = STEPS
) -> Room:
    """Runs an engine on an endless supply of requests."""
    engine = Engine(
        Silent(model), cache_kind=cache, cache_bytes=cache_bytes, page_size=PAGE_SIZE, max_batch_size=MANY,
        max_batch_tokens=BATCH_TOKENS, **GREEDY,
    )  # fmt: skip
    items, counts, calm = supply(text, seed), list[int](), 0
    metrics = engine.metrics
    for _ in range(steps):
        for _ in range(WAITING - metrics.waiting):
            item = next(items)
            engine.add_request(item.prompt, max_new_tokens=item.new_tokens)
        engine.step()
        metrics = engine.metrics
        counts.append(metrics.running)
        calm += not metrics.preemptions
    return Room(
        statistics.fmean(counts[int(FILLING * steps) :]), max(counts[: max(calm, 1)]), metrics.preemptions,
        metrics.pages, metrics.cache_bytes,
    )  # fmt: skip
