"""What commands that write text share: opening a model, and the figures of a run in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from caramba_fast.config.errors import explain
from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.infer.checkpoint import find_tokenizer
from caramba_fast.infer.text import TextTokenizer
from caramba_fast.manifest.opening import LOOKUP, check_device, model_folder, open_model

__all__ = ["Setup", "check_device", "open_generator", "summary"]


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
    config = _config(setup)
    check_device(setup.device)
    folder = model_folder(setup.model)
    draft_folder = None if setup.draft in (None, LOOKUP) else model_folder(str(setup.draft))
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder / 'tokenizer.json'} does not exist")
    model = open_model(folder, setup.device, setup.dtype)
    if not isinstance(config, SpeculativeConfig):
        return Generator(model, config, tokenizer=tokenizer), tokenizer
    draft = None
    if draft_folder is not None:
        draft = open_model(draft_folder, setup.device, setup.dtype)
    return SpeculativeGenerator(model, draft, config, tokenizer=tokenizer), tokenizer


def _config(setup: Setup) -> GenerateConfig:
    given = {name: value for name, value in setup.settings.items() if value is not None}
    if setup.draft is None and "spec_k" in given:
        raise ValueError(
            f"--spec-k is {given['spec_k']}, and there is no draft; add --draft lookup, or --draft with a smaller model"
        )
    try:
        return GenerateConfig(**given) if setup.draft is None else SpeculativeConfig(**given)
    except ValidationError as error:
        raise ValueError(explain(error)) from error


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
