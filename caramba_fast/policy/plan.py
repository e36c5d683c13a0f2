"""CachePlan: what was chosen, from which figures, and for what it holds."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from caramba_fast.config import cache_configs
from caramba_fast.config.files import shown
from caramba_fast.policy.settings import MIB

#: Version of the file and of the plans in it; another one is not read.
SCHEMA_VERSION = 1

Status = Literal["chosen", "passed", "budget", "quality", "slower", "larger"]


class CandidateRow(BaseModel):
    """One candidate: what was measured and what became of it.

    Attributes:
        spec: the cache, in canonical words.
        nbytes: bytes of the whole cache, everything included.
        bytes_per_token: bytes of codes and scales of one more token of one row.
        delta_nll, ppl_ratio, mean_kl: against an fp16 cache; None where not measured (or no number).
        needles: share of needles found relative to an fp16 cache; None where not measured.
        predictions, windows: what the figures are from.
        ci: 95% confidence intervals of the figures, by name.
        step_ms: milliseconds of a decode step, the lowest of several medians; None where not timed.
        step_ms_p20, step_ms_p80: quintiles of all steps timed.
        relative_step: step time over that of an fp16 cache.
        status: chosen, or at which stage it fell.
        reason: the same in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    spec: str
    nbytes: int = Field(ge=0, lt=2**63)
    bytes_per_token: float
    delta_nll: float | None = None
    ppl_ratio: float | None = None
    mean_kl: float | None = None
    needles: float | None = None
    predictions: int = 0
    windows: int = 0
    ci: dict[str, tuple[float | None, float | None]] = Field(default_factory=dict)
    step_ms: float | None = None
    step_ms_p20: float | None = None
    step_ms_p80: float | None = None
    relative_step: float | None = None
    status: Status
    reason: str


class PlanKey(BaseModel):
    """Everything a choice depends on; a plan is found again by all of it.

    Attributes:
        model: architecture, widths, vocabulary and a digest of the weights.
        device: the processor or GPU by name.
        versions: of the package, of torch, and which backend serves attention.
        batch_size, max_seq_len, prefill: of the cache.
        settings: budget, gates, candidates and how they are measured.
        text: digest of the tokens given to measure on, "" where the model wrote them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str
    device: str
    versions: dict[str, str]
    batch_size: int
    max_seq_len: int
    prefill: str
    settings: dict[str, Any]
    text: str = ""

    def serves(self, wanted: PlanKey) -> bool:
        """Whether a plan of this key is what is wanted; who gives no text takes one made on any."""
        same = self.model_copy(update={"text": wanted.text}) == wanted
        return same and wanted.text in ("", self.text)

    @property
    def digest(self) -> str:
        """The key's name in a file."""
        words = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:24]


class CachePlan(BaseModel):
    """A choice of cache, with what it was made from.

    Attributes:
        spec: the cache to use, as a generator's ``cache_kind``.
        nbytes, bytes_per_token: of that cache, as in its row.
        baseline: what quality and speed are relative to.
        key: what the plan holds for.
        text: the text the figures are from, in words.
        notes: what a reader should know, such as gates that nothing passes.
        rows: every candidate.
        made_at: when it was measured, seconds since 1970.
        probed_at: when it was last found to hold.
        reused: it was found in a file, not measured now.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    spec: str
    nbytes: int = Field(ge=0, lt=2**63)
    bytes_per_token: float
    baseline: str
    key: PlanKey
    text: str = ""
    notes: tuple[str, ...] = ()
    rows: tuple[CandidateRow, ...]
    made_at: float
    probed_at: float
    reused: bool = Field(default=False, exclude=True)

    @model_validator(mode="after")
    def _has_its_row(self) -> CachePlan:
        if all(row.spec != self.spec for row in self.rows):
            raise ValueError(f"no row is of the cache that was chosen, {shown(self.spec)}")
        cache_configs(self.spec)  # a name that is none raises
        return self

    def row(self, spec: str) -> CandidateRow:
        """The row of a candidate.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.spec == spec:
                return row
        raise KeyError(f"{spec} was no candidate; there are {', '.join(r.spec for r in self.rows)}")

    @property
    def reason(self) -> str:
        """Why this cache, in words."""
        return self.row(self.spec).reason

    @property
    def runner_up(self) -> str | None:
        """The fastest of the others that passed, or None."""
        timed = [r for r in self.rows if r.status in ("slower", "larger") and r.step_ms is not None]
        return min(timed, key=lambda r: r.step_ms or 0.0).spec if timed else None

    def describe(self) -> str:
        """The choice in one line."""
        source = "kept plan" if self.reused else f"measured over {len(self.rows)} candidates"
        return f"cache {self.spec}, {self.nbytes / MIB:.2f} MiB ({source}): {self.reason}"
