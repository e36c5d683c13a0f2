"""Loads a Hugging Face checkpoint folder: config.json and safetensors, nothing executable.

``pytorch_model.bin`` is refused: safetensors cannot run code when it is opened.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from caramba_fast.models.config import CheckpointError, ModelConfig
from caramba_fast.models.transformer import Transformer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model in ``path``, in eval mode.

    Args:
        path: a folder as ``save_pretrained`` writes it.
        dtype: float32, float16, bfloat16, or None for what the checkpoint stores.
        device: where to put the weights.

    Raises:
        CheckpointError: the folder is missing, damaged, unsafe or of an unsupported family; the
            message names the file and lists what is missing or unexpected.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; a Hugging Face checkpoint folder is needed"
        )
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"dtype is {dtype}; allowed are float32, float16, bfloat16, None")
    config = _with_generation_ids(ModelConfig.from_file(folder / "config.json"), folder)
    state = _read_weights(folder)
    with torch.device("meta"):
        model = Transformer(config)
    _check_names(model, state, folder)
    first = next(iter(state.values()))
    wanted = dtype or first.dtype
    state = {name: value.to(device=device, dtype=wanted) for name, value in state.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.rope = type(model.rope)(config.rope, config.rope_dim)
    return model.eval()


def _with_generation_ids(config: ModelConfig, folder: Path) -> ModelConfig:
    """Takes eos and pad ids from generation_config.json, where chat models keep the fuller list."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return config
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        ids = {
            name: raw[name]
            for name in ("eos_token_id", "pad_token_id")
            if raw.get(name) is not None
        }
        return ModelConfig.model_validate({**config.model_dump(), **ids})
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid: {error}") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # noqa: PLC0415 - only loading needs it
    from safetensors.torch import load_file  # noqa: PLC0415

    files = _weight_files(folder)
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(str(file)))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    if not state:
        raise CheckpointError(f"{folder} holds no weights")
    return state


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt")
        )
        hint = f"; {pickled[0]} is a pickle, which may run code: convert it" if pickled else ""
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a valid index: {error!r}") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names a file outside the folder: {outside[0]!r}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks shards named in {INDEX}: {', '.join(missing)}")
    return [folder / name for name in names]


def _check_names(model: Transformer, state: dict[str, Tensor], folder: Path) -> None:
    """Every parameter once, in the right shape, and nothing else."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
        state.pop("lm_head.weight", None)
    for name in [name for name in state if name.endswith("rotary_emb.inv_freq")]:
        del state[name]  # written by old transformers; recomputed from the config
    problems = [f"missing {name}" for name in wanted if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in wanted]
    problems += [
        f"{name} has shape {tuple(value.shape)}, not {wanted[name]}"
        for name, value in state.items()
        if name in wanted and tuple(value.shape) != wanted[name]
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (
            f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        )
        raise CheckpointError(f"weights in {folder} do not fit config.json: {shown}")
