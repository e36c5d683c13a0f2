"""Turns what users have into a `LanguageModel`: adapters for models, loaders for checkpoint folders.

Layers above register what they can wrap, so nothing here imports them; the adapter of a library is imported when one
of its objects is seen. Also models, dtypes and devices by the names that manifests and commands use.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from caramba_fast.models.checkpoint import WeightFiles, dtype_of, load_model
from caramba_fast.models.config import (
    CheckpointError,
    ModelConfig,
    UnsupportedCheckpointError,
    refuse_adapter,
)
from caramba_fast.models.context import ContextModel, takes_context
from caramba_fast.models.demos import demo_path
from caramba_fast.models.gguf import SUFFIX as GGUF
from caramba_fast.models.hub import ID as HUB_ID
from caramba_fast.models.hub import local_path
from caramba_fast.models.merged import merge_projections
from caramba_fast.models.protocol import LanguageModel
from caramba_fast.models.transformer import Transformer, check_dtype

NEEDED = ("forward", "eos_token_id", "pad_token_id", "vocab_size", "device", "cache_layout")
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")

Predicate = Callable[[Any], bool]
Wrap = Callable[[Any], LanguageModel]
Loader = Callable[[Path, torch.device | str, torch.dtype | None], LanguageModel]

_ADAPTERS: list[tuple[Predicate, Wrap]] = [(takes_context, ContextModel)]
_LOADERS: list[Loader] = []
_TOKENIZERS: list[Callable[[Path], Any]] = []
#: Library -> the package that registers an adapter for its objects when imported.
_LAZY = {"transformers": "caramba_fast.hf", "peft": "caramba_fast.hf"}


def register_adapter(predicate: Predicate, wrap: Wrap) -> None:
    """Wraps objects for which ``predicate`` is true with ``wrap``; the newest adapter is asked first."""
    _ADAPTERS.insert(0, (predicate, wrap))


def register_loader(loader: Loader) -> None:
    """Makes ``loader(folder, device, dtype)`` load checkpoint folders that the native model does not support."""
    _LOADERS.insert(0, loader)


def register_tokenizer_loader(loader: Callable[[Path], Any]) -> None:
    """Makes ``loader(folder)`` load tokenizers without a ``tokenizer.json``, or with a chat template."""
    _TOKENIZERS.insert(0, loader)


def as_language_model(model: Any) -> LanguageModel:
    """``model`` if it is a `LanguageModel`, else an adapter around it.

    Raises:
        TypeError: there is no adapter, or it cannot serve the model; the message lists what is missing.
    """
    if not missing_names(model) and not isinstance(model, type):
        if isinstance(model, Transformer):
            check_dtype(model.lm_head.weight.dtype)
        return model
    for base in type(model).__mro__:
        library = (base.__module__ or "").partition(".")[0]
        if library in _LAZY:
            importlib.import_module(_LAZY[library])
    for predicate, wrap in _ADAPTERS:
        if predicate(model):
            return wrap(model)
    raise TypeError(
        f"{type(model).__name__} is no LanguageModel: it lacks {', '.join(missing_names(model))} "
        "(see caramba_fast.models.LanguageModel); a transformers causal language model or a "
        "model(tokens, ctx=...) with a cache_layout is wrapped by itself, and a path or Hub id is loaded by "
        "caramba_fast.models.load, or with its tokenizer by Generator.from_checkpoint"
    )


def missing_names(model: Any) -> list[str]:
    """What ``model`` lacks of `LanguageModel`."""
    return [name for name in NEEDED if not hasattr(model, name)]


def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = torch.float32,
    revision: str | None = None,
) -> LanguageModel:
    """Loads the language model in a Hugging Face checkpoint folder, in a GGUF file, or on the Hub.

    Families that the native model does not support are loaded with transformers. From folders only safetensors weights
    are read, and no code of the checkpoint is run.

    Args:
        path: a folder, a ``.gguf`` file, or a Hub id (``organisation/name``), which is downloaded if there is no such
            path.
        device: device of the weights.
        dtype: float32, float16, bfloat16 or their names, or None or "auto" for the checkpoint's own.
        revision: branch, tag or commit of a Hub id.

    Returns:
        The model in eval mode; no parameter requires a gradient. Native models have merged projections.

    Raises:
        TypeError: another dtype, or a transformers model that our caches cannot serve.
        ValueError: an unknown dtype name.
        CheckpointError: the path is missing, a pickle, damaged or has a PEFT adapter in it, or neither the native model
            nor transformers loads it.
        ModuleNotFoundError: a Hub id must be downloaded and huggingface_hub is not installed.
    """
    dtype = dtype_of(dtype)
    folder = checkpoint_folder(path, revision)
    try:
        return merge_projections(load_model(folder, dtype=dtype, device=device))
    except UnsupportedCheckpointError as error:
        reason = str(error)
    loaders = _loaders()
    if not loaders:
        raise CheckpointError(f"{reason}; others need transformers (pip install transformers)")
    return loaders[0](folder, device, dtype)


def load_hub_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a folder, with chat template; ModuleNotFoundError without transformers."""
    if not _TOKENIZERS:
        _import_lazy()
    if not _TOKENIZERS:
        raise ModuleNotFoundError(
            f"the tokenizer in {folder} needs transformers (pip install transformers)"
        )
    return _TOKENIZERS[0](folder)


def checkpoint_folder(path: str | Path, revision: str | None = None) -> Path:
    """The folder with a config.json, or the GGUF file, of a path or Hub id.

    Args:
        path: a path, or a Hub id (``organisation/name``), which is downloaded if there is no such path.
        revision: branch, tag or commit of a Hub id.

    Raises:
        CheckpointError: it is missing, a pickle or another file, has no config.json or a PEFT adapter beside it, or
            could not be downloaded.
    """
    folder = local_path(path, revision)
    if folder.suffix == GGUF and folder.is_file():
        return folder
    if folder.suffix in PICKLES and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a pickled checkpoint, which may run code when it is opened, and is not read; "
            "save the model as a Hugging Face folder instead (config.json and model.safetensors: "
            "safetensors.torch.save_file, or save_pretrained) and give that folder"
        )
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise CheckpointError(
            f"{folder} {what}; a Hugging Face checkpoint folder, or a .gguf file, is needed"
        )
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder / 'config.json'} does not exist")
    return folder


def _loaders() -> list[Loader]:
    if not _LOADERS:
        _import_lazy()
    return _LOADERS


def _import_lazy() -> None:
    for library, layer in _LAZY.items():
        if importlib.util.find_spec(library) is not None:
            importlib.import_module(layer)


#: Name of the draft that needs no model: prompt lookup.
LOOKUP = "lookup"
DEMO = "demo"


def model_folder(name: str, base: Path = Path(), revision: str | None = None) -> Path:
    """The checkpoint folder of "demo", "demo:NAME", a path relative to ``base``, or a Hub id.

    Raises:
        ValueError: an unknown demo model; the message lists the known ones.
        CheckpointError: the path is not a checkpoint folder.
    """
    head, _, which = name.partition(":")
    if head == DEMO:
        if revision is not None:
            raise ValueError(f"revision is {revision!r}; demo models have none")
        return demo_path(which or "gqa")
    is_id = HUB_ID.fullmatch(name) and not (base / name).exists()
    return checkpoint_folder(name if is_id else base / name, revision)


def sketch(folder: Path) -> LanguageModel | None:
    """The model on the meta device, to check settings against; None for GGUF or if only transformers supports it.

    Raises:
        CheckpointError: config.json is damaged, invalid, or has larger sizes than the weights.
    """
    if folder.suffix == GGUF:
        return None
    try:
        config = ModelConfig.from_file(folder / "config.json")
    except UnsupportedCheckpointError:
        return None
    WeightFiles(folder).check(config)
    with torch.device("meta"):
        return Transformer(config)


def check_device(name: str) -> None:
    """Raises ValueError unless torch has the device ``name`` here."""
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
