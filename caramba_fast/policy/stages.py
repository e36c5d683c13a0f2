"""The stages every candidate goes through, and what is said of those that fall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from caramba_fast.policy import gates as quality
from caramba_fast.policy.candidates import bytes_per_token, cache_bytes
from caramba_fast.policy.gates import Figures
from caramba_fast.policy.plan import CandidateRow, Status
from caramba_fast.policy.settings import CachePolicyFields
from caramba_fast.policy.speed import StepTime
from caramba_fast.policy.subject import Subject

#: Step times this close to the fastest are a tie, which goes to fewer bytes.
TIE = 0.03


@dataclass
class Candidate:
    """A candidate on its way through the stages."""

    spec: str
    nbytes: int
    bytes_per_token: float
    figures: Figures | None = None
    time: StepTime | None = None
    status: Status = "passed"
    reason: str = ""

    def is_now(self, status: Status, reason: str) -> None:
        """Notes what became of it."""
        self.status, self.reason = status, reason

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        assert self.time is not None
        return self.time.median

    @property
    def loss(self) -> float:
        """Mean KL, infinite where there is none."""
        kl = math.nan if self.figures is None else self.figures.mean_kl
        return math.inf if math.isnan(kl) else kl


def candidates_of(subject: Subject) -> list[Candidate]:
    """All candidates with their bytes."""
    layout, rows, length = subject.model.cache_layout, subject.batch_size, subject.max_seq_len
    return [
        Candidate(spec, cache_bytes(layout, spec, rows, length), bytes_per_token(layout, spec))
        for spec in subject.specs()
    ]


def within_budget(found: Sequence[Candidate], settings: CachePolicyFields) -> list[Candidate]:
    """Stage 1: those that fit."""
    most = settings.budget_bytes
    for candidate in found:
        if most is not None and candidate.nbytes > most:
            candidate.is_now("budget", f"over the budget of {settings.cache_budget_mb:g} MiB")
    return [candidate for candidate in found if candidate.status != "budget"]


def measure_quality(subject: Subject, wanted: Sequence[Candidate], *, forced: bool) -> str:
    """Stage 2: figures, if a gate is on or they are wanted anyway; the text they are from, in words."""
    gates = subject.settings.gates
    if not wanted or not (gates or forced):
        return ""
    specs = [candidate.spec for candidate in wanted]
    subject.progress(f"quality of {len(specs)} caches")
    meter = subject.meter()
    found = quality.measure_quality(meter, specs, gates)
    if "cache_quality_min_needle" in gates or (forced and subject.recall is not None):
        subject.progress(f"needles through {len(specs)} caches")
        for spec, share in subject.needles(specs, meter.windows).items():
            found[spec] = replace(found[spec], needles=share)
    for candidate in wanted:
        candidate.figures = found[candidate.spec]
    return meter.windows.describe()


def passing(fitting: Sequence[Candidate], settings: CachePolicyFields) -> list[Candidate]:
    """Those whose figures are within every gate."""
    for candidate in fitting:
        if candidate.figures is not None:
            why = quality.verdict(candidate.figures, settings.gates)
            if why is not None:
                candidate.is_now("quality", why)
    return [candidate for candidate in fitting if candidate.status != "quality"]


def measure_speed(
    subject: Subject, wanted: Sequence[Candidate], *, forced: bool
) -> StepTime | None:
    """Stage 3: times, if they decide anything or are wanted anyway; the baseline's."""
    timed = forced or (subject.settings.cache_auto_benchmark and len(wanted) > 1)
    if not wanted or not timed:
        return None
    subject.progress(f"decode steps of {len(wanted)} caches")
    times = subject.times([candidate.spec for candidate in wanted])
    for candidate in wanted:
        candidate.time = times[candidate.spec]
    return times[subject.baseline]


def pick(fit: Sequence[Candidate], settings: CachePolicyFields) -> Candidate:
    """The fastest, ties to fewer bytes; without timing the smallest. Notes of each why.

    Args:
        fit: those that passed, one or more.
        settings: whether speed counts.
    """
    if len(fit) == 1:
        fit[0].is_now("chosen", "the only one that passes")
        return fit[0]
    return _pick_fastest(fit) if settings.cache_auto_benchmark else _pick_smallest(fit)


def _pick_smallest(fit: Sequence[Candidate]) -> Candidate:
    chosen = min(fit, key=lambda c: c.nbytes)
    for candidate in fit:
        times = candidate.nbytes / chosen.nbytes
        candidate.is_now("larger", f"passes; {times:.2f} times the bytes of {chosen.spec}")
    chosen.is_now("chosen", "the smallest that passes (speed does not count)")
    return chosen


def _pick_fastest(fit: Sequence[Candidate]) -> Candidate:
    fastest = min(fit, key=lambda c: c.seconds)
    level = [c for c in fit if c.seconds <= (1 + TIE) * fastest.seconds]
    chosen = min(level, key=lambda c: (c.nbytes, c.seconds))
    for candidate in fit:
        more = f"{candidate.seconds / fastest.seconds - 1:.1%} slower than {fastest.spec}"
        if candidate in level:
            why = f"passes; {more}, a tie" if candidate is not fastest else "passes; the fastest"
            candidate.is_now("larger", f"{why}, and {chosen.spec} takes fewer bytes")
            if candidate.nbytes == chosen.nbytes:
                candidate.is_now("larger", f"passes; {more}, no fewer bytes")
        else:
            candidate.is_now("slower", f"passes; {more}")
    reason = "the fastest"
    if len(level) > 1:
        reason = f"fewest bytes of the {len(level)} fastest, which are within {TIE:.0%}"
    chosen.is_now("chosen", reason)
    return chosen


def rows_of(
    found: Sequence[Candidate], base: StepTime | None, settings: CachePolicyFields
) -> list[CandidateRow]:
    """The table: every candidate with its figures and what became of it."""
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
        if candidate.status != "budget" and quality.undecided(figures, settings.gates):
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
