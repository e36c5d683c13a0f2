"""Speculation draws texts of the target's distribution, compared with an exact enumeration."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from support.speculation import model_of, plain, speculative

from caramba_fast.infer import GenerateConfig
from caramba_fast.infer.sampling import probabilities
from caramba_fast.models import Transformer

SMALL = {"vocab_size": 7, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
START = [1, 2, 5, 3, 2]
DRAWS, ROWS, NEW = 20_480, 512, 3


def chi_square_limit(freedom: int) -> float:
    """The quantile at p = 1e-4 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


@torch.no_grad()
def exact_distribution(model: Transformer, config: GenerateConfig) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of START by NEW tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW):
        prefixes = list(found)
        rows = torch.tensor([START + list(prefix) for prefix in prefixes], device=model.device)
        p = probabilities(model(rows)[:, -1], config).double().tolist()
        found = {
            (*prefix, token): found[prefix] * p[index][token]
            for (index, prefix), token in product(enumerate(prefixes), range(model.vocab_size))
            if p[index][token] > 0
        }
    return found


FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top-k and top-p": {"temperature": 1.1, "top_k": 5, "top_p": 0.9},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
}


#: Every filter, and every way to speculate.
@pytest.mark.parametrize(
    ("draft", "options", "filters"),
    [
        *(("model", {"spec_k": 2}, filters) for filters in FILTERS),
        ("model", {"spec_k": 3, "spec_extra_token": False}, "top-k and top-p"),
        ("model", {"spec_k": 2, "spec_method": "sample_match"}, "min-p"),
        ("model", {"spec_k": 2, "spec_method": "sample_match"}, "temperature"),
        ("lookup", {"spec_k": 2}, "top-k and top-p"),
    ],
    ids=str,
)
def test_sampled_texts_have_the_targets_distribution(
    device: torch.device, draft: str, options: dict[str, Any], filters: str
) -> None:
    """Chi-square over the joint distribution of the tokens, with the filters on for both models."""
    target, other = model_of(21, device, **SMALL), model_of(22, device, **SMALL)
    spec = speculative(
        target, other if draft == "model" else None, seed=3, max_new_tokens=NEW, max_seq_len=32,
        ignore_eos=True, **options, **FILTERS[filters],
    )  # fmt: skip
    expected = exact_distribution(target, spec.config)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(DRAWS // ROWS):
        spec.reset()
        seen.update(map(tuple, spec.generate([START] * ROWS)[:, -NEW:].tolist()))
    assert set(seen) <= set(expected)
    small = [text for text, p in expected.items() if p * DRAWS < 8]
    cells = [(p * DRAWS, seen[text]) for text, p in expected.items() if p * DRAWS >= 8]
    if small:
        cells.append((sum(expected[t] for t in small) * DRAWS, sum(seen[t] for t in small)))
    statistic = sum((got - want) ** 2 / want for want, got in cells if want > 0)
    assert statistic < chi_square_limit(len(cells) - 1)
    assert 0.05 < spec.acceptance_rate < 0.99  # both ways were taken


@pytest.mark.parametrize("method", ["reject_sampling", "sample_match"])
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_tokens_as_likely_as_the_last_of_top_k_are_drawn_as_without_a_draft(
    device: torch.device, draft: str, method: str
) -> None:
    target, other = model_of(21, device, **SMALL), model_of(22, device, **SMALL)
    for model in (target, other):
        model.lm_head.weight.data[1:] = model.lm_head.weight.data[1]  # token 0, and equals
    settings = {
        "seed": 3,
        "max_new_tokens": NEW,
        "temperature": 1.0,
        "top_k": 2,
        "ignore_eos": True,
    }
    spec = speculative(
        target, other if draft == "model" else None, spec_method=method, spec_k=2, **settings
    )
    expected = {text for text, p in exact_distribution(target, spec.config).items() if p > 0.002}
    for made in (spec, plain(target, **settings)):
        found = made.generate([START] * 8192)[:, -NEW:].tolist()
        assert expected <= set(map(tuple, found)), type(made)
    assert len({text[0] for text in expected}) > 2


@pytest.mark.parametrize("of_the_call", [False, True])
def test_a_draft_guesses_independently_of_the_text_under_one_seed(
    device: torch.device, of_the_call: bool
) -> None:
    """Random numbers of the target, drawn again by the draft, would favour texts whose first tokens go together."""
    target, other = model_of(21, device, **SMALL), model_of(22, device, **SMALL)
    spec = speculative(
        target, other, seed=3, max_new_tokens=NEW, spec_k=2, ignore_eos=True, **FILTERS["temperature"]
    )  # fmt: skip
    call: dict[str, Any] = {"seed": 5} if of_the_call else {}
    seen = Counter(map(tuple, spec.generate([START] * 8192, **call)[:, -NEW:].tolist()))
    expected = {text: p * 8192 for text, p in exact_distribution(target, spec.config).items()}
    cells = [(n, seen[text]) for text, n in expected.items() if n >= 8]
    statistic = sum((got - want) ** 2 / want for want, got in cells)
    assert statistic < chi_square_limit(len(cells))


def test_a_wrong_distribution_would_be_noticed(device: torch.device) -> None:
    """The test above has the power it needs: a target 15% hotter fails it."""
    target = model_of(21, device, **SMALL)
    base = GenerateConfig(**FILTERS["temperature"])
    right, wrong = (
        exact_distribution(target, base.updated(temperature=t)) for t in (1.3, 1.3 * 1.15)
    )
    kept = [text for text, p in right.items() if p * DRAWS >= 8]
    shift = sum(DRAWS * (right[t] - wrong[t]) ** 2 / right[t] for t in kept)
    assert shift > 1.5 * chi_square_limit(len(kept))
