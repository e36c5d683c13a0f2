"""The commands that write text, with their options: ``generate``, ``chat``, ``run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from caramba_fast.cli import options as o


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads standard input.")],
    model: o.Model = "demo",
    device: o.Device = "cpu",
    dtype: o.Dtype = "float32",
    stats: o.Stats = True,
    cache: o.Cache = "fp16",
    budget_mb: o.Budget = None,
    calibration: o.CalibrationFile = None,
    max_seq_len: o.Room = 2048,
    max_new_tokens: o.NewTokens = 64,
    stop: o.Stop = None,
    temperature: o.Temperature = 0.8,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.Penalty = None,
    no_repeat_ngram_size: o.NGram = None,
    seed: o.Seed = None,
    num_beams: o.Beams = None,
    num_return_sequences: o.Answers = None,
    draft: o.DraftModel = None,
    spec_k: o.DraftLength = None,
) -> None:
    """Continues PROMPT, token by token."""
    settings = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, no_repeat_ngram_size=no_repeat_ngram_size,
        stop=tuple(stop) if stop else None, num_beams=num_beams, num_return_sequences=num_return_sequences,
        seed=seed, max_seq_len=max_seq_len, cache_kind=cache, cache_budget_mb=budget_mb,
        cache_calibration=calibration, spec_k=spec_k,
    )  # fmt: skip
    with o.one_line_errors():
        from caramba_fast.cli.generate import run_generate  # noqa: PLC0415
        from caramba_fast.cli.models import Setup  # noqa: PLC0415

        text = sys.stdin.read() if prompt == "-" else prompt
        run_generate(text, Setup(model, settings, draft, device, dtype), stats)


def chat(
    model: o.Model = "demo",
    device: o.Device = "cpu",
    dtype: o.Dtype = "float32",
    stats: o.Stats = False,
    system: Annotated[
        str, typer.Option(help="A first message, for models with a chat template.")
    ] = "",
    cache: o.Cache = "q8",
    budget_mb: o.Budget = None,
    calibration: o.CalibrationFile = None,
    max_seq_len: o.Room = 4096,
    max_new_tokens: o.NewTokens = 256,
    stop: o.Stop = None,
    temperature: o.Temperature = 0.8,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.Penalty = None,
    seed: o.Seed = None,
    draft: o.DraftModel = None,
    spec_k: o.DraftLength = None,
) -> None:
    """A conversation in the terminal; its cache grows with it, and only what is new is read.

    /reset begins anew, /undo takes the last turn back, /stats shows
    figures, /quit or Ctrl-D ends. Ctrl-C stops an answer; what it said
    stays.
    """
    settings = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, stop=tuple(stop) if stop else None, seed=seed,
        max_seq_len=max_seq_len, cache_kind=cache, cache_budget_mb=budget_mb,
        cache_calibration=calibration, spec_k=spec_k,
    )  # fmt: skip
    with o.one_line_errors():
        from caramba_fast.cli.chat import run_chat  # noqa: PLC0415
        from caramba_fast.cli.models import Setup  # noqa: PLC0415

        run_chat(Setup(model, settings, draft, device, dtype), system, stats)


def run(
    manifest: Annotated[Path, typer.Argument(help="A YAML file, such as examples/manifest.yml.")],
    only: Annotated[
        str | None, typer.Option(help="The one target, run or TARGET/RUN to do.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Continue this instead of the manifest's prompts.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check everything, list the runs, and stop.")
    ] = False,
    force: o.Force = False,
) -> None:
    """Does what a manifest says: generations, and benchmarks whose metrics go to JSON."""
    with o.one_line_errors():
        from caramba_fast.cli.manifest import run_file  # noqa: PLC0415

        run_file(manifest, only, prompt, check, force=force)
