"""The trained demo models that ship with the package: offline, real text, real quality figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from caramba_fast.models.checkpoint import load_model
from caramba_fast.models.config import CheckpointError
from caramba_fast.models.transformer import Transformer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = ("gqa", "dba")
_FOLDER = Path(__file__).resolve().parent / "demo"


def demo_path(name: str = "gqa") -> Path:
    """The Hugging Face checkpoint folder of a demo model.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in NAMES:
        raise ValueError(f"unknown demo model {name!r}; known are {', '.join(NAMES)}")
    return _FOLDER / name


def load_demo(name: str = "gqa", *, device: torch.device | str = "cpu") -> Transformer:
    """A demo model in float32 (its weights are stored in float16)."""
    return load_model(demo_path(name), device=device)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The ``tokenizer.json`` of a checkpoint folder, as a `tokenizers.Tokenizer`.

    Raises:
        FileNotFoundError: the folder has none.
        CheckpointError: it is damaged.
        ModuleNotFoundError: the tokenizers package is missing (``pip install caramba-fast[cli]``).
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; the folder has no fast tokenizer")
    from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error


def demo_tokenizer(name: str = "gqa") -> Tokenizer:
    """The demo model's byte-level BPE tokenizer."""
    return load_tokenizer(demo_path(name))


def held_out_text() -> str:
    """Python source the demo models have not seen (PSF licence)."""
    return (_FOLDER / "held_out.txt").read_text(encoding="utf-8")
