"""What is measured: a model as a generator will run it, on text, with the settings of a choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import Calibration, DecoupledLayerShape
from caramba_fast.cache.model import PrefillMode
from caramba_fast.models import LanguageModel
from caramba_fast.policy import retrieval, speed
from caramba_fast.policy.candidates import BASELINE, candidates_for
from caramba_fast.policy.gates import PromptForward, QualityMeter
from caramba_fast.policy.identity import device_identity, model_identity, versions
from caramba_fast.policy.plan import PlanKey
from caramba_fast.policy.settings import CachePolicyFields
from caramba_fast.policy.speed import StepMaker, StepTime
from caramba_fast.policy.texts import SAMPLED_ROWS, Windows, digest_of
from caramba_fast.quality import RecallFormat

#: Not part of a plan's key: where it is kept and when it is checked.
_NOT_IN_KEY = ("cache_plan_path", "cache_plan_probe", "cache_plan_probe_interval_sec")
#: Tokens of text the timed prompt is made of, repeated: what they are does not matter to time.
_TIMED_TEXT = 64

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """What is measured: a model as a generator will run it, and text.

    Attributes:
        model, batch_size, max_seq_len, prefill, calibration: of the generator.
        settings: what was asked for.
        ids: tokens given to measure on, or None.
        recall: how needles are written, or None.
        seed: of what is drawn.
        bos_token_id: first token of a text, for models that expect one.
        fields: settings for all streams where a spec says nothing.
        make_step: makes the step that is timed.
        progress: told what is being done.
    """

    model: LanguageModel
    settings: CachePolicyFields
    max_seq_len: int
    batch_size: int
    prefill: PrefillMode
    calibration: Calibration | None
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

    @property
    def baseline(self) -> str:
        """What quality and speed are relative to."""
        return BASELINE

    def check(self) -> None:
        """Raises ValueError for what does not fit together, before anything is measured."""
        for name, size in (("max_seq_len", self.max_seq_len), ("batch_size", self.batch_size)):
            if size < 1:
                raise ValueError(f"{name} is {size}; 1 or more is allowed")
        if self.settings.cache_quality_min_needle is not None and self.recall is None:
            raise ValueError(
                f"cache_quality_min_needle={self.settings.cache_quality_min_needle:g} needs to know how needles "
                "are written: give recall=RecallFormat.of(tokenizer), or leave it None"
            )
        if self.settings.gates:
            self.meter()  # too little text

    def windows(self, size: int, at_once: int = SAMPLED_ROWS) -> Windows:
        """Text to measure on, ``at_once`` rows sampled at once where none is given."""
        return Windows(self.model, size, self.ids, self.seed, self.bos_token_id, at_once)

    def meter(self) -> QualityMeter:
        """What measures quality."""
        settings = self.settings
        prompt, steps = settings.cache_quality_prompt_len, settings.cache_quality_decode_steps
        forward = PromptForward(self.model, prompt, self.prefill, self.calibration)
        return QualityMeter(forward, self.windows(prompt + steps + 1), BASELINE)

    def times(self, specs: Sequence[str]) -> dict[str, StepTime]:
        """Step times of specs and of the baseline."""
        settings = self.settings
        return speed.step_times(
            self.model, list(dict.fromkeys((BASELINE, *specs))), self._timed_prompt(),
            settings.cache_auto_bench_steps, prefill=self.prefill, calibration=self.calibration,
            make_step=self.make_step,
        )  # fmt: skip

    def _timed_prompt(self) -> Tensor:
        """(B, T) real tokens, a short text over and over."""
        rows, length = self.batch_size, self.settings.cache_auto_bench_prompt_len
        if self.ids is None:
            text = self.windows(min(length, _TIMED_TEXT), rows).take(0, rows)
        else:
            ids = torch.as_tensor(self.ids, dtype=torch.int64, device="cpu").flatten()
            text = ids[:_TIMED_TEXT].repeat(rows, 1)
        return text.repeat(1, -(-length // text.shape[1]))[:, :length]

    def needles(self, specs: Sequence[str], windows: Windows) -> dict[str, float]:
        """Share of needles found, relative to the baseline."""
        assert self.recall is not None
        return retrieval.needle_shares(
            self.model, specs, BASELINE, self.recall, retrieval.filler_of(windows, self.ids),
            calibration=self.calibration, bos_token_id=self.bos_token_id, seed=self.seed,
        )  # fmt: skip

    def key(self) -> PlanKey:
        """What a choice depends on."""
        settings = self.settings.model_dump(
            mode="json", include=set(CachePolicyFields.model_fields)
        )
        kept = {name: value for name, value in settings.items() if name not in _NOT_IN_KEY}
        kept["candidates"], kept["seed"] = self.specs(), self.seed
        decoupled = isinstance(self.model.cache_layout[0], DecoupledLayerShape)
        return PlanKey(
            model=model_identity(self.model, self.calibration),
            device=device_identity(self.model.device),
            versions=versions(self.model.device, decoupled), batch_size=self.batch_size,
            max_seq_len=self.max_seq_len, prefill=self.prefill, settings=kept,
            text=digest_of(self.ids, self.bos_token_id),
        )  # fmt: skip
