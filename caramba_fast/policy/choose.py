"""choose_cache: filters candidates by budget and quality gates, picks by speed, and saves the plan to a file."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.model import PrefillMode
from caramba_fast.config import short_name
from caramba_fast.infer.policy_fields import CachePolicyFields
from caramba_fast.models import LanguageModel
from caramba_fast.policy import measure as gates
from caramba_fast.policy.candidates import BASELINE, bytes_per_token, cache_bytes
from caramba_fast.policy.measure import Figures, Progress, Subject
from caramba_fast.policy.plan import CachePlan, CandidateRow, PlanKey, Status, plain_table
from caramba_fast.policy.plan_file import PlanFile
from caramba_fast.policy.timing import StepMaker, StepTime, recorded_step
from caramba_fast.quality import RecallFormat
from caramba_fast.quality.text import begin_token

#: Relative difference in step time that counts as a tie, which the cache with fewer bytes wins. If the steps of the
#: fastest spread wider, the tolerance is their spread, up to WIDEST_TIE, so that runs on a busy machine agree.
TIE, WIDEST_TIE = 0.03, 0.10
#: A probe discards the plan only if the runner-up is faster by more than this, so that other load does not flip it.
PROBE_MARGIN = 0.10


@dataclass
class Candidate:
    """A candidate and what has been measured of it so far."""

    spec: str
    nbytes: int
    bytes_per_token: float
    figures: Figures | None = None
    time: StepTime | None = None
    status: Status = "passed"
    reason: str = ""

    def is_now(self, status: Status, reason: str) -> None:
        """Sets the status and its reason."""
        self.status, self.reason = status, reason

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        assert self.time is not None
        return self.time.median

    @property
    def loss(self) -> float:
        """Mean KL; infinite if not measured or nan."""
        kl = math.nan if self.figures is None else self.figures.mean_kl
        return math.inf if math.isnan(kl) else kl


def candidates_of(subject: Subject) -> list[Candidate]:
    """All candidates with their sizes."""
    layout, rows, length = subject.model.cache_layout, subject.batch_size, subject.max_seq_len
    return [
        Candidate(spec, cache_bytes(layout, spec, rows, length), bytes_per_token(layout, spec))
        for spec in subject.specs()
    ]


def within_budget(found: Sequence[Candidate], settings: CachePolicyFields) -> list[Candidate]:
    """Stage 1: the candidates within the budget."""
    most = settings.budget_bytes
    for candidate in found:
        if most is not None and candidate.nbytes > most:
            candidate.is_now("budget", f"over the budget of {settings.cache_budget_mb:g} MiB")
    return [candidate for candidate in found if candidate.status != "budget"]


def measure_quality(subject: Subject, wanted: Sequence[Candidate], *, forced: bool) -> str:
    """Stage 2: measures quality if a gate is set or ``forced``; returns a description of the text used."""
    limits = subject.settings.gates
    if not wanted or not (limits or forced):
        return ""
    specs = [candidate.spec for candidate in wanted]
    subject.progress(f"quality of {len(specs)} caches")
    meter = subject.meter()
    found = gates.measure_quality(meter, specs, limits)
    gated = "cache_quality_min_needle" in limits
    if gated or (forced and subject.recall is not None):
        subject.progress(f"needles through {len(specs)} caches")
        for spec, share in subject.needles(specs, meter.windows, required=gated).items():
            found[spec] = replace(found[spec], needles=share)
    for candidate in wanted:
        candidate.figures = found[candidate.spec]
    return meter.windows.describe()


def passing(fitting: Sequence[Candidate], settings: CachePolicyFields) -> list[Candidate]:
    """The candidates whose figures pass every gate."""
    for candidate in fitting:
        if candidate.figures is not None:
            why = gates.verdict(candidate.figures, settings.gates)
            if why is not None:
                candidate.is_now("quality", why)
    return [candidate for candidate in fitting if candidate.status != "quality"]


def measure_speed(
    subject: Subject, wanted: Sequence[Candidate], *, forced: bool
) -> StepTime | None:
    """Stage 3: times decode steps if there is a choice to make or ``forced``; returns the baseline's time."""
    timed = forced or (subject.settings.cache_auto_benchmark and len(wanted) > 1)
    if not wanted or not timed:
        return None
    subject.progress(f"decode steps of {len(wanted)} caches")
    times = subject.times([candidate.spec for candidate in wanted])
    for candidate in wanted:
        candidate.time = times[candidate.spec]
    return times[BASELINE]


def pick(fit: Sequence[Candidate], settings: CachePolicyFields) -> Candidate:
    """The fastest of ``fit``, or of a tie the smallest; without ``cache_auto_benchmark`` the smallest.

    Sets every candidate's status and reason.
    """
    if len(fit) == 1:
        fit[0].is_now("chosen", "the only one that passes")
        return fit[0]
    return _pick_fastest(fit) if settings.cache_auto_benchmark else _pick_smallest(fit)


def _pick_smallest(fit: Sequence[Candidate]) -> Candidate:
    chosen = min(fit, key=lambda c: c.nbytes)
    for candidate in fit:
        times = candidate.nbytes / chosen.nbytes
        candidate.is_now(
            "larger", f"passes; {times:.2f} times the bytes of {short_name(chosen.spec)}"
        )
    chosen.is_now("chosen", "the smallest that passes (speed does not count)")
    return chosen


def _pick_fastest(fit: Sequence[Candidate]) -> Candidate:
    fastest = min(fit, key=lambda c: c.seconds)
    assert fastest.time is not None
    tie = min(max(TIE, fastest.time.spread), WIDEST_TIE)
    level = [c for c in fit if c.seconds <= (1 + tie) * fastest.seconds]
    chosen = min(level, key=lambda c: c.nbytes)  # of equal sizes, the first in the list
    for candidate in fit:
        behind = f"{candidate.seconds / fastest.seconds - 1:.1%}"
        than = "as fast as" if behind == "0.0%" else f"{behind} slower than"
        more = f"{than} {short_name(fastest.spec)}"
        if candidate in level:
            why = f"passes; {more}, a tie" if candidate is not fastest else "passes; the fastest"
            candidate.is_now("larger", f"{why}, and {short_name(chosen.spec)} takes fewer bytes")
            if candidate.nbytes == chosen.nbytes:
                candidate.is_now("larger", f"passes; {more}, no fewer bytes")
        else:
            candidate.is_now("slower", f"passes; {more}")
    reason = "the fastest"
    if len(level) > 1:
        reason = f"fewest bytes of the {len(level)} fastest, which are within {tie:.0%}"
    chosen.is_now("chosen", reason)
    return chosen


def rows_of(
    found: Sequence[Candidate], base: StepTime | None, settings: CachePolicyFields
) -> list[CandidateRow]:
    """The table: every candidate with its figures and outcome."""
    return [_row(candidate, base, settings) for candidate in found]


def _row(candidate: Candidate, base: StepTime | None, settings: CachePolicyFields) -> CandidateRow:
    measured: dict[str, Any] = {}
    figures, took = candidate.figures, candidate.time
    reason = candidate.reason or "fits the budget"
    if figures is not None:
        for name in ("delta_nll", "ppl_ratio", "mean_kl", "needles"):
            measured[name] = _finite(getattr(figures, name))
        measured |= {"predictions": figures.predictions, "windows": figures.windows}
        measured["ci"] = {
            name: (_finite(low), _finite(high)) for name, (low, high) in figures.ci.items()
        }
        if candidate.status != "budget" and gates.undecided(figures, settings.gates):
            reason += " (the limit is within the error)"
    if took is not None:
        measured |= {"step_ms": 1e3 * took.median, "step_ms_p20": 1e3 * took.p20}
        measured["step_ms_p80"] = 1e3 * took.p80
        measured["relative_step"] = None if base is None else took.median / base.median
    return CandidateRow(
        spec=candidate.spec, nbytes=candidate.nbytes, bytes_per_token=candidate.bytes_per_token,
        status=candidate.status, reason=reason, **measured,
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class NoCandidateError(ValueError):
    """No cache fits the budget, or none that fits passes the gates; ``rows`` has the measurements."""

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
    calibration_ids: Tensor | Sequence[int] | None = None,
    recall: RecallFormat | None = None,
    bos_token_id: int | None = None,
    fields: Mapping[str, Any] | None = None,
    seed: int = 0,
    measure_all: bool = False,
    make_step: StepMaker | None = None,
    progress: Progress | None = None,
) -> CachePlan:
    """Chooses the cache for a model on this device: the fastest that fits the budget and passes the gates.

    1. Budget: exact bytes of the whole cache of ``batch_size`` × ``max_seq_len``.
    2. Quality gates, on real tokens, against an fp16 cache (`caramba_fast.policy.measure`).
    3. Speed: medians of interleaved decode steps. Times within 3% of the fastest are a tie (or within the spread
       of its steps if that is wider, 10% at most), and the smallest cache of a tie wins. With
       ``cache_auto_benchmark=False`` the smallest cache that passes wins. Of equal sizes, the first in the list.
    4. The plan is saved at ``cache_plan_path``, under a key of everything it depends on, and reused.

    Processes that share a plan file choose one after the other, so that the processes of a job agree and do not
    disturb each other's timing. If a model's forward pass waits for other ranks, do not choose under a shared
    file (it deadlocks on the lock): choose in one process and pass the plan to the others.

    Args:
        model: a `LanguageModel` (`as_language_model` wraps a transformers model), on the device it will run on.
        settings: budget, gates, and how to measure.
        max_seq_len, batch_size, prefill: of the cache, as in `ModelKVCache`.
        calibration_ids: (N,) or (B, T) token ids of real text to measure on; by default text sampled from the model.
        recall: the needle format, ``RecallFormat.of(tokenizer)``; required by ``cache_quality_min_needle``.
        bos_token_id: first token of a text; by default the model's own, if it has one.
        fields: fields of `KVCacheTensorConfig` for all streams of all candidates, unless a spec sets them itself.
        seed: seed of windows, text and needles.
        measure_all: also measure quality and speed of rejected candidates, for a table; the choice stays the same.
        make_step: makes the step that is timed; by default a forward pass.
        progress: called with a description of each stage.

    Raises:
        NoCandidateError: nothing fits, or nothing that fits passes and ``on_no_candidate`` is "raise".
        ValueError: sizes below 1, or settings that do not fit the model or the text.
        PlanFileError: the plan file cannot be read, locked or written; before anything is measured, except if the final
            write fails.
    """
    subject = Subject(
        model, settings, max_seq_len, batch_size, prefill, calibration_ids, recall, seed,
        begin_token(model) if bos_token_id is None else bos_token_id, fields or {}, make_step,
        progress or (lambda _: None),
    )  # fmt: skip
    subject.check()
    if settings.cache_plan_path is None:
        return _choose(subject, subject.key(), measure_all)
    return _kept_or_chosen(subject, PlanFile(settings.cache_plan_path), measure_all)


def choose_for_generator(
    model: LanguageModel, settings: CachePolicyFields, **options: Any
) -> CachePlan:
    """`choose_cache` as called by `caramba_fast.infer`; ``tokenizer`` writes the needles if a needle gate is set."""
    options.setdefault("progress", say_progress)
    if "tokenizer" in options:
        tokenizer = options.pop("tokenizer")
        if settings.cache_quality_min_needle is not None:
            options["recall"] = _recall(tokenizer)
        if model.device.type == "cuda":
            options["make_step"] = recorded_step
    plan = choose_cache(model, settings, **options)
    if not plan.reused:
        options["progress"](plan.describe() + ("\n" if sys.stderr.isatty() else ""))
    return plan


def say_progress(words: str) -> None:
    """Logs progress, and prints it to stderr if that is a terminal."""
    logging.getLogger(__name__).info("cache='auto': %s", words.strip())
    if sys.stderr.isatty():
        print(f"\r\x1b[Kcaramba_fast, cache='auto': {words}", end="", file=sys.stderr, flush=True)


def _recall(tokenizer: Any) -> RecallFormat:
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if inner is None or not hasattr(inner, "get_vocab"):
        raise ValueError(
            "cache_quality_min_needle needs Generator(tokenizer=...): needles are written with it"
        )
    return RecallFormat.of(inner)


def _kept_or_chosen(subject: Subject, file: PlanFile, measure_all: bool) -> CachePlan:
    key = subject.key()
    kept = _kept(file, key, measure_all)
    if kept is not None and not _due(kept, subject.settings):
        return kept
    with file.locked():
        kept = _kept(file, key, measure_all)  # another process may have chosen meanwhile
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
    settings, found = subject.settings, candidates_of(subject)
    fitting = within_budget(found, settings)
    if not fitting and not measure_all:
        raise NoCandidateError(_nothing_fits(settings), rows_of(found, None, settings))
    text = measure_quality(subject, found if measure_all else fitting, forced=measure_all)
    fit = passing(fitting, settings)
    failed = bool(fitting) and not fit
    if failed and settings.on_no_candidate == "best":
        fit = [min(fitting, key=lambda candidate: candidate.loss)]
    base = measure_speed(subject, found if measure_all else fit, forced=measure_all)
    if not fit:
        why = _nothing_passes(settings) if fitting else _nothing_fits(settings)
        raise NoCandidateError(why, rows_of(found, base, settings))
    why_best = fit[0].reason
    chosen = pick(fit, settings)
    if failed:
        chosen.is_now("chosen", f"fails ({why_best}), and loses least of those that fit")
    now = time.time()
    return CachePlan(
        spec=chosen.spec, nbytes=chosen.nbytes, bytes_per_token=chosen.bytes_per_token,
        baseline=BASELINE, key=key, text=text,
        notes=(_nothing_passes(settings),) if failed else (),
        rows=tuple(rows_of(found, base, settings)), made_at=now, probed_at=now,
    )  # fmt: skip


def _nothing_fits(settings: CachePolicyFields) -> str:
    return (
        f"cache_budget_mb={settings.cache_budget_mb:g}: no candidate fits; allow more, or a shorter "
        "max_seq_len, or smaller cache_auto_candidates"
    )


def _nothing_passes(settings: CachePolicyFields) -> str:
    limits = ", ".join(f"{name}={limit:g}" for name, limit in settings.gates.items())
    return f"nothing that fits passes the quality gates ({limits})"


@torch.no_grad()
def _probed(subject: Subject, plan: CachePlan) -> CachePlan | None:
    """The plan with a new ``probed_at`` if it still holds, else None, and the cache must be chosen again.

    Times the winner and the runner-up again, and checks the winner's gates on one batch of windows.
    """
    subject.progress(f"probing the kept plan, {short_name(plan.spec)}")
    settings, limits = subject.settings, subject.settings.gates
    if limits and not plan.notes:
        figures = subject.meter().figures([plan.spec], gates.ROWS)[plan.spec]
        if gates.clearly_fails(figures, limits):
            return None
    if settings.cache_auto_benchmark and plan.runner_up is not None:
        times = subject.times([plan.spec, plan.runner_up])
        if times[plan.spec].median > (1 + PROBE_MARGIN) * times[plan.runner_up].median:
            return None
    return plan.model_copy(update={"probed_at": time.time()})
