"""The needle gate: lines hidden in text, and the share of them still found through each cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import Calibration
from caramba_fast.models import LanguageModel
from caramba_fast.policy.texts import Windows
from caramba_fast.quality import RecallFormat, cached_forward, compare
from caramba_fast.quality.batches import needle_batches

#: Tokens of a row that hides needles, and needles asked for in all.
CONTEXT, NEEDLES = 512, 128
ROWS = 4
#: A baseline that finds less than this tells nothing about caches.
LEAST_FOUND = 0.1


def needle_shares(
    model: LanguageModel,
    specs: Sequence[str],
    baseline: str,
    form: RecallFormat,
    filler: np.ndarray,
    *,
    context: int = CONTEXT,
    calibration: Calibration | None = None,
    bos_token_id: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Share of needles each cache finds (greedy), relative to the baseline on the same needles.

    Args:
        model, calibration: what is run.
        specs: caches.
        baseline: the cache to compare with.
        form: how needles are written.
        filler: (N,) token ids of the text they are hidden in, repeated if it is short.
        context: tokens of a row.
        bos_token_id: first token of a row, for models that expect one.
        seed: needles and places.

    Raises:
        ValueError: the baseline finds next to none, so that the gate means nothing for this model; or a
            context without room.
    """
    text = np.tile(filler, -(-context // len(filler)))
    forward = cached_forward(model, calibration=calibration)
    found = dict.fromkeys((baseline, *specs), 0)
    total = 0
    for batch in needle_batches(form, text, context, NEEDLES, ROWS, bos_token_id, seed):
        scores = compare(
            forward, torch.from_numpy(batch.ids), specs, baseline, positions=batch.positions
        )
        total += scores[baseline].correct.size
        for spec in found:
            found[spec] += int(scores[spec].correct.sum())
    if found[baseline] < LEAST_FOUND * total:
        raise ValueError(
            f"cache_quality_min_needle: the model finds {found[baseline]} of {total} needles with a {baseline} "
            f"cache, fewer than {LEAST_FOUND:.0%}, so that they cannot tell caches apart; leave it None"
        )
    return {spec: found[spec] / found[baseline] for spec in specs}


def filler_of(windows: Windows, given: Tensor | Sequence[int] | None) -> np.ndarray:
    """Text to hide needles in: what was given, else what the model wrote."""
    if given is not None:
        return torch.as_tensor(given, dtype=torch.int64, device="cpu").flatten().numpy()
    return windows.take(0, -(-CONTEXT // windows.size)).flatten().numpy()
