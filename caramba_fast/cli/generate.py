"""``caramba-fast generate``: text in, text out, as it is written."""

from __future__ import annotations

import sys
from typing import Any

import typer

from caramba_fast.cli.models import Setup, open_generator, summary
from caramba_fast.infer import Generator
from caramba_fast.infer.text import TextTokenizer, TextWriter


def run_generate(text: str, setup: Setup, stats: bool) -> None:
    """Writes the continuation to stdout and the figures to stderr."""
    generator, tokenizer = open_generator(setup)
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("the prompt is empty; give at least one character")
    if generator.config.num_beams > 1 or generator.config.num_return_sequences > 1:
        _write_answers(generator, tokenizer, ids)
    else:
        _stream(generator, tokenizer, text, ids)
    if stats and generator.metrics is not None:
        typer.secho(summary(generator), fg="bright_black", err=True)


def _stream(generator: Generator, tokenizer: TextTokenizer, text: str, ids: list[int]) -> None:
    """The prompt with the first token (nothing, if that one fails), then each as it comes."""
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
    """Every answer whole, best first where they have a score."""
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
