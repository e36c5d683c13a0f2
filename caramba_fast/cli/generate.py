"""``caramba-fast generate``: text in, text out, as it is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import demo_path, load_model, load_tokenizer


def explain(error: ValidationError) -> str:
    """pydantic's report as one line: field, what was given, what is allowed."""
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "config"
        parts.append(f"{name}={item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(parts)


def run_generate(
    text: str, path: Path | None, settings: dict[str, Any], device: str, stats: bool
) -> None:
    """Writes the continuation to stdout and the figures to stderr."""
    try:
        config = GenerateConfig(**settings)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
    folder = path or demo_path()
    model = load_model(folder, device=device)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text).ids
    if not ids:
        raise ValueError("the prompt is empty; give at least one character")
    generator = Generator(model, config)
    typer.echo(text, nl=False)
    writer = TextWriter(tokenizer.decode, sys.stdout.write)
    for token in generator.generate_iter([ids]):
        writer.put(int(token))
        sys.stdout.flush()
    writer.close()
    typer.echo()
    if stats and generator.metrics is not None:
        m = generator.metrics
        typer.secho(
            f"{m.new_tokens} tokens, {m.decode_tokens_per_s:.1f} tokens/s, first after "
            f"{1000 * m.ttft_s:.0f} ms, cache {m.bytes_per_token:.0f} bytes/token ({config.cache_kind.value})",
            fg="bright_black",
            err=True,
        )


class TextWriter:
    """Writes text as tokens arrive, holding back bytes that are not a whole character yet."""

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str], object]) -> None:
        self._decode, self._write = decode, write
        self._tokens: list[int] = []
        self._written = 0

    def put(self, token: int) -> None:
        """Takes one token."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\ufffd"):
            return
        self._write(text[self._written :])
        self._written = len(text)
        if text.endswith("\n"):  # a safe place to forget what was written: decoding stays short
            self._tokens, self._written = [], 0

    def close(self) -> None:
        """Writes what is left, whole character or not."""
        text = self._decode(self._tokens)
        self._write(text[self._written :])
