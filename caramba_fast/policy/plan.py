"""CachePlan: the chosen cache, the measurements behind it, and the model, device and versions it is valid for."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from torch import Tensor

from caramba_fast.cache import AnyLayerShape
from caramba_fast.config import cache_configs, short_name
from caramba_fast.config.files import shown
from caramba_fast.infer.policy_fields import MIB
from caramba_fast.models import LanguageModel
from caramba_fast.models.identity import modules_of, settings_of
from caramba_fast.ops.registry import serving
from caramba_fast.quality.identity import add_tensor, digest_of, package_version

#: Version of the file and its plans; files of other versions are not read.
SCHEMA_VERSION = 1

Status = Literal["chosen", "passed", "budget", "quality", "slower", "larger"]


class CandidateRow(BaseModel):
    """One candidate: its measurements and outcome.

    Attributes:
        spec: the cache, as a canonical spec.
        nbytes: bytes of the whole cache, everything included.
        bytes_per_token: bytes of codes and scales per token of one row.
        delta_nll, ppl_ratio, mean_kl: against an fp16 cache; None if not measured (or not finite).
        needles: share of needles found relative to an fp16 cache; None if not measured.
        predictions, windows: how many the figures are from.
        ci: 95% confidence intervals of the figures, by name.
        step_ms: milliseconds of a decode step, the lowest median of several rounds; None if not timed.
        step_ms_p20, step_ms_p80: 20th and 80th percentile of all timed steps.
        relative_step: step time divided by that of an fp16 cache.
        status: "chosen", or why not: "budget", "quality", "slower" or "larger".
        reason: the explanation, as text.
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
    """Everything a choice depends on; the lookup key of a plan.

    Attributes:
        model: architecture, widths, vocabulary and a digest of the weights.
        device: name of the processor or GPU.
        versions: versions of the package and torch, and the backend that runs attention.
        batch_size, max_seq_len, prefill: of the cache.
        settings: budget, gates, candidates and how they are measured.
        text: digest of the tokens measured on; "" if they were sampled from the model.
        config_digest: digest of the model's configuration (RoPE, windows, norms); "" in plans of earlier versions,
            which match any configuration.
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
    config_digest: str = ""

    @model_serializer(mode="wrap")
    def _as_before(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out an empty ``config_digest``, so that plans of earlier versions are written as they were read."""
        found: dict[str, Any] = serialize(self)
        if not self.config_digest:
            found.pop("config_digest", None)
        return found

    def serves(self, wanted: PlanKey) -> bool:
        """Whether a plan with this key answers ``wanted``; a ``wanted`` without text accepts a plan made on any."""
        same = {"text": wanted.text}
        if not self.config_digest:
            same["config_digest"] = wanted.config_digest
        return self.model_copy(update=same) == wanted and wanted.text in ("", self.text)

    @property
    def digest(self) -> str:
        """The key's name in a plan file."""
        words = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return digest_of([words], 24)


class CachePlan(BaseModel):
    """A choice of cache, with the measurements behind it.

    Attributes:
        spec: the cache to use, as a generator's ``cache``.
        nbytes, bytes_per_token: of that cache, as in its row.
        baseline: the cache that quality and speed are relative to.
        key: what the plan is valid for.
        text: description of the text the figures are from.
        notes: remarks, such as gates that no candidate passes.
        rows: every candidate.
        made_at: when it was measured, Unix time in seconds.
        probed_at: when it was last confirmed, Unix time in seconds.
        reused: whether it was read from a file rather than measured now.
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
        chosen = [(row.spec, row.nbytes) for row in self.rows if row.status == "chosen"]
        if chosen != [(self.spec, self.nbytes)]:
            raise ValueError(
                f"its rows do not say that {shown(self.spec)} of {self.nbytes} bytes was chosen, and no other"
            )
        cache_configs(self.spec)  # an unknown spec raises
        return self

    def row(self, spec: str) -> CandidateRow:
        """The row of a candidate; raises KeyError if ``spec`` was none."""
        for row in self.rows:
            if row.spec == spec:
                return row
        raise KeyError(f"{spec} was no candidate; there are {', '.join(r.spec for r in self.rows)}")

    @property
    def reason(self) -> str:
        """Why this cache was chosen."""
        return self.row(self.spec).reason

    @property
    def runner_up(self) -> str | None:
        """The fastest other cache that passed and was timed, or None."""
        timed = [r for r in self.rows if r.status in ("slower", "larger") and r.step_ms is not None]
        return min(timed, key=lambda r: r.step_ms or 0.0).spec if timed else None

    def describe(self) -> str:
        """The choice in one line."""
        source = "kept plan" if self.reused else f"measured over {len(self.rows)} candidates"
        return (
            f"cache {short_name(self.spec)}, {self.nbytes / MIB:.2f} MiB ({source}): {self.reason}"
        )


#: Values of each tensor hashed into a model's digest, evenly spread.
VALUES = 1024


def model_identity(model: LanguageModel) -> str:
    """A string that differs between models for which the choice may differ.

    It has architecture, cache shapes, vocabulary, and a digest of evenly spread weights: enough to tell a fine-tune
    from its base, at a fraction of the cost of reading all.
    """
    digest = hashlib.sha256()
    for module in modules_of(model):
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                add_tensor(digest, name, value, VALUES)
    layers = [_shape(layer) for layer in model.cache_layout]
    digest.update(repr(layers).encode())
    return (
        f"{type(model).__name__}, {len(layers)} layers, first {layers[0]}, vocabulary {model.vocab_size}, "
        f"weights {digest.hexdigest()[:16]}"
    )


def config_digest(model: LanguageModel) -> str:
    """16 hex digits that differ between configurations that change what is cached."""
    return digest_of([settings_of(model)])


def _shape(layer: AnyLayerShape) -> str:
    sizes = {name: value for name, value in vars(layer).items() if isinstance(value, int)}
    inner = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return f"{type(layer).__name__}({inner})"


def device_identity(device: torch.device) -> str:
    """The GPU's name, or the processor's name and torch's thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {device.type}, {torch.get_num_threads()} threads"


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name, as reported by the system."""
    import platform  # noqa: PLC0415 - may start a process on some systems

    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions(device: torch.device, decoupled: bool) -> dict[str, str]:
    """Versions that measurements depend on: package, torch, and the backend of attention."""
    op = "decoupled_decode_attention" if decoupled else "decode_attention"
    return {
        "caramba_fast": package_version(""),
        "torch": torch.__version__,
        "backend": serving(op, device.type),
    }


#: (heading, cell of a row); "–" for what was not measured.
COLUMNS: tuple[tuple[str, Callable[[CandidateRow], str]], ...] = (
    ("cache", lambda r: short_name(r.spec)),
    ("MiB", lambda r: f"{r.nbytes / MIB:.2f}"),
    ("bytes/token", lambda r: f"{r.bytes_per_token:.0f}"),
    ("ΔNLL", lambda r: _with_half(r, "delta_nll", "+.4f")),
    ("PPL ratio", lambda r: _number(r.ppl_ratio, ".4f")),
    ("KL mnat", lambda r: _number(None if r.mean_kl is None else 1000 * r.mean_kl, ".3g")),
    ("needles", lambda r: _number(r.needles, ".1%")),
    ("step/fp16", lambda r: _number(r.relative_step, ".2f")),
    ("verdict", lambda r: r.reason),
)


def cells(rows: Sequence[CandidateRow]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; columns without any measurement are left out."""
    written = [[cell(row) for _, cell in COLUMNS] for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] != "–" for line in written)]
    return [COLUMNS[i][0] for i in used], [[line[i] for i in used] for line in written]


def plain_table(rows: Sequence[CandidateRow]) -> str:
    """The table as plain text."""
    headings, body = cells(rows)
    lines = [headings, *body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _with_half(row: CandidateRow, figure: str, form: str) -> str:
    value, (low, high) = getattr(row, figure), row.ci.get(figure, (None, None))
    if value is None or low is None or high is None:
        return _number(value, form)
    return f"{value:{form}}±{(high - low) / 2:.4f}"
