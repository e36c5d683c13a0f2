"""Runs a manifest in order and writes the report of each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.manifest.prepare import Prepared, PreparedRun, build, prepare
from caramba_fast.manifest.schema import (
    Benchmark,
    Manifest,
    RunReport,
    Target,
    write_json,
)
from caramba_fast.models import LanguageModel
from caramba_fast.models.registry import load

Say = Callable[[str], None]
#: Percentiles of a benchmark's figures.
PERCENTILES = {"median": 50, "p20": 20, "p80": 80}


def run_manifest(
    manifest: Manifest,
    folder: Path,
    *,
    only: str | None = None,
    prompt: str | None = None,
    force: bool = False,
    say: Say = lambda _: None,
) -> Iterator[RunReport]:
    """Runs all runs of all targets, or those selected; checks everything before the first one starts.

    Yields the report of each run, after its output file has been written. ``say`` gets progress messages; other
    arguments and errors as in `prepare`.
    """
    for ready in prepare(manifest, folder, only=only, prompt=prompt, force=force):
        yield from _target_done(ready, say)


def _target_done(ready: Prepared, say: Say) -> Iterator[RunReport]:
    """Reports of one target's runs; its model is freed before the next target's is loaded."""
    target = ready.target
    say(f"{target.name}: loading {target.model}")
    model = load(ready.folder, target.device, target.dtype)
    for run in ready.runs:
        say(f"{target.name}/{run.spec.id}: {run.spec.mode}")
        yield _done(ready, run, model)


def _done(ready: Prepared, run: PreparedRun, model: LanguageModel) -> RunReport:
    target, texts = ready.target, list[str]()
    draft = None if run.draft is None else load(run.draft, target.device, target.dtype)
    if run.spec.mode == "benchmark":
        metrics, report = _measured(run, model, draft, ready.tokenizer)
    else:
        (config,) = run.configs.values()
        generator = build(model, draft, config.updated(return_dict=True), ready.tokenizer)
        texts, metrics, report = _written(generator, run, ready.tokenizer)
    done = RunReport(
        target.name, run.spec.id, run.spec.mode, target.model, run.prompts, texts, metrics,
        _settings(target, run), report, run.output,
    )  # fmt: skip
    if run.output is not None:
        write_json(run.output, done.as_dict())
    return done


def _settings(target: Target, run: PreparedRun) -> dict[str, Any]:
    """The given settings, as JSON types."""
    kept = {"device": target.device, "dtype": target.dtype}
    spec = run.spec.model_dump(mode="json", exclude_unset=True)
    wanted = (run.spec.settings_key, "draft_model", "benchmark")
    return kept | {key: spec[key] for key in wanted if key in spec}


def _written(
    generator: Generator, run: PreparedRun, tokenizer: TextTokenizer
) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """(texts, metrics, report); each text follows its prompt, with the space between them if there is one."""
    result: Any = generator.generate(run.ids)
    new = result.sequences[:, -max(result.new_tokens) :].tolist()
    each = len(new) // len(run.ids)
    texts = [
        "".join(tokenizer.stream(row[:count], run.ids[index // each]))
        for index, (row, count) in enumerate(zip(new, result.new_tokens, strict=True))
    ]
    return texts, result.metrics.as_dict(), result.report


def _measured(
    run: PreparedRun, model: LanguageModel, draft: LanguageModel | None, tokenizer: TextTokenizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metrics, reports) by cache kind; kinds are timed in turn, so that other load slows all of them alike."""
    how = run.spec.benchmark or Benchmark()
    generators = {
        kind: build(model, draft, config, tokenizer) for kind, config in run.configs.items()
    }
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in generators}
    for index in range(how.warmup + how.repeats):
        for kind, generator in generators.items():
            figures = _figures(generator, run.ids)
            if index >= how.warmup:
                rounds[kind].append(figures)
    metrics = {
        kind: {name: _spread([row[name] for row in rows]) for name in rows[0]}
        for kind, rows in rounds.items()
    }
    return metrics, {kind: generator.report for kind, generator in generators.items()}


def _figures(generator: Generator, ids: list[list[int]]) -> dict[str, float]:
    """Figures of one generation into an empty cache."""
    generator.reset()
    generator.generate(ids)
    assert generator.metrics is not None
    figures = generator.metrics.as_dict()
    if isinstance(generator, SpeculativeGenerator):
        figures["acceptance_rate"] = generator.acceptance_rate
        figures["tokens_per_pass"] = generator.tokens_per_pass
    return figures


def _spread(values: list[float]) -> dict[str, float]:
    return {name: float(np.percentile(values, rank)) for name, rank in PERCENTILES.items()}
