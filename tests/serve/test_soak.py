"""Thousands of short requests, some cancelled: none lost, none answered twice, no page and no memory left behind.

``CARAMBA_FAST_SOAK=10000`` makes it ten thousand.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter

import pytest
from support.engines import small_model, text

from caramba_fast.serve import Engine

CHECK_EVERY = 50
MANY = int(os.environ.get("CARAMBA_FAST_SOAK", "3000"))


def objects() -> int:
    """Objects Python knows of: what is left behind is among them, whatever the allocator does with its pages."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize(("preemption", "count"), [("recompute", MANY), ("swap", 1_000)])
def test_thousands_of_requests(preemption: str, count: int) -> None:
    dice = random.Random(1)
    engine = Engine(
        small_model(), cache_kind="q4", max_seq_len=128, page_size=32, num_pages=24, max_batch_size=16,
        preemption=preemption, lookup_tokens=2, max_waiting=64, cache_salt="everybody",
    )  # fmt: skip
    prompts = [text(seed, dice.randint(1, 70)) for seed in range(40)]
    ended: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    asked: set[str] = set()
    before = 0
    steps = 0
    while len(asked) < count or engine.has_unfinished:
        while len(asked) < count and len(engine.under_way) < 48:
            sampled = dice.random() < 0.5
            asked.add(
                engine.add_request(
                    dice.choice(prompts), max_new_tokens=dice.choice((1, 2, 3, 8)),
                    temperature=0.8 if sampled else 0.0, seed=dice.randrange(100),
                    num_return_sequences=2 if sampled and dice.random() < 0.1 else 1,
                )
            )  # fmt: skip
            if dice.random() < 0.1:
                engine.cancel(dice.choice(list(engine.under_way)))
        for event in engine.step():
            if event.output is not None:
                ended[event.request_id] += 1
                reasons.update(event.output.finish_reasons)
        steps += 1
        if steps % CHECK_EVERY == 0:
            assert engine.problems() == []
        if not before and sum(ended.values()) >= count // 3:
            before = objects()
    assert set(ended) == asked
    assert set(ended.values()) == {1}
    assert reasons["cancelled"] > count / 20
    figures = engine.metrics
    assert figures.pages_held == 0
    assert figures.swapped_bytes == 0
    assert figures.finished + figures.cancelled + figures.failed == count
    assert engine.problems() == []
    assert objects() - before < 0.02 * count
