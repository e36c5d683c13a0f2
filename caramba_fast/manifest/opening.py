"""Models and devices by the names that manifests and commands give them."""

from __future__ import annotations

from pathlib import Path

import torch

from caramba_fast.models import LanguageModel, ModelConfig, Transformer, demo_path
from caramba_fast.models.checkpoint import WeightFiles
from caramba_fast.models.config import UnsupportedCheckpointError
from caramba_fast.models.registry import checkpoint_folder, load

#: The draft that needs no model.
LOOKUP = "lookup"
DEMO = "demo"
DTYPES = ("float32", "float16", "bfloat16")


def model_folder(name: str, base: Path = Path()) -> Path:
    """The checkpoint folder of "demo", "demo:NAME" or a path, relative to ``base``.

    Raises:
        ValueError: an unknown demo model; the message lists the known ones.
        CheckpointError: a path that is no checkpoint folder.
    """
    head, _, which = name.partition(":")
    return demo_path(which or "gqa") if head == DEMO else checkpoint_folder(base / name)


def open_model(folder: Path, device: str, dtype: str) -> LanguageModel:
    """The model in a checkpoint folder.

    Raises:
        ValueError: a dtype that is not one of `DTYPES`, or a folder that cannot be used.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}")
    return load(folder, device, getattr(torch, dtype))


def sketch(folder: Path) -> LanguageModel | None:
    """The model without its weights, to check settings against; None where only its loader knows it.

    Raises:
        CheckpointError: a config.json that is damaged, wrong, or larger than the weights beside it.
    """
    try:
        config = ModelConfig.from_file(folder / "config.json")
    except UnsupportedCheckpointError:
        return None
    WeightFiles(folder).check(config)
    with torch.device("meta"):
        return Transformer(config)


def check_device(name: str) -> None:
    """Raises ValueError unless torch can compute on ``name`` here."""
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    kind = name.split(":", maxsplit=1)[0]
    if kind not in available:
        raise ValueError(f"device is {name!r}; known are {', '.join(available)}")
    if not available[kind]:
        raise ValueError(f"device is {name!r}, but torch finds no {name.upper()} device here")
