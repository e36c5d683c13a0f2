"""choose_cache: budget, quality gates, speed, and a plan that is kept.

The stages are in `caramba_fast.policy.stages`; this file runs them in order, and keeps and probes plans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import Calibration
from caramba_fast.cache.model import PrefillMode
from caramba_fast.models import LanguageModel
from caramba_fast.policy import gates as quality
from caramba_fast.policy import stages
from caramba_fast.policy.plan import CachePlan, CandidateRow, PlanKey
from caramba_fast.policy.plan_file import PlanFile
from caramba_fast.policy.settings import CachePolicyFields
from caramba_fast.policy.speed import StepMaker
from caramba_fast.policy.subject import Progress, Subject
from caramba_fast.policy.table import plain_table
from caramba_fast.policy.texts import begin_token
from caramba_fast.quality import RecallFormat

#: A probe chooses again if the runner-up is faster by more: a plan should not flap with what else runs.
PROBE_MARGIN = 0.10


class NoCandidateError(ValueError):
    """No cache fits the budget, or none that fits passes the gates; ``rows`` has what was measured."""

    def __init__(self, message: str, rows: Sequence[CandidateRow]) -> None:
        super().__init__(f"{message}\n{plain_table(rows)}")
        self.rows = tuple(rows)


def choose_cache(
    model: LanguageModel,
    settings: CachePolicyFields,
    *,
    max_seq_len: int,
    batch_size: int = 1,
    prefill: PrefillMode = "exact",
    calibration: Calibration | None = None,
    calibration_ids: Tensor | Sequence[int] | None = None,
    recall: RecallFormat | None = None,
    bos_token_id: int | None = None,
    fields: Mapping[str, Any] | None = None,
    seed: int = 0,
    measure_all: bool = False,
    make_step: StepMaker | None = None,
    progress: Progress | None = None,
) -> CachePlan:
    """The cache for a model on this device: the fastest that fits the budget and passes the gates.

    1. Budget: bytes of the whole cache of ``batch_size`` × ``max_seq_len``, counted exactly.
    2. Quality gates, on real tokens, against an fp16 cache (`caramba_fast.policy.gates`).
    3. Speed: medians of interleaved decode steps; ties within 3% go to fewer bytes. With
       ``cache_auto_benchmark=False`` the smallest that passes is taken.
    4. The plan is kept at ``cache_plan_path`` and found again by everything it depends on.

    Processes that share a plan file choose one after the other, so that those of one job agree and do not
    disturb each other's timing. A model whose forward pass waits for other processes must not choose under a
    shared file: choose in one process and hand the plan on.

    Args:
        model: the model, on the device it will run on.
        settings: budget, gates, and how to measure.
        max_seq_len, batch_size, prefill, calibration: of the cache, as in `ModelKVCache`.
        calibration_ids: (N,) or (B, T) token ids of real text to measure on; without, the model writes it.
        recall: how needles are written, ``RecallFormat.of(tokenizer)``; ``cache_quality_min_needle`` needs it.
        bos_token_id: first token of a text; by default the model's own, if it names one.
        fields: fields of `KVCacheTensorConfig` for all streams of all candidates, where a spec says nothing.
        seed: of windows, text and needles.
        measure_all: measure quality and speed of candidates that fell too, for a table; the choice is the
            same.
        make_step: makes the step that is timed; by default a forward pass.
        progress: called with what is being done, in words.

    Raises:
        NoCandidateError: nothing fits, or nothing that fits passes and ``on_no_candidate`` is "raise".
        ValueError: sizes below 1, or settings that do not fit the model or the text.
        PlanFileError: the plan file cannot be read or written; before anything is measured.
    """
    subject = Subject(
        model, settings, max_seq_len, batch_size, prefill, calibration, calibration_ids, recall, seed,
        begin_token(model) if bos_token_id is None else bos_token_id, fields or {}, make_step,
        progress or (lambda _: None),
    )  # fmt: skip
    subject.check()
    if settings.cache_plan_path is None:
        return _choose(subject, subject.key(), measure_all)
    return _kept_or_chosen(subject, PlanFile(settings.cache_plan_path), measure_all)


def _kept_or_chosen(subject: Subject, file: PlanFile, measure_all: bool) -> CachePlan:
    key = subject.key()
    kept = _kept(file, key, measure_all)
    if kept is not None and not _due(kept, subject.settings):
        return kept
    with file.locked():
        kept = _kept(file, key, measure_all)  # another process may have been faster
        if kept is not None and _due(kept, subject.settings):
            kept = _probed(subject, kept)
            if kept is not None:
                file.put(kept)
        if kept is None:
            kept = _choose(subject, key, measure_all)
            file.put(kept)
    return kept


def _kept(file: PlanFile, key: PlanKey, measure_all: bool) -> CachePlan | None:
    plan = file.get(key)
    if plan is None:
        return None
    if measure_all and any(row.step_ms is None or not row.predictions for row in plan.rows):
        return None
    return plan.model_copy(update={"reused": True})


def _due(plan: CachePlan, settings: CachePolicyFields) -> bool:
    age = time.time() - max(plan.made_at, plan.probed_at)
    return settings.cache_plan_probe and not 0 <= age < settings.cache_plan_probe_interval_sec


@torch.no_grad()
def _choose(subject: Subject, key: PlanKey, measure_all: bool) -> CachePlan:
    settings, found = subject.settings, stages.candidates_of(subject)
    fitting = stages.within_budget(found, settings)
    if not fitting and not measure_all:
        raise NoCandidateError(_nothing_fits(settings), stages.rows_of(found, None, settings))
    text = stages.measure_quality(subject, found if measure_all else fitting, forced=measure_all)
    fit = stages.passing(fitting, settings)
    failed = bool(fitting) and not fit
    if failed and settings.on_no_candidate == "best":
        fit = [min(fitting, key=lambda candidate: candidate.loss)]
    base = stages.measure_speed(subject, found if measure_all else fit, forced=measure_all)
    if not fit:
        why = _nothing_passes(settings) if fitting else _nothing_fits(settings)
        raise NoCandidateError(why, stages.rows_of(found, base, settings))
    why_best = fit[0].reason
    chosen = stages.pick(fit, settings)
    if failed:
        chosen.is_now("chosen", f"fails ({why_best}), and loses least of those that fit")
    now = time.time()
    return CachePlan(
        spec=chosen.spec, nbytes=chosen.nbytes, bytes_per_token=chosen.bytes_per_token,
        baseline=subject.baseline, key=key, text=text,
        notes=(_nothing_passes(settings),) if failed else (),
        rows=tuple(stages.rows_of(found, base, settings)), made_at=now, probed_at=now,
    )  # fmt: skip


def _nothing_fits(settings: CachePolicyFields) -> str:
    return (
        f"cache_budget_mb={settings.cache_budget_mb:g}: no candidate fits; allow more, or a shorter "
        "max_seq_len, or smaller cache_auto_candidates"
    )


def _nothing_passes(settings: CachePolicyFields) -> str:
    gates = ", ".join(f"{name}={limit:g}" for name, limit in settings.gates.items())
    return f"nothing that fits passes the quality gates ({gates})"


@torch.no_grad()
def _probed(subject: Subject, plan: CachePlan) -> CachePlan | None:
    """The plan with a new date if it still holds, else None: it is to be made anew.

    The winner and the runner-up are timed again, and the winner's gates looked at on one batch of windows.
    """
    subject.progress(f"probing the kept plan, {plan.spec}")
    settings, gates = subject.settings, subject.settings.gates
    if gates and not plan.notes:
        figures = subject.meter().figures([plan.spec], quality.ROWS)[plan.spec]
        if quality.clearly_fails(figures, gates):
            return None
    if settings.cache_auto_benchmark and plan.runner_up is not None:
        times = subject.times([plan.spec, plan.runner_up])
        if times[plan.spec].median > (1 + PROBE_MARGIN) * times[plan.runner_up].median:
            return None
    return plan.model_copy(update={"probed_at": time.time()})
