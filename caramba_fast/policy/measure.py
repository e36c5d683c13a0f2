"""Measures the quality of candidates against an fp16 cache on real tokens, and applies the quality gates.

A window is a prompt, which is prefilled, and further tokens, which are fed through the cache and scored. Windows are
added until no gate's limit lies within the 95% confidence interval of its figure, or until `MOST_WINDOWS`. The needle
gate hides lines in text and counts how many the model retrieves through each cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import DecoupledLayerShape
from caramba_fast.cache.model import PrefillMode
from caramba_fast.config import cache_configs
from caramba_fast.infer.policy_fields import GATES, CachePolicyFields
from caramba_fast.models import LanguageModel
from caramba_fast.policy.candidates import BASELINE, candidates_for
from caramba_fast.policy.plan import (
    PlanKey,
    config_digest,
    device_identity,
    model_identity,
    versions,
)
from caramba_fast.policy.timing import StepMaker, StepTime, step_times
from caramba_fast.quality import (
    CacheQuality,
    CacheSize,
    RecallFormat,
    Scores,
    cache_quality,
    cached_forward,
    compare,
)
from caramba_fast.quality.compare import forced, new_session, with_room
from caramba_fast.quality.identity import text_digest, token_tensor
from caramba_fast.quality.text import SAMPLED_ROWS, Windows, needle_batches, rows_of_text

#: Windows measured at first, and at most while a gate is undecided.
FEWEST_WINDOWS, MOST_WINDOWS = 64, 256
#: Windows per batch.
ROWS = 8
#: Query tokens per forward pass, within the limit of one attention call. The logits equal those of single steps.
TOGETHER = 16
#: Tokens of a row with needles, and needles in all.
CONTEXT, NEEDLES = 512, 128
NEEDLE_ROWS = 4
#: If the baseline finds a smaller share than this, needles cannot tell caches apart.
LEAST_FOUND = 0.1
#: Settings that are not part of a plan's key: where it is saved and when it is probed.
_NOT_IN_KEY = ("cache_plan_path", "cache_plan_probe", "cache_plan_probe_interval_sec")
#: Tokens of text that are repeated to form the timed prompt; their values do not affect the time.
_TIMED_TEXT = 64

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Figures:
    """Quality of a candidate relative to the baseline.

    Attributes:
        delta_nll: increase of the mean negative log likelihood, nats per token.
        ppl_ratio: exp(delta_nll).
        mean_kl: mean KL(baseline ‖ candidate), nats.
        needles: share of needles found, relative to the baseline; None if not measured.
        predictions: predictions compared.
        windows: windows of text, the independent samples of the intervals.
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
        """Converts figures of `caramba_fast.quality`."""
        ci = {name: found.ci[name] for name in ("delta_nll", "ppl_ratio", "mean_kl")}
        means = found.delta_nll, found.ppl_ratio, found.mean_kl
        return cls(*means, needles, found.tokens, found.windows, ci)


class PromptForward:
    """A `Forward` that prefills ``prompt_len`` tokens as a generator does and feeds the rest through the cache.

    The logits of the prompt's own tokens are not computed; they are nan.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt_len: int,
        prefill: PrefillMode = "exact",
    ) -> None:
        self.model, self.prompt_len = model, prompt_len
        self.prefill: PrefillMode = prefill

    @torch.no_grad()
    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Logits (B, t, V) of the prompt (nan), then of consecutive chunks of the rest."""
        model, rows = self.model, len(ids)
        configs = with_room(cache_configs(spec), TOGETHER)  # every cache takes the same chunks
        session = new_session(model, rows, ids.shape[1], configs, prefill=self.prefill)
        logits = session.feed(ids[:, : self.prompt_len].tolist())
        yield logits.new_full((), torch.nan).expand(rows, self.prompt_len, logits.shape[-1])
        yield from forced(session, ids[:, self.prompt_len :], TOGETHER)


class QualityMeter:
    """Measures candidates on windows of text, and keeps the scores."""

    def __init__(
        self,
        forward: PromptForward,
        windows: Windows,
        baseline: str,
        progress: Progress = lambda _: None,
    ) -> None:
        self.forward, self.windows, self.baseline = forward, windows, baseline
        self.progress = progress
        self._scores: dict[str, list[tuple[Scores, Scores]]] = {}

    def figures(self, specs: Sequence[str], stop: int) -> dict[str, Figures]:
        """Figures of each spec on the first ``stop`` windows, or on all if there are fewer."""
        held = {spec: ROWS * len(self._scores.get(spec, ())) for spec in specs}
        for start in range(min(held.values(), default=stop), stop, ROWS):
            ids = self.windows.take(start, min(start + ROWS, stop))
            missing = [spec for spec in specs if held[spec] <= start]
            if len(ids):
                done = f"{start} of {stop} windows"
                self.progress(f"quality of {len(missing)} caches, {done}")
                self._measure(ids, missing)
        return {spec: self._figures(spec) for spec in specs}

    def _measure(self, ids: Tensor, specs: Sequence[str]) -> None:
        first = self.forward.prompt_len
        positions = torch.arange(first, ids.shape[1] - 1, device="cpu").expand(len(ids), -1)
        scores = compare(self.forward, ids, specs, self.baseline, positions)
        for spec in specs:
            self._scores.setdefault(spec, []).append((scores[spec], scores[self.baseline]))

    def _figures(self, spec: str) -> Figures:
        pairs = self._scores[spec]
        own, base = (Scores.joined([pair[side] for pair in pairs]) for side in (0, 1))
        nothing = CacheSize(0.0, 0.0, 0.0)
        return Figures.of(cache_quality(spec, own, own if spec == self.baseline else base, nothing))


def verdict(figures: Figures, gates: Mapping[str, float]) -> str | None:
    """Why the figures fail the gates, or None if they pass. nan fails."""
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
    """Whether a gate's limit lies within the interval of its figure, so that more windows may change the verdict.

    False once another gate has clearly failed.
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
    """Whether the whole interval of a gated figure is beyond its limit, or the figure is nan."""
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
    """Figures of each spec, on as many windows as its gates need to be decided."""
    found = meter.figures(specs, FEWEST_WINDOWS)
    stop = FEWEST_WINDOWS
    while stop < MOST_WINDOWS:
        open_ = [spec for spec in specs if undecided(found[spec], gates)]
        if not open_ or len(meter.windows.take(stop, stop + 1)) == 0:
            break
        stop *= 2
        found.update(meter.figures(open_, stop))
    return found


@dataclass(frozen=True)
class Subject:
    """What is measured: a model as a generator will run it, and text.

    Attributes:
        model, batch_size, max_seq_len, prefill: of the generator.
        settings: budget, gates, candidates and how to measure.
        ids: tokens to measure on; None samples them from the model.
        recall: the needle format, or None.
        seed: seed of everything random.
        bos_token_id: first token of a text, for models that expect one.
        fields: settings of all streams, unless a spec sets them itself.
        make_step: makes the step that is timed.
        progress: called with a description of each stage.
    """

    model: LanguageModel
    settings: CachePolicyFields
    max_seq_len: int
    batch_size: int
    prefill: PrefillMode
    ids: Tensor | Sequence[int] | None
    recall: RecallFormat | None
    seed: int
    bos_token_id: int | None
    fields: Mapping[str, Any]
    make_step: StepMaker | None
    progress: Progress

    def specs(self) -> list[str]:
        """The candidates."""
        given = self.settings.cache_auto_candidates
        return candidates_for(self.model.cache_layout, given, self.fields)

    def check(self) -> None:
        """Raises ValueError for settings that do not fit together, before anything is measured."""
        for name, size in (("max_seq_len", self.max_seq_len), ("batch_size", self.batch_size)):
            if size < 1:
                raise ValueError(f"{name} is {size}; 1 or more is allowed")
        if self.settings.cache_quality_min_needle is not None and self.recall is None:
            raise ValueError(
                f"cache_quality_min_needle={self.settings.cache_quality_min_needle:g} needs to know how needles "
                "are written: give recall=RecallFormat.of(tokenizer), or leave it None"
            )
        if self.ids is not None:
            rows_of_text(token_tensor(self.ids), self.model)
        if self.settings.gates:
            self.meter()  # raises if there is too little text

    def windows(self, size: int, at_once: int = SAMPLED_ROWS) -> Windows:
        """Text to measure on; if none was given, sampled from the model, ``at_once`` rows at a time."""
        return Windows(self.model, size, self.ids, self.seed, self.bos_token_id, at_once)

    def meter(self) -> QualityMeter:
        """A `QualityMeter` for the settings."""
        settings = self.settings
        prompt, steps = settings.cache_quality_prompt_len, settings.cache_quality_decode_steps
        forward = PromptForward(self.model, prompt, self.prefill)
        return QualityMeter(forward, self.windows(prompt + steps + 1), BASELINE, self.progress)

    def times(self, specs: Sequence[str]) -> dict[str, StepTime]:
        """Step times of the specs and the baseline."""
        settings = self.settings
        return step_times(
            self.model, list(dict.fromkeys((BASELINE, *specs))), self._timed_prompt(),
            settings.cache_auto_bench_steps, prefill=self.prefill,
            make_step=self.make_step,
        )  # fmt: skip

    def _timed_prompt(self) -> Tensor:
        """(B, T) real tokens: a short text, repeated."""
        rows, length = self.batch_size, self.settings.cache_auto_bench_prompt_len
        if self.ids is None:
            text = self.windows(min(length, _TIMED_TEXT), rows).take(0, rows)
        else:
            text = token_tensor(self.ids).flatten()[:_TIMED_TEXT].repeat(rows, 1)
        return text.repeat(1, -(-length // text.shape[1]))[:, :length]

    def needles(
        self, specs: Sequence[str], windows: Windows, *, required: bool = True
    ) -> dict[str, float]:
        """Share of needles each cache finds (greedy), relative to the baseline on the same needles.

        ``windows`` is the text that needles are hidden in, repeated if it is short. Raises ValueError if the baseline
        finds fewer than 10% of the needles, so that the gate means nothing for this model, or needles do not fit into
        the context. Unless ``required`` by a gate, a model that cannot retrieve needles, or with too few positions,
        gets {}.
        """
        assert self.recall is not None
        positions = getattr(self.model, "max_positions", None)
        if not required and positions is not None and positions < CONTEXT:
            return {}
        filler = windows.filler(CONTEXT)
        text = np.tile(filler, -(-CONTEXT // len(filler)))
        forward, found, total = cached_forward(self.model), dict.fromkeys((BASELINE, *specs), 0), 0
        for batch in needle_batches(
            self.recall, text, CONTEXT, NEEDLES, NEEDLE_ROWS, self.bos_token_id, self.seed
        ):
            ids = torch.from_numpy(batch.ids)
            scores = compare(forward, ids, specs, BASELINE, positions=batch.positions)
            total += scores[BASELINE].correct.size
            for spec in found:
                found[spec] += int(scores[spec].correct.sum())
        if found[BASELINE] < LEAST_FOUND * total:
            if not required:
                return {}
            raise ValueError(
                f"cache_quality_min_needle: the model finds {found[BASELINE]} of {total} needles with a {BASELINE} "
                f"cache, fewer than {LEAST_FOUND:.0%}, so that they cannot tell caches apart; leave it None"
            )
        return {spec: found[spec] / found[BASELINE] for spec in specs}

    def key(self) -> PlanKey:
        """Everything the choice depends on."""
        settings = self.settings.model_dump(
            mode="json", include=set(CachePolicyFields.model_fields)
        )
        kept = {name: value for name, value in settings.items() if name not in _NOT_IN_KEY}
        kept["candidates"], kept["seed"] = self.specs(), self.seed
        decoupled = isinstance(self.model.cache_layout[0], DecoupledLayerShape)
        return PlanKey(
            model=model_identity(self.model),
            device=device_identity(self.model.device),
            versions=versions(self.model.device, decoupled), batch_size=self.batch_size,
            max_seq_len=self.max_seq_len, prefill=self.prefill, settings=kept,
            text=text_digest(self.ids, self.bos_token_id), config_digest=config_digest(self.model),
        )  # fmt: skip
