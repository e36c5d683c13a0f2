"""Checkpoint folders through transformers: local, safetensors only, no code of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caramba_fast.hf.adapter import HuggingFaceModel
from caramba_fast.models.config import CheckpointError

#: Nothing is downloaded, nothing in the folder is run.
_SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_pretrained(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> HuggingFaceModel:
    """The causal language model in ``path``, in eval mode.

    Args:
        path: a folder as ``save_pretrained`` writes it, with safetensors.
        dtype: None for what the checkpoint stores.

    Raises:
        CheckpointError: a damaged folder, pickled weights, missing weights, or an architecture that
            transformers does not have itself.
        TypeError: a model our caches cannot serve.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - it is slow to import

    folder = Path(path)
    _check_files(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype or "auto",
            use_safetensors=True,
            output_loading_info=True,
            **_SAFE,
        )
    except Exception as error:  # transformers and safetensors raise nearly every type there is
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {error}") from error
    model, report = loaded
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        shown = ", ".join(missing[:8]) + (
            f", and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise CheckpointError(f"weights in {folder} do not fit config.json: missing {shown}")
    return HuggingFaceModel(model.to(device).requires_grad_(False).eval())


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in ``path`` as `AutoTokenizer` gives it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        return AutoTokenizer.from_pretrained(str(path), **_SAFE)
    except Exception as error:  # as above
        raise CheckpointError(
            f"{path} holds no tokenizer transformers can load: {error}"
        ) from error


def _check_files(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(p.name for s in ("*.bin", "*.pt", "*.pth") for p in folder.glob(s))
    hint = f"; {pickled[0]} is a pickle, which may run code: convert it" if pickled else ""
    raise CheckpointError(f"{folder} has no .safetensors weights{hint}")
