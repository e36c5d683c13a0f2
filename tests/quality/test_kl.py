"""KL of the quality lab where the baseline gives tokens next to no probability."""

from __future__ import annotations

import math

import pytest
import torch

from caramba_fast.quality.compare import compare


@pytest.mark.parametrize("gap", [1.0, 20.0, 79.0, 80.5, 82.0, 90.0, 104.0, 500.0, math.inf])
@pytest.mark.parametrize("taken", [1.0, -3.0, -30.0])
def test_probability_that_only_the_candidate_gives_counts(gap: float, taken: float) -> None:
    logits = {
        "fp16": torch.tensor([[[0.0, -gap, -3.0, 0.5]]]),
        "q4": torch.tensor([[[0.0, taken, -3.0, 0.4]]]),
    }
    found = compare(lambda _, spec: iter([logits[spec].clone()]), torch.tensor([[0, 0]]), ["q4"])
    p, q = (x.double().log_softmax(-1) for x in logits.values())
    wanted = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum()
    assert float(found["q4"].kl[0, 0]) == pytest.approx(float(wanted), rel=1e-4)


def test_a_vocabulary_that_both_mask_costs_nothing() -> None:
    masked = torch.tensor([[[0.0, -math.inf, -3.0]]])
    found = compare(lambda *_: iter([masked.clone()]), torch.tensor([[0, 0]]), ["q4"])
    assert float(found["q4"].kl[0, 0]) == 0
