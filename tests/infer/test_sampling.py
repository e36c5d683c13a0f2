"""Sampling draws from the distribution that the filters leave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from caramba_fast.infer import GenerateConfig
from caramba_fast.infer.sampling import draw, filtered_logits, sample, sample_marked

DRAWS = 20_000
#: chi-square quantiles at p = 1e-4, by degrees of freedom.
CHI_SQUARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88}


def config(**changes: Any) -> GenerateConfig:
    return GenerateConfig(**{"temperature": 1.0, **changes})


def kept(scores: Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row > -torch.inf).flatten().tolist()) for row in scores]


def brute_force(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> dict[int, float]:
    """Token -> probability, in plain Python floats; no ties expected."""
    scores = {token: value / temperature for token, value in enumerate(logits)}
    order = sorted(scores, key=lambda token: -scores[token])
    order = order[:top_k] if top_k else order
    top = scores[order[0]]
    weights = {token: math.exp(scores[token] - top) for token in order}
    total = sum(weights.values())
    if top_p is not None:
        chosen, reached = [], 0.0
        for token in order:
            chosen.append(token)
            reached += weights[token] / total
            if reached >= top_p:
                break
        weights = {token: weights[token] for token in chosen}
        total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def near_a_boundary(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> bool:
    """Whether float32 may round a cumulative probability to the other side of top_p."""
    if top_p is None:
        return False
    free = sorted(brute_force(logits, temperature, top_k, None).values(), reverse=True)
    return bool(np.min(np.abs(np.cumsum(free) - top_p)) < 1e-4)


DISTINCT = st.lists(st.integers(-80, 80), min_size=1, max_size=40, unique=True).map(
    lambda values: [value / 10 for value in values]
)


@settings(deadline=None, max_examples=200)
@given(
    DISTINCT,
    st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    st.one_of(st.none(), st.integers(1, 45)),
    st.one_of(st.none(), st.floats(0.001, 1.0)),
)
def test_filters_equal_brute_force(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    assume(not near_a_boundary(logits, temperature, top_k, top_p))
    wanted = brute_force(logits, temperature, top_k, top_p)
    choice = config(temperature=temperature, top_k=top_k, top_p=top_p)
    scores = filtered_logits(torch.tensor([logits, logits[::-1]]), choice)
    last = len(logits) - 1
    assert kept(scores) == [set(wanted), {last - token for token in wanted}]
    probability = scores.softmax(-1)[0]
    for token, p in wanted.items():
        assert probability[token] == pytest.approx(p, abs=1e-5)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.one_of(st.none(), st.integers(1, 60)),
    st.one_of(st.none(), st.floats(0.01, 0.999)),
)
def test_the_order_is_that_of_transformers(
    seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed)) * 3
    rows = logits.tolist()
    assume(not any(near_a_boundary(row, temperature, top_k, top_p) for row in rows))
    scores = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = filtered_logits(logits, config(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(ours, scores)


@pytest.mark.parametrize(("size", "ties"), [(6, 3), (1000, 20), (1000, 300)])
def test_top_k_keeps_what_is_as_likely_as_the_last(size: int, ties: int) -> None:
    """As transformers does, whether there are few candidates to draw from or many."""
    logits = torch.zeros(1, size)
    logits[0, 1], logits[0, 2 : 2 + ties] = 1.2, 1.0
    expected = kept(TopKLogitsWarper(2)(None, logits.clone()))
    assert expected == [set(range(1, 2 + ties))]
    for filters in ({"top_k": 2}, {"top_k": 2, "top_p": 0.9999}):
        settings = config(**filters)
        assert kept(filtered_logits(logits, settings)) == expected
        drawn = sample(logits.expand(DRAWS // 2, -1), settings, torch.Generator().manual_seed(1))
        assert set(drawn.tolist()) == expected[0]


@pytest.mark.parametrize("typical_p", [1e-6, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 40, 1000])
def test_typical_p_keeps_what_is_as_near_as_the_last(size: int, typical_p: float) -> None:
    logits = torch.randn(20, size, generator=torch.Generator().manual_seed(1)).mul(2).round() / 2
    expected = kept(TypicalLogitsWarper(typical_p)(None, logits.clone()))
    assert kept(filtered_logits(logits, config(typical_p=typical_p))) == expected


@pytest.mark.parametrize("top_p", [1e-30, 1e-6, 0.2])
@pytest.mark.parametrize("size", [1, 2, 50_000])
def test_top_p_keeps_at_least_the_likeliest(top_p: float, size: int) -> None:
    logits = torch.zeros(2, size)
    logits[:, -1] = 20.0
    assert kept(filtered_logits(logits, config(top_p=top_p))) == [{size - 1}] * 2


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.99999])
def test_top_p_keeps_a_token_of_equal_logits(top_p: float) -> None:
    count = len(kept(filtered_logits(torch.zeros(1, 100), config(top_p=top_p)))[0])
    assert 1 <= count <= 100
    assert abs(count - 100 * top_p) <= 1.01


@pytest.mark.parametrize("changes", [{}, {"top_p": 1.0}, {"top_k": 8}, {"top_k": 1000}], ids=str)
def test_filters_that_keep_everything_change_nothing(changes: dict[str, Any]) -> None:
    logits = torch.randn(4, 8)
    torch.testing.assert_close(filtered_logits(logits, config(**changes)), logits)


def test_the_logits_that_came_in_are_left_alone() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    choice = config(temperature=0.5, top_k=3, top_p=0.5)
    filtered_logits(logits, choice)
    sample(logits, choice, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_filters_work_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 9).to(dtype)
    scores = filtered_logits(logits, config(temperature=0.7))
    torch.testing.assert_close(scores, logits.float() / 0.7)


def test_temperature_0_takes_the_largest_logit() -> None:
    logits = torch.randn(64, 33)
    out = sample(logits, config(temperature=0.0), None)
    assert out.dtype == torch.int64
    assert torch.equal(out, logits.argmax(-1))


def test_temperature_0_uses_no_randomness() -> None:
    state = torch.get_rng_state()
    sample(torch.randn(2, 3, generator=torch.Generator()), config(temperature=0.0, top_p=0.5), None)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-44, 1e-300])
def test_a_tiny_temperature_is_greedy_in_the_limit(temperature: float) -> None:
    logits = torch.tensor([[2.0, 5.0, -40.0], [-1.0, -3.0, -7.0]])
    out = sample(logits, config(temperature=temperature), torch.Generator().manual_seed(0))
    assert out.tolist() == [1, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.7},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(changes: dict[str, Any]) -> None:
    logits = [1.2, -0.4, 2.0, 0.1, 0.7, -1.5, 1.5, 0.4]
    choice = config(**changes)
    wanted = brute_force(logits, choice.temperature, choice.top_k, choice.top_p)
    rows = torch.tensor(logits).expand(DRAWS, -1)
    drawn = sample(rows, choice, torch.Generator().manual_seed(1234))
    counts = torch.bincount(drawn, minlength=len(logits)).tolist()
    assert {token for token, count in enumerate(counts) if count} == set(wanted)
    statistic = sum((counts[t] - DRAWS * p) ** 2 / (DRAWS * p) for t, p in wanted.items())
    assert statistic < CHI_SQUARE[len(wanted) - 1]


def test_frequencies_of_single_draws_one_after_another() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    generator = torch.Generator().manual_seed(77)
    choice = config()
    counts = [0, 0, 0]
    for _ in range(DRAWS // 10):
        counts[int(sample(logits, choice, generator))] += 1
    wanted = (logits[0].softmax(-1) * (DRAWS // 10)).tolist()
    statistic = sum((c - w) ** 2 / w for c, w in zip(counts, wanted, strict=True))
    assert statistic < CHI_SQUARE[2]


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_a_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(
    top_p: float, spread: float
) -> None:
    """Where the first few hundred tokens hold enough, and where they do not."""
    torch.manual_seed(4)
    logits = torch.randn(5, 3000, dtype=torch.float32) * spread
    found = filtered_logits(logits, config(top_p=top_p))
    assert kept(found) == kept(TopPLogitsWarper(top_p)(None, logits.clone()))


def test_a_nucleus_depends_on_its_row_alone() -> None:
    """Models in half precision find many tokens equally likely; another row, of which all are sorted, is no reason."""
    torch.manual_seed(0)
    logits = (torch.randn(40, 1000) * 2).bfloat16().float()
    settings = config(top_p=0.6, min_p=1e-6)
    together = filtered_logits(torch.cat((logits, torch.zeros(1, 1000))), settings)
    assert kept(together)[:-1] == [kept(filtered_logits(row[None], settings))[0] for row in logits]


def test_draws_of_a_large_vocabulary_keep_to_what_is_left() -> None:
    probability = torch.zeros(4, 50_000)
    probability[:, 7::1000] = 1.0
    drawn = torch.stack([draw(probability, None) for _ in range(200)])
    assert set((drawn % 1000).flatten().tolist()) == {7}
    assert len(set(drawn.flatten().tolist())) == 50


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7}, {"top_k": 400}, {"top_p": 0.999}],
    ids=str,
)
def test_draws_from_a_few_candidates_have_the_filtered_distribution(
    filters: dict[str, Any],
) -> None:
    """Over a vocabulary of which the first few hundred tokens hold all that is left, or do not."""
    torch.manual_seed(2)
    logits = torch.randn(600) * 3
    settings = config(temperature=1.2, **filters)
    expected = filtered_logits(logits[None], settings).softmax(-1)[0].double() * DRAWS
    drawn = sample(logits.expand(DRAWS, -1), settings, torch.Generator().manual_seed(1))
    seen = torch.bincount(drawn, minlength=600).double()
    assert not seen[expected == 0].any()
    common = expected >= 10
    rest = expected[~common].sum(), seen[~common].sum()
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum()
    statistic += (rest[1] - rest[0]) ** 2 / rest[0] if rest[0] > 10 else 0.0
    freedom = int(common.sum())
    assert float(statistic) < freedom + 4.5 * math.sqrt(2 * freedom) + 12


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("logits", [torch.randn(2, 9), torch.randn(2, 3000)])
def test_a_share_of_next_to_nothing_leaves_the_first_token(name, logits):
    config = GenerateConfig(**{name: 5e-324})
    kept = filtered_logits(logits, config).isfinite()
    assert kept.sum(-1).tolist() == [1, 1]
    if name == "top_p":
        assert kept.int().argmax(-1).tolist() == logits.argmax(-1).tolist()
        assert sample(logits, config, None).tolist() == logits.argmax(-1).tolist()


def test_a_row_draws_the_same_token_whatever_stands_beside_it() -> None:
    """Of a flat row a few tokens hold too little: it is drawn among all, and its neighbour as without it."""
    generator = torch.Generator().manual_seed(0)
    sharp = 3 * torch.randn(40, 4096, generator=generator)
    points = torch.rand(40, generator=generator, dtype=torch.float64)
    settings_ = config(top_p=0.9)
    alone = sample_marked(sharp, settings_, points)
    both = torch.cat([sharp, torch.zeros(1, 4096)])
    assert not bool((both.softmax(-1).topk(256).values.sum(-1) >= 0.9).all())
    found = sample_marked(both, settings_, torch.cat([points, points[:1]]))
    assert torch.equal(found[:-1], alone)
    one_by_one = [sample_marked(sharp[i : i + 1], settings_, points[i : i + 1]) for i in range(40)]
    assert torch.equal(torch.cat(one_by_one), alone)
