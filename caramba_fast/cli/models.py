"""``caramba-fast generate``, and what it shares with other commands: settings, model loading, a line of figures."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from caramba_fast.config.files import explain
from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig
from caramba_fast.infer.saved import SavedSession, filled, read_session
from caramba_fast.infer.tokenizer import TextTokenizer, TextWriter, find_tokenizer
from caramba_fast.manifest.prepare import build
from caramba_fast.models import LanguageModel, pack_weights
from caramba_fast.models.identity import modules_of
from caramba_fast.models.registry import LOOKUP, check_device, load, model_folder

Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(frozen=True)
class Setup:
    """The model and settings a command was given.

    Attributes:
        model: "demo", "demo:gqa", "demo:dba", a checkpoint folder, a GGUF file or a Hub id.
        settings: fields of GenerateConfig, or of SpeculativeConfig with a draft; None leaves the default.
        draft: "lookup", or a model as above; None for plain decoding.
        device: cpu, cuda or mps.
        dtype: float32, float16, bfloat16 or auto.
        revision: revision of the model, if it is a Hub id.
    """

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    draft: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    revision: str | None = None


def open_generator(
    setup: Setup, saved: SavedSession | None = None
) -> tuple[Generator, TextTokenizer]:
    """The generator and its tokenizer; cache settings that are not given come from the saved session.

    Raises ValueError for invalid settings or a device that is not available, CheckpointError or FileNotFoundError if
    the checkpoint cannot be used or has no tokenizer.
    """
    config = _config(setup)
    if saved is not None:
        config = filled(config, saved)
    check_device(setup.device)
    folder = model_folder(setup.model, revision=setup.revision)
    draft_folder = None if setup.draft in (None, LOOKUP) else model_folder(str(setup.draft))
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder / 'tokenizer.json'} does not exist")
    model = load_to_decode(folder, setup.device, setup.dtype)
    draft = None
    if draft_folder is not None:
        draft = load_to_decode(draft_folder, setup.device, setup.dtype)
    return build(model, draft, config, tokenizer), tokenizer


def load_to_decode(folder: Path, device: str, dtype: str) -> LanguageModel:
    """`load`, with packed weights on a CPU."""
    model = load(folder, device, dtype)
    for module in modules_of(model) if model.device.type == "cpu" else ():
        with suppress(ValueError):  # oneDNN has no packed weights of this dtype on this processor
            pack_weights(module)
    return model


def _config(setup: Setup) -> GenerateConfig:
    drafted = setup.settings.get("spec_k")
    if setup.draft is None and drafted is not None:
        raise ValueError(
            f"--spec-k is {drafted}, and there is no draft; add --draft lookup, or --draft with a smaller model"
        )
    return settings_of(GenerateConfig if setup.draft is None else SpeculativeConfig, setup.settings)


def settings_of(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """Settings from options; None leaves a default. Raises ValueError with the `ValidationError` in one line."""
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def summary(generator: Generator) -> str:
    """The figures of the last run in one line."""
    metrics, report = generator.metrics, generator.report
    assert metrics is not None
    speed = f", {metrics.decode_tokens_per_s:.1f} tokens/s" if metrics.new_tokens > 1 else ""
    return (
        f"{metrics.new_tokens} tokens{speed}, first after {1000 * metrics.ttft_s:.0f} ms, "
        f"cache {metrics.bytes_per_token:.0f} bytes/token ({report['cache_kind']}){of_drafts(report)}"
    )


def of_drafts(report: Mapping[str, Any]) -> str:
    """Acceptance figures of speculative decoding, to append to a line of figures; "" without drafts."""
    found = report.get("speculation")
    if not found:
        return ""
    accepted, tokens = found["acceptance_rate"], found["tokens_per_pass"]
    share = "no drafts" if math.isnan(accepted) else f"{accepted:.0%} of drafts accepted"
    return f", {share}, {tokens:.2f} tokens a pass"


def run_generate(text: str, setup: Setup, stats: bool, session: Path | None = None) -> None:
    """Writes the continuation to stdout and the figures, if ``stats``, to stderr.

    ``session`` is a file to resume from, if it exists, and to save to.
    """
    saved = None if session is None else _check_session(setup, session)
    generator, tokenizer = open_generator(setup, saved)
    if saved is not None:
        generator.resume(saved)
    ids = tokenizer.encode(text, special=not generator.tokens)
    if not ids:
        raise ValueError("the prompt is empty; give at least one character")
    if generator.config.num_beams > 1 or generator.config.num_return_sequences > 1:
        _write_answers(generator, tokenizer, ids)
    else:
        _stream(generator, tokenizer, text, ids)
    if session is not None:
        generator.save(session)
    if stats and generator.metrics is not None:
        typer.secho(summary(generator), fg="bright_black", err=True)


def _check_session(setup: Setup, session: Path) -> SavedSession | None:
    """The saved session, if any; raises before a model is loaded if it cannot be resumed or the file not written."""
    answers = setup.settings.get("num_return_sequences") or 1
    if answers > 1:
        raise ValueError(
            f"--num-return-sequences is {answers}; with --session 1 is allowed: a session goes on with one answer"
        )
    if session.exists():
        return read_session(session)
    if not session.parent.is_dir():
        raise FileNotFoundError(
            f"{session.parent} does not exist; --session needs a folder that does"
        )
    return None


def _stream(generator: Generator, tokenizer: TextTokenizer, text: str, ids: list[int]) -> None:
    """Prints the prompt with the first token (nothing if that fails), then each token as it comes."""
    writer = TextWriter(tokenizer.decode, sys.stdout.write, ids)
    steps: Any = generator.generate_iter([ids])
    started = False
    try:
        for token in steps:
            if not started:
                typer.echo(text, nl=False)
                started = True
            writer.put(int(token))
            sys.stdout.flush()
    finally:
        if started:
            writer.close()
            typer.echo()


def _write_answers(generator: Generator, tokenizer: TextTokenizer, ids: list[int]) -> None:
    """Prints every answer, best first if they have scores."""
    found: Any = generator.generate([ids], return_dict=True)
    for index, row in enumerate(found.sequences.tolist()):
        count = len(ids) + found.new_tokens[index]
        score = (
            ""
            if found.sequences_scores is None
            else f" ({float(found.sequences_scores[index]):.3f})"
        )
        if len(found.sequences) > 1:
            typer.secho(f"[{index + 1}]{score}", fg="bright_black")
        typer.echo(tokenizer.decode(row[:count]))
