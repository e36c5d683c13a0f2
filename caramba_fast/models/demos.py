"""The trained demo models, for offline use. They are in a source tree, or in the distribution caramba-fast-demo.

`HARD_NAMES` are variants that are hard to quantize. They ship as the difference to their base model
(``delta.safetensors``), which is applied when they are loaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from caramba_fast.models.checkpoint import load_model
from caramba_fast.models.config import CheckpointError, ModelConfig
from caramba_fast.models.transformer import Transformer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = ("gqa", "dba")
#: Hard variant -> the demo model its delta is applied to.
_BASES = {"gqa_bias": "gqa"}
HARD_NAMES = tuple(_BASES)
DELTA = "delta.safetensors"
_FOLDER = Path(__file__).resolve().parent / "demo"


def demo_path(name: str = "gqa") -> Path:
    """The Hugging Face checkpoint folder of a demo model.

    Args:
        name: "gqa" or "dba", also written "demo:gqa".

    Raises:
        FileNotFoundError: the demo models are not installed; the message says what to do.
        ValueError: an unknown name, or a hard variant, for which `save_demo` writes a checkpoint.
    """
    known = _canonical(name)
    if known in HARD_NAMES:
        raise ValueError(
            f"demo model {name!r} ships as a delta to {_BASES[known]!r}, not as a checkpoint folder; "
            f"save_demo({name!r}, folder) writes one. Checkpoint folders are {', '.join(NAMES)}"
        )
    return _folder(name)


def load_demo(name: str = "gqa", *, device: torch.device | str = "cpu") -> Transformer:
    """A demo model or a hard variant in float32 (weights are stored in float16).

    Args:
        name: "gqa", "dba" or "gqa/bias", also written "demo:gqa/bias".

    Raises:
        FileNotFoundError: the demo models are not installed; the message says what to do.
        ValueError: an unknown name; the message lists the known ones.
    """
    known = _canonical(name)
    if known in HARD_NAMES:
        return with_delta(load_demo(_BASES[known], device=device), _folder(name))
    return load_model(_folder(name), device=device)


def save_demo(name: str, folder: str | Path) -> None:
    """Writes a demo model or hard variant as a full Hugging Face checkpoint folder, in float16.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - only saving needs it

    model, out = load_demo(name), Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    state = {key: value.half().contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    shutil.copyfile(_folder(name) / "config.json", out / "config.json")
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_folder(_base_of(name)) / file, out / file)


def with_delta(base: Transformer, folder: Path) -> Transformer:
    """A copy of ``base`` with the tensors and config of a delta folder.

    Args:
        base: the model the delta was made from; unchanged tensors are shared with it.
        folder: holds ``config.json`` and ``delta.safetensors`` (any dtype; cast to the base's).

    Raises:
        CheckpointError: the folder is damaged, or does not fit the base.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - only loading needs it
    from safetensors.torch import load_file  # noqa: PLC0415

    file = folder / DELTA
    try:
        delta = load_file(str(file))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_file(folder / "config.json"))
    weight = base.lm_head.weight
    state = base.state_dict() | {name: value.to(weight) for name, value in delta.items()}
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{file} does not fit its base and config.json: {error}") from error
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.rope = type(base.rope)(model.config.rope, model.config.rope_dim)
    return model.requires_grad_(False).eval()


def _canonical(name: str) -> str:
    """Folder name of a demo model given as in commands ("demo", "demo:gqa", "gqa/bias"); ValueError if unknown."""
    known = {"demo": "gqa"} | {each.replace("_", "/"): each for each in (*NAMES, *HARD_NAMES)}
    short = name.removeprefix("demo:")
    found = known.get(short.replace("_", "/"))
    if found is None:
        raise ValueError(f"unknown demo model {name!r}; known are {', '.join([*known][1:])}")
    return found


def _base_of(name: str) -> str:
    known = _canonical(name)
    return _BASES.get(known, known)


def _folder(name: str) -> Path:
    return _installed(_FOLDER / _canonical(name))


def _installed(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            "the demo models are not installed: pip install caramba-fast-demo, or take a source tree, which has them"
        )
    return path


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The ``tokenizer.json`` of a checkpoint folder, as a `tokenizers.Tokenizer`.

    Raises:
        FileNotFoundError: the folder has none.
        CheckpointError: it is damaged.
        ModuleNotFoundError: the tokenizers package is missing (``pip install tokenizers``).
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; the folder has no fast tokenizer")
    from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

    try:
        found = Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except (
        BaseException
    ) as error:  # nothing more specific is raised, and a Rust panic is not an Exception
        raise CheckpointError(
            f"{file} cannot be read as a tokenizer: {str(error)[:300]}"
        ) from error
    found.no_truncation()  # the file may have settings of the training
    found.no_padding()
    return found


def demo_tokenizer(name: str = "gqa") -> Tokenizer:
    """The byte-level BPE tokenizer of a demo model or hard variant."""
    return load_tokenizer(_folder(_base_of(name)))


def held_out_text() -> str:
    """Python source that the demo models were not trained on (PSF licence)."""
    return _installed(_FOLDER / "held_out.txt").read_text(encoding="utf-8")
