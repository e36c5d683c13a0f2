"""Quality gates: what a candidate costs against an fp16 cache on real tokens, and whether that is too much.

A window is a prompt that is prefilled and tokens that are then fed through the cache; predictions after
those are compared. Figures come from `caramba_fast.quality`. Windows are added until every gate is clear
of its limit by the 95% confidence interval, or there are enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import Calibration, ModelKVCache
from caramba_fast.cache.model import PrefillMode
from caramba_fast.config import cache_configs
from caramba_fast.models import LanguageModel
from caramba_fast.policy.settings import GATES
from caramba_fast.policy.texts import Windows
from caramba_fast.quality import CacheQuality, CacheSize, Scores, cache_quality, compare

#: Windows measured at first, and at most where a gate stays undecided.
FEWEST_WINDOWS, MOST_WINDOWS = 64, 256
#: Windows computed at once; they share the constants of the transforms, as rows of a batch do.
ROWS = 8
#: Query tokens fed at once, within what attention takes in one pass. Several at once give what single steps do.
TOGETHER = 16


@dataclass(frozen=True)
class Figures:
    """What a candidate costs.

    Attributes:
        delta_nll: nats a token became less likely.
        ppl_ratio: exp(delta_nll).
        mean_kl: mean KL(baseline ‖ candidate), nats.
        needles: share of needles found, relative to the baseline; None where they were not asked for.
        predictions: predictions compared.
        windows: independent samples of the intervals.
        ci: 95% confidence interval of each figure, by name.
    """

    delta_nll: float
    ppl_ratio: float
    mean_kl: float
    needles: float | None = None
    predictions: int = 0
    windows: int = 0
    ci: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, found: CacheQuality, needles: float | None = None) -> Figures:
        """From the figures of the quality lab."""
        ci = {name: found.ci[name] for name in ("delta_nll", "ppl_ratio", "mean_kl")}
        return cls(
            found.delta_nll,
            found.ppl_ratio,
            found.mean_kl,
            needles,
            found.tokens,
            found.windows,
            ci,
        )


class PromptForward:
    """A `Forward` that prefills a prompt as a generator does and feeds the rest through the cache.

    What the prompt's own tokens predict is not computed: those logits are nan.

    Args:
        model: the model.
        prompt_len: tokens prefilled.
        prefill, calibration: as in `ModelKVCache`.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt_len: int,
        prefill: PrefillMode = "exact",
        calibration: Calibration | None = None,
    ) -> None:
        self.model, self.prompt_len = model, prompt_len
        self.prefill: PrefillMode = prefill
        self.calibration = calibration

    @torch.no_grad()
    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Logits (B, t, V) of the prompt (nan), then of stretches of what follows."""
        model, rows = self.model, len(ids)
        configs: dict[str, Any] = cache_configs(spec)
        cache = ModelKVCache(
            model.cache_layout, rows, ids.shape[1], device=model.device, prefill=self.prefill,
            calibration=self.calibration, **configs,
        )  # fmt: skip
        ids = ids.to(model.device)
        last = torch.full((rows,), self.prompt_len - 1, device=model.device)
        logits = model.forward(ids[:, : self.prompt_len], cache, logits_index=last)
        yield logits.new_full((), torch.nan).expand(rows, self.prompt_len, logits.shape[-1])
        for part in ids[:, self.prompt_len :].split(_together(cache), dim=1):
            yield model.forward(part, cache)


def _together(cache: ModelKVCache) -> int:
    slack = min(layer.tail_slack for layer in cache) if cache[0].residual_len else TOGETHER
    return max(1, min(TOGETHER, slack))


class QualityMeter:
    """Measures candidates on windows of text, and remembers what it has measured.

    Args:
        forward: runs a window through a cache.
        windows: the text.
        baseline: the cache to compare with.
    """

    def __init__(self, forward: PromptForward, windows: Windows, baseline: str) -> None:
        self.forward, self.windows, self.baseline = forward, windows, baseline
        self._scores: dict[str, list[tuple[Scores, Scores]]] = {}

    def figures(self, specs: Sequence[str], stop: int) -> dict[str, Figures]:
        """Figures of each spec on the first ``stop`` windows, or as many as there are."""
        held = {spec: ROWS * len(self._scores.get(spec, ())) for spec in specs}
        for start in range(min(held.values(), default=stop), stop, ROWS):
            ids = self.windows.take(start, min(start + ROWS, stop))
            missing = [spec for spec in specs if held[spec] <= start]
            if len(ids):
                self._measure(ids, missing)
        return {spec: self._figures(spec) for spec in specs}

    def _measure(self, ids: Tensor, specs: Sequence[str]) -> None:
        first = self.forward.prompt_len
        positions = torch.arange(first, ids.shape[1] - 1).expand(len(ids), -1)
        scores = compare(self.forward, ids, specs, self.baseline, positions)
        for spec in specs:
            self._scores.setdefault(spec, []).append((scores[spec], scores[self.baseline]))

    def _figures(self, spec: str) -> Figures:
        pairs = self._scores[spec]
        own, base = (_joined([pair[side] for pair in pairs]) for side in (0, 1))
        nothing = CacheSize(0.0, 0.0, 0.0)
        return Figures.of(cache_quality(spec, own, own if spec == self.baseline else base, nothing))


def _joined(parts: Sequence[Scores]) -> Scores:
    names = (part.name for part in fields(Scores))
    return Scores(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def verdict(figures: Figures, gates: Mapping[str, float]) -> str | None:
    """Why the figures fail the gates, or None. What is not a number fails."""
    reasons = []
    for name, limit in gates.items():
        value = getattr(figures, GATES[name])
        if value is None:
            continue
        least = name == "cache_quality_min_needle"
        if not (value >= limit if least else value <= limit):
            sign = "<" if least else ">"
            reasons.append(f"{GATES[name]} {value:.4g} {sign} {limit:g}")
    return ", ".join(reasons) or None


def undecided(figures: Figures, gates: Mapping[str, float]) -> bool:
    """Whether the interval of a gated figure holds the limit, so that more windows may change the verdict.

    Not so once another gate has clearly failed.
    """
    spans = [
        (figures.ci[GATES[name]], limit)
        for name, limit in gates.items()
        if GATES[name] in figures.ci
    ]
    if any(low > limit for (low, _), limit in spans):
        return False
    return any(low <= limit < high for (low, high), limit in spans)


def clearly_fails(figures: Figures, gates: Mapping[str, float]) -> bool:
    """Whether a gated figure is beyond its limit by the whole interval, or is no number."""
    for name, limit in gates.items():
        if GATES[name] in figures.ci:
            low, _ = figures.ci[GATES[name]]
            value = getattr(figures, GATES[name])
            if value != value or low > limit:  # noqa: PLR0124 - nan
                return True
    return False


def measure_quality(
    meter: QualityMeter, specs: Sequence[str], gates: Mapping[str, float]
) -> dict[str, Figures]:
    """Figures of each spec on as many windows as its gates need."""
    found = meter.figures(specs, FEWEST_WINDOWS)
    stop = FEWEST_WINDOWS
    while stop < MOST_WINDOWS:
        open_ = [spec for spec in specs if undecided(found[spec], gates)]
        if not open_ or len(meter.windows.take(stop, stop + 1)) == 0:
            break
        stop *= 2
        found.update(meter.figures(open_, stop))
    return found
