"""Checks everything in a manifest that can be checked before the first run: files, prompts, settings.

Settings are checked against each model without its weights.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.infer.stopping import row_limits
from caramba_fast.infer.tokenizer import TextTokenizer, find_tokenizer
from caramba_fast.manifest.schema import (
    DEFAULT_PROMPT,
    Manifest,
    ManifestError,
    RunSpec,
    Target,
    at,
    is_report,
)
from caramba_fast.models import LanguageModel
from caramba_fast.models.registry import LOOKUP, check_device, model_folder, sketch
from caramba_fast.writing import check_replaceable


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked.

    Attributes:
        spec: the run in the manifest.
        configs: settings by cache kind, the run's own first; more than one only in mode benchmark.
        prompts: texts; ids: their tokens.
        draft: checkpoint folder of the draft model, or None.
        output: the JSON file to write, or None.
    """

    spec: RunSpec
    configs: dict[str, GenerateConfig]
    prompts: list[str]
    ids: list[list[int]]
    draft: Path | None
    output: Path | None


@dataclass(frozen=True)
class Prepared:
    """A target whose runs have been checked; ``folder`` is its model's."""

    target: Target
    folder: Path
    tokenizer: TextTokenizer
    runs: list[PreparedRun]


def prepare(
    manifest: Manifest,
    folder: Path,
    *,
    only: str | None = None,
    prompt: str | None = None,
    force: bool = False,
) -> list[Prepared]:
    """Checks the runs of a manifest.

    Args:
        manifest: the manifest.
        folder: base folder of its relative paths.
        only: run only this target, run, or "target/run".
        prompt: replaces the prompts of the manifest.
        force: allow overwriting outputs that are not reports of this package.

    Raises:
        ManifestError: nothing is named ``only``; a model, tokenizer or prompt file is missing; a prompt is empty or too
            long; settings do not fit the model; a file would be written outside the folder, or over a file of another
            kind. The message begins with the path of the key.
    """
    found = []
    for index, target in enumerate(manifest.targets):
        chosen = {
            place: run
            for place, run in enumerate(target.runs)
            if only in (None, target.name, run.id, f"{target.name}/{run.id}")
        }
        if chosen:
            found.append(_prepared(f"targets[{index}]", target, chosen, folder, prompt))
    if not found:
        known = [f"{t.name}/{r.id}" for t in manifest.targets for r in t.runs]
        raise ManifestError(f"no run is called {only!r}; there are {', '.join(known)}")
    _check_outputs(found, force)
    return found


def _prepared(
    path: str, target: Target, runs: dict[int, RunSpec], folder: Path, prompt: str | None
) -> Prepared:
    with at(f"{path}.model={target.model!r}"):
        model = model_folder(target.model, folder)
        outline = sketch(model)
    with at(f"{path}.device"):
        check_device(target.device)
    with at(f"{path}.tokenizer"):
        tokenizer = find_tokenizer(model, target.tokenizer and folder / target.tokenizer)
        if tokenizer is None:
            raise FileNotFoundError(f"{model} has none of its own; name a folder that has one")
    done = []
    for place, run in runs.items():
        where = f"{path}.runs[{place}]"
        ready = _prepared_run(where, target, run, tokenizer, folder, prompt)
        if outline is not None:
            _check_settings(where, ready, outline, tokenizer)
        done.append(ready)
    return Prepared(target, model, tokenizer, done)


def _prepared_run(
    path: str, target: Target, run: RunSpec, tokenizer: TextTokenizer, folder: Path,
    prompt: str | None,
) -> PreparedRun:  # fmt: skip
    prompts = [prompt] if prompt is not None else _prompts(path, run, folder)
    ids = [tokenizer.encode(text) for text in prompts]
    if not all(ids):
        raise ManifestError(f"{path}: prompt {ids.index([])} is empty; give at least one character")
    with at(f"{path}.draft_model={run.draft_model!r}"):
        draft = None if run.draft_model == LOOKUP else model_folder(run.draft_model, folder)
    configs = run.compared() if run.mode == "benchmark" else {run.config.cache_name: run.config}
    configs = {kind: _rooted(config, folder) for kind, config in configs.items()}
    for config in configs.values():
        with at(f"{path}.{run.settings_key}"):
            _check_room(config, ids)
    output = _output(target, run, folder)
    if run.output is not None:
        _check_inside(f"{path}.output", run.output, folder)
    plan = run.config.cache_plan_path
    if plan is not None:
        _check_inside(f"{path}.{run.settings_key}.cache_plan_path", plan, folder)
    return PreparedRun(run, configs, prompts, ids, draft, output)


def _prompts(path: str, run: RunSpec, folder: Path) -> list[str]:
    if run.prompt_file is None:
        return list(run.prompts) or [DEFAULT_PROMPT]
    file = folder / run.prompt_file
    with at(f"{path}.prompt_file"):
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist")
        return [file.read_text(encoding="utf-8")]


def _rooted(config: GenerateConfig, folder: Path) -> GenerateConfig:
    plan = config.cache_plan_path
    return config if plan is None else config.updated(cache_plan_path=folder / plan)


def _output(target: Target, run: RunSpec, folder: Path) -> Path | None:
    if run.output is not None:
        return Path(os.path.normpath(folder / run.output))
    name = re.sub(r"[^\w.-]+", "_", f"{target.name}-{run.id}")
    return folder / f"{name}.json" if run.mode == "benchmark" else None


def _check_inside(path: str, given: Path, folder: Path) -> None:
    """Raises ManifestError if an output file, with links resolved, is not in the manifest's folder."""
    if not (folder / given).resolve().is_relative_to(folder.resolve()):
        raise ManifestError(
            f"{path}={str(given)!r} is outside the manifest's folder; a relative path that stays in it is allowed"
        )


def _check_room(config: GenerateConfig, ids: list[list[int]]) -> None:
    """Raises ValueError unless prompts and new tokens fit into the cache."""
    lens = [len(row) for row in ids]
    for row, (length, limit) in enumerate(zip(lens, row_limits(config, lens), strict=True)):
        if length + limit - 1 > config.max_seq_len:
            raise ValueError(
                f"prompt {row} has {length} tokens and max_new_tokens={limit} follow; they need "
                f"max_seq_len={length + limit - 1} or more, which is {config.max_seq_len}"
            )


def _check_settings(
    path: str, run: PreparedRun, outline: LanguageModel, tokenizer: TextTokenizer
) -> None:
    """Raises ManifestError unless every configuration of the run fits the model and the draft."""
    draft = None
    if run.draft is not None:
        with at(f"{path}.draft_model={run.spec.draft_model!r}"):
            draft = sketch(run.draft)
            if draft is None:
                return  # only loading it can tell
    for config in run.configs.values():
        with at(f"{path}.{run.spec.settings_key}"):
            # A seeded generator needs a device, and an outline has none.
            build(outline, draft, config.updated(seed=None), tokenizer)


def build(
    model: LanguageModel,
    draft: LanguageModel | None,
    config: GenerateConfig,
    tokenizer: TextTokenizer,
) -> Generator:
    """The generator for these settings; with a draft if they are a `SpeculativeConfig`."""
    if isinstance(config, SpeculativeConfig):
        return SpeculativeGenerator(model, draft, config, tokenizer=tokenizer)
    return Generator(model, config, tokenizer=tokenizer)


def _check_outputs(found: list[Prepared], force: bool) -> None:
    """Raises ManifestError if two runs write the same file, or a file cannot be written."""
    seen: dict[Path, str] = {}
    runs = [(f"{ready.target.name}/{r.spec.id}", r) for ready in found for r in ready.runs]
    written = [(name, run.output) for name, run in runs]
    plans = {
        c.cache_plan_path.resolve()
        for _, r in runs
        for c in r.configs.values()
        if c.cache_plan_path
    }
    for name, output in written:
        if output is None:
            continue
        if output.is_dir():
            raise ManifestError(f"{name}: output {output} is a folder; a file is needed")
        with at(name):
            check_replaceable(output, "report of a run", is_report, force=force)
        real = output.resolve()
        if real in plans:
            raise ManifestError(
                f"{name}: output {output} is a cache_plan_path too; give it another name"
            )
        if real in seen:
            raise ManifestError(
                f"{seen[real]} and {name} both write {output}; give one another output"
            )
        seen[real] = name
