"""From a checkpoint folder to a generator that reads and writes text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.generator import Generator
from caramba_fast.infer.text import TextTokenizer
from caramba_fast.models.config import CheckpointError
from caramba_fast.models.registry import checkpoint_folder, load


def from_checkpoint(
    path: str | Path,
    tokenizer: Any = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    config: GenerateConfig | None = None,
    **overrides: Any,
) -> Generator:
    """A `Generator` for the model in a Hugging Face checkpoint folder, with its tokenizer.

    Args:
        path: the folder; Llama, Mistral, Qwen2, Qwen3 and DBA load natively, others through transformers.
        tokenizer: a tokenizer folder, a ``tokenizer.json``, or a tokenizer object; None takes the checkpoint's
            own, and leaves `Generator.tokenizer` at None if it has none.
        device, dtype: of the weights; dtype None for what the checkpoint stores.
        config, overrides: settings, as in `Generator`.

    Returns:
        the generator; its ``tokenizer`` is a `TextTokenizer`.

    Raises:
        CheckpointError: a path or folder that cannot be used; the message says why.
        FileNotFoundError, TypeError: no tokenizer at the path given for it.
        ModuleNotFoundError: a library this checkpoint needs is missing.
        ValueError: settings that are wrong.
    """
    folder = checkpoint_folder(path)
    text = find_tokenizer(folder, tokenizer)
    model = load(folder, device, dtype)
    return Generator(model, config, tokenizer=text, **overrides)


def find_tokenizer(folder: Path, tokenizer: Any = None) -> TextTokenizer | None:
    """The tokenizer asked for, else the folder's own, else None.

    Raises:
        FileNotFoundError, CheckpointError, TypeError, ModuleNotFoundError: as `TextTokenizer.of`.
    """
    if tokenizer is not None:
        return TextTokenizer.of(tokenizer)
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    )
    return TextTokenizer.of(folder) if any((folder / name).is_file() for name in names) else None


__all__ = ["CheckpointError", "find_tokenizer", "from_checkpoint"]
