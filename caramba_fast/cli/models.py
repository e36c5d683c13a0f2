"""What commands that write text share: opening a model, and the figures of a run in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from caramba_fast.config.errors import explain
from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.infer.checkpoint import find_tokenizer
from caramba_fast.infer.text import TextTokenizer
from caramba_fast.models import LanguageModel, demo_path
from caramba_fast.models.registry import checkpoint_folder, load

LOOKUP = "lookup"


@dataclass(frozen=True)
class Setup:
    """What a command was asked for.

    Attributes:
        model: "demo", "demo:gqa", "demo:dba" or a checkpoint folder.
        settings: fields of GenerateConfig, or of SpeculativeConfig with a draft; None leaves the default.
        draft: "lookup", or a model as above; None for plain decoding.
        device: cpu, cuda or mps.
        dtype: float32, float16 or bfloat16.
    """

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    draft: str | None = None
    device: str = "cpu"
    dtype: str = "float32"


def open_generator(setup: Setup) -> tuple[Generator, TextTokenizer]:
    """The generator, and its tokenizer.

    Raises:
        ValueError: settings that are wrong, a device that is not there.
        CheckpointError, FileNotFoundError: a folder that cannot be used, or has no tokenizer.
    """
    given = {name: value for name, value in setup.settings.items() if value is not None}
    try:
        config = GenerateConfig(**given) if setup.draft is None else SpeculativeConfig(**given)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
    check_device(setup.device)
    folder = model_folder(setup.model)
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder / 'tokenizer.json'} does not exist")
    model = _load(setup.model, setup)
    if not isinstance(config, SpeculativeConfig):
        return Generator(model, config, tokenizer=tokenizer), tokenizer
    draft = None if setup.draft in (None, LOOKUP) else _load(str(setup.draft), setup)
    return SpeculativeGenerator(model, draft, config, tokenizer=tokenizer), tokenizer


def model_folder(name: str) -> Path:
    """The checkpoint folder of "demo", "demo:NAME" or a path."""
    head, _, which = name.partition(":")
    return demo_path(which or "gqa") if head == "demo" else checkpoint_folder(name)


def _load(name: str, setup: Setup) -> LanguageModel:
    dtypes = ("float32", "float16", "bfloat16")
    if setup.dtype not in dtypes:
        raise ValueError(f"dtype is {setup.dtype!r}; allowed are {', '.join(dtypes)}")
    return load(model_folder(name), setup.device, getattr(torch, setup.dtype))


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


def summary(generator: Generator) -> str:
    """The figures of the last run in one line."""
    metrics, report = generator.metrics, generator.report
    assert metrics is not None
    speed = f", {metrics.decode_tokens_per_s:.1f} tokens/s" if metrics.new_tokens > 1 else ""
    line = (
        f"{metrics.new_tokens} tokens{speed}, first after {1000 * metrics.ttft_s:.0f} ms, "
        f"cache {metrics.bytes_per_token:.0f} bytes/token ({report['cache_kind']})"
    )
    told = report.get("speculation")
    if told:
        line += (
            f", {told['acceptance_rate']:.0%} of drafts accepted, "
            f"{told['tokens_per_pass']:.2f} tokens a pass"
        )
    return line
