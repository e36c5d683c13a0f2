"""``caramba-fast generate``: text in, text out, as it is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import typer
from pydantic import ValidationError

from caramba_fast.config.errors import explain
from caramba_fast.infer import GenerateConfig, GenerationMetrics, Generator
from caramba_fast.infer.text import TextWriter
from caramba_fast.models import demo_path, load_model, load_tokenizer


def run_generate(
    text: str, path: Path | None, settings: dict[str, Any], device: str, stats: bool
) -> None:
    """Writes the continuation to stdout and the figures to stderr."""
    try:
        config = GenerateConfig(**settings)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
    check_device(device)
    folder = path or demo_path()
    model = load_model(folder, device=device)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text).ids
    if not ids:
        raise ValueError("the prompt is empty; give at least one character")
    generator = Generator(model, config)
    tokens = generator.generate_iter([ids])
    typer.echo(text, nl=False)
    writer = TextWriter(tokenizer.decode, sys.stdout.write, ids)
    for token in tokens:
        writer.put(int(token))
        sys.stdout.flush()
    writer.close()
    typer.echo()
    if stats and generator.metrics is not None:
        typer.secho(summary(generator.metrics, config.cache_name), fg="bright_black", err=True)


def check_device(name: str) -> None:
    """Raises ValueError unless torch can compute on ``name`` here."""
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name.split(":", maxsplit=1)[0] not in available:
        raise ValueError(f"device is {name!r}; known are {', '.join(available)}")
    if not available[name.split(":", maxsplit=1)[0]]:
        raise ValueError(f"device is {name!r}, but torch finds no {name.upper()} device here")


def summary(metrics: GenerationMetrics, kind: str) -> str:
    """The figures of a run in one line."""
    speed = f", {metrics.decode_tokens_per_s:.1f} tokens/s" if metrics.new_tokens > 1 else ""
    return (
        f"{metrics.new_tokens} tokens{speed}, first after {1000 * metrics.ttft_s:.0f} ms, "
        f"cache {metrics.bytes_per_token:.0f} bytes/token ({kind})"
    )
