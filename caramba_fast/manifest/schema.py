"""The schema of manifests and run reports, and readable error messages.

```yaml
targets:
  - type: experiment
    name: generate_test
    model: demo                 # or a checkpoint folder
    runs:
      - id: generate
        mode: generate
        prompts: ["def main():"]
        generate:
          max_new_tokens: 128
          cache: auto
          cache_budget_mb: 1024
```

Settings of a run are those of `GenerateConfig`; under ``speculative`` instead of ``generate`` those of
`SpeculativeConfig`. Paths are relative to the manifest.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from caramba_fast import __version__
from caramba_fast.config.files import read_json, shown
from caramba_fast.config.names import UNKNOWN, check_truth_values, hint, names_of
from caramba_fast.config.spec import short_name
from caramba_fast.infer import GenerateConfig, SpeculativeConfig
from caramba_fast.infer.config import AUTO
from caramba_fast.infer.policy_fields import CachePolicyFields
from caramba_fast.models.registry import LOOKUP
from caramba_fast.writing import replacing

Name = Annotated[str, Field(min_length=1)]
#: Prompt of runs that have none.
DEFAULT_PROMPT = "import os\n\ndef main():\n"


class Part(BaseModel):
    """Base of all parts of a manifest: refuses unknown keys, and True and False as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_values(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            check_truth_values(cls, data)
        return data


class Benchmark(Part):
    """How a run in mode ``benchmark`` measures.

    Attributes:
        repeats: timed generations of each cache kind; medians are reported.
        warmup: untimed generations before them.
        compare: cache kinds timed in turn with the run's own, in the same rounds; all other settings are the same,
            except those of ``cache: auto``.
    """

    repeats: int = Field(default=5, ge=1)
    warmup: int = Field(default=1, ge=0)
    compare: tuple[str, ...] = ()

    @field_validator("compare")
    @classmethod
    def _known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Canonical names, without duplicates."""
        return tuple(dict.fromkeys(AUTO if kind == AUTO else short_name(kind) for kind in kinds))


class RunSpec(Part):
    """One run.

    Attributes:
        id: its name, unique in its target.
        mode: "generate" writes text; "benchmark" measures and writes the metrics as JSON.
        prompts: texts to continue, one row each.
        prompt_file: a text file that is one prompt.
        generate: settings.
        speculative: settings with a draft, instead of ``generate``.
        draft_model: the draft of ``speculative``: "lookup", "demo:gqa", "demo:dba" or a folder.
        benchmark: how to measure.
        output: JSON file for the texts and metrics; by default none in mode generate, and TARGET-RUN.json in
            mode benchmark.
    """

    id: Name
    mode: Literal["generate", "benchmark"] = "generate"
    prompts: tuple[Name, ...] = ()
    prompt_file: Path | None = None
    generate: GenerateConfig | None = None
    speculative: SpeculativeConfig | None = None
    draft_model: str = LOOKUP
    benchmark: Benchmark | None = None
    output: Path | None = None

    @model_validator(mode="after")
    def _agrees(self) -> RunSpec:
        if self.generate is not None and self.speculative is not None:
            raise ValueError("generate and speculative are both given; give one of them")
        if self.prompts and self.prompt_file is not None:
            raise ValueError("prompts and prompt_file are both given; give one of them")
        if self.speculative is None and "draft_model" in self.model_fields_set:
            raise ValueError("draft_model is for speculative, which is not given")
        if self.mode != "benchmark" and self.benchmark is not None:
            raise ValueError(f"benchmark is for mode benchmark; mode is {self.mode}")
        self.compared()
        return self

    @property
    def config(self) -> GenerateConfig:
        """The settings: ``speculative`` or ``generate``."""
        return self.speculative or self.generate or GenerateConfig()

    @property
    def settings_key(self) -> str:
        """The key of ``config`` in the manifest."""
        return "generate" if self.speculative is None else "speculative"

    def compared(self) -> dict[str, GenerateConfig]:
        """The settings of every timed cache kind, by name; the run's own first.

        Raises ValueError if a kind to compare with does not support the run's settings.
        """
        config = self.config
        kinds = {config.cache_name: config}
        for kind in self.benchmark.compare if self.benchmark else ():
            if kind not in kinds:
                left_out = set() if kind == AUTO else set(CachePolicyFields.model_fields)
                given = config.model_dump(exclude_unset=True, exclude=left_out)
                kinds[kind] = type(config)(**{**given, "cache": kind})
        return kinds


class Target(Part):
    """A model and its runs.

    Attributes:
        type: "experiment".
        name: unique in the manifest.
        model: "demo", "demo:gqa", "demo:dba", or a Hugging Face checkpoint folder, relative to the manifest.
        tokenizer: a tokenizer folder or file; by default the model's own.
        device: cpu, cuda or mps.
        dtype: dtype of the weights.
        runs: runs in order.
    """

    type: Literal["experiment"] = "experiment"
    name: Name
    model: str = "demo"
    tokenizer: Path | None = None
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    runs: Annotated[tuple[RunSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ids_differ(self) -> Target:
        _check_unique("runs", [run.id for run in self.runs])
        return self


class Manifest(Part):
    """A whole manifest: version (1), name and notes (free text), and targets in order."""

    version: Literal[1] = 1
    name: str = ""
    notes: str = ""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Manifest:
        _check_unique("targets", [target.name for target in self.targets])
        return self


def _check_unique(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} have the name {twice[0]!r} twice; names must differ")


Place = tuple["int | str", ...]
#: Most errors in one message.
MOST_ERRORS = 16
#: pydantic's words -> YAML's.
_WORDS = {
    "Input should be a valid tuple": "a list is needed",
    "Input should be a valid dictionary or object to extract fields from": "a mapping is needed",
    "Input should be a valid dictionary or instance of": "a mapping is needed",
    "Tuple should have at least 1 item": "at least 1 item is needed; it is empty",
}


class ManifestError(ValueError):
    """An invalid manifest; the message has the path of every wrong key."""


@contextlib.contextmanager
def at(path: str) -> Iterator[None]:
    """Context that turns errors into a `ManifestError` whose message begins with ``path``."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ManifestError(f"{path}: {error}") from error


def problems(error: ValidationError, raw: Any) -> list[str]:
    """One line per wrong key, without errors that follow from others."""
    found: dict[str, list[str]] = {}
    listed = error.errors()[:MOST_ERRORS]
    places = [item["loc"] for item in listed]
    for item in listed:
        place = item["loc"]
        inner = any(len(other) > len(place) and other[: len(place)] == place for other in places)
        if not (inner and item["type"] == "too_short"):
            key, reason = _problem(item, raw)
            reasons = found.setdefault(key, [])
            reasons += [] if reason in reasons else [reason]
    return [f"{key}: {' or '.join(reasons)}" for key, reasons in found.items()]


def _problem(item: Any, raw: Any) -> tuple[str, str]:
    """(path with value, reason)."""
    place: Place = item["loc"]
    if item["type"] == UNKNOWN:
        return path_of(place), f"unknown key; {hint(str(place[-1])[:80], _names_at(place[:-1]))}"
    if item["type"] == "missing":
        return path_of(place), "is missing"
    place, value = _reached(raw, place)
    reason = item["msg"].removeprefix("Value error, ")
    for words, ours in _WORDS.items():
        reason = ours if reason.startswith(words) else reason
    # The reason of an error about several keys of a mapping already has their values.
    given = "" if isinstance(value, Mapping) or value in ([], ()) else f"={shown(value)}"
    return f"{path_of(place)}{given}", reason


def path_of(place: Place) -> str:
    """``targets[0].runs[1].generate.top_p``."""
    words = ""
    for part in place:
        words += f"[{part}]" if isinstance(part, int) else f".{part}" if words else part
    return shown(words, 300)[1:-1] if len(words) > 300 else words or "the manifest"


def _reached(raw: Any, place: Place) -> tuple[Place, Any]:
    """The part of ``place`` that exists in the YAML (pydantic adds names of alternatives), and the value there."""
    for index, part in enumerate(place):
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return place[:index], raw
    return place, raw


def _names_at(place: Place) -> list[str]:
    model: type[BaseModel] = Manifest
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return names_of(model)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``tuple[Target, ...]`` or ``GenerateConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None


def environment() -> dict[str, Any]:
    """The environment that figures depend on."""
    return {
        "caramba_fast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


@dataclass(frozen=True)
class RunReport:
    """The result of one run.

    Attributes:
        target, run, mode, model, prompts: as in the manifest.
        texts: the generated texts, one per row of the batch; empty in mode benchmark.
        metrics: figures of the run; in mode benchmark by cache kind, with median, p20 and p80 of each figure.
        settings: settings of the run, as given.
        report: what was actually in effect; in mode benchmark by cache kind.
        output: the JSON file that was written, or None.
    """

    target: str
    run: str
    mode: str
    model: str
    prompts: list[str]
    texts: list[str]
    metrics: dict[str, Any]
    settings: dict[str, Any]
    report: dict[str, Any]
    output: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        written = {name: value for name, value in vars(self).items() if name != "output"}
        return {**written, "environment": environment()}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically; non-finite figures become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite_value(content), indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as stream:
        stream.write(f"{text}\n".encode())


def is_report(path: Path) -> bool:
    """Whether a file is a `RunReport` written by `write_json`."""
    try:
        found = read_json(path)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() >= {"target", "run", "mode", "environment"}


def _finite_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
