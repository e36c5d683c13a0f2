"""Runs what a manifest says, in order."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caramba_fast import __version__
from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.infer.checkpoint import find_tokenizer
from caramba_fast.infer.text import TextTokenizer
from caramba_fast.manifest.schema import (
    DEFAULT_PROMPT,
    LOOKUP,
    Benchmark,
    Manifest,
    RunSpec,
    Target,
)
from caramba_fast.models import LanguageModel, demo_path
from caramba_fast.models.registry import checkpoint_folder, load

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunReport:
    """What one run gave.

    Attributes:
        target, run, mode: which.
        texts: for each prompt the text written; empty in mode benchmark.
        metrics: figures of the run, or, in mode benchmark, medians for each cache kind.
        report: what was in force.
        output: the JSON file that was written, or None.
    """

    target: str
    run: str
    mode: str
    texts: list[str]
    metrics: dict[str, Any]
    report: dict[str, Any]
    output: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target": self.target, "run": self.run, "mode": self.mode, "texts": self.texts,
            "metrics": self.metrics, "report": self.report, "environment": environment(),
        }  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """The model of a target and its tokenizer."""

    model: LanguageModel
    tokenizer: TextTokenizer


def run_manifest(
    manifest: Manifest,
    folder: Path,
    *,
    only: str | None = None,
    prompt: str | None = None,
    say: Say = lambda _: None,
) -> Iterator[RunReport]:
    """Runs every run of every target.

    Args:
        manifest: what to do.
        folder: what relative paths in it start from.
        only: the one target, run, or "target/run" to do.
        prompt: instead of the prompts of the manifest.
        say: told what is being done.

    Yields:
        a report for each run, after its output file was written.

    Raises:
        ValueError: nothing in the manifest is called ``only``, or settings do not fit the model.
        CheckpointError, FileNotFoundError: a model, tokenizer or prompt file that is not there.
    """
    chosen = _chosen(manifest, only)
    for target, runs in chosen:
        for run in runs:
            _prompts(run, folder, prompt)  # missing files are found before anything runs
    for target, runs in chosen:
        say(f"{target.name}: loading {target.model}")
        loaded = _load(target.model, target, folder)
        for run in runs:
            say(f"{target.name}/{run.id}: {run.mode}")
            yield _done(target, run, loaded, folder, prompt)


def _chosen(manifest: Manifest, only: str | None) -> list[tuple[Target, list[RunSpec]]]:
    found = []
    for target in manifest.targets:
        names = (None, target.name)
        runs = [r for r in target.runs if only in names or only in (r.id, f"{target.name}/{r.id}")]
        if runs:
            found.append((target, runs))
    if not found:
        known = [f"{t.name}/{r.id}" for t in manifest.targets for r in t.runs]
        raise ValueError(f"no run is called {only!r}; there are {', '.join(known)}")
    return found


def _load(name: str, target: Target, folder: Path) -> Loaded:
    path = demo_path(name.partition(":")[2] or "gqa") if _is_demo(name) else folder / name
    path = checkpoint_folder(path)
    tokenizer = find_tokenizer(path, target.tokenizer and folder / target.tokenizer)
    if tokenizer is None:
        raise FileNotFoundError(f"{path} has no tokenizer; name one as the target's tokenizer")
    return Loaded(load(path, target.device, getattr(torch, target.dtype)), tokenizer)


def _is_demo(name: str) -> bool:
    return name.partition(":")[0] == "demo"


def _prompts(run: RunSpec, folder: Path, prompt: str | None) -> list[str]:
    if prompt is not None:
        return [prompt]
    if run.prompt_file is not None:
        file = folder / run.prompt_file
        if not file.is_file():
            raise FileNotFoundError(f"run {run.id}: prompt_file {file} does not exist")
        return [file.read_text(encoding="utf-8")]
    return list(run.prompts) or [DEFAULT_PROMPT]


def _generator(
    run: RunSpec, target: Target, loaded: Loaded, folder: Path, **changes: Any
) -> Generator:
    config = run.config.updated(return_dict=True, **changes)
    if not isinstance(config, SpeculativeConfig):
        return Generator(loaded.model, config, tokenizer=loaded.tokenizer)
    draft = None
    if run.draft_model != LOOKUP:
        draft = _load(run.draft_model, target, folder).model
    return SpeculativeGenerator(loaded.model, draft, config, tokenizer=loaded.tokenizer)


def _done(
    target: Target, run: RunSpec, loaded: Loaded, folder: Path, prompt: str | None
) -> RunReport:
    ids = [loaded.tokenizer.encode(text) for text in _prompts(run, folder, prompt)]
    if run.mode == "benchmark":
        texts: list[str] = []
        metrics, report = _measured(run, target, loaded, folder, ids)
    else:
        generator = _generator(run, target, loaded, folder)
        result: Any = generator.generate(ids)
        new = result.sequences[:, -max(result.new_tokens) :].tolist()
        texts = [
            loaded.tokenizer.decode(row[:count])
            for row, count in zip(new, result.new_tokens, strict=True)
        ]
        metrics, report = result.metrics.as_dict(), result.report
    output = None if run.output is None else folder / run.output
    done = RunReport(target.name, run.id, run.mode, texts, metrics, report, output)
    if output is not None:
        write_json(output, done.as_dict())
    return done


def _measured(
    run: RunSpec, target: Target, loaded: Loaded, folder: Path, ids: list[list[int]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Medians over the repeats, cache kinds in turn, so that what else the machine does hits all alike."""
    how = run.benchmark or Benchmark()
    own = run.config.cache_name
    changes: dict[str, dict[str, Any]] = {own: {}}
    for kind in how.compare:
        changes.setdefault(GenerateConfig(cache_kind=kind).cache_name, {"cache_kind": kind})
    generators = {
        kind: _generator(run, target, loaded, folder, **change) for kind, change in changes.items()
    }
    figures: dict[str, list[dict[str, float]]] = {kind: [] for kind in generators}
    for index in range(how.warmup + how.repeats):
        for kind, generator in generators.items():
            generator.reset()
            generator.generate(ids)
            assert generator.metrics is not None
            if index >= how.warmup:
                figures[kind].append(generator.metrics.as_dict())
    medians = {
        kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for kind, runs in figures.items()
    }
    return medians, {kind: generator.report for kind, generator in generators.items()}


def environment() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "caramba_fast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
