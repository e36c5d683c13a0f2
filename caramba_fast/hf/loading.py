"""Loads checkpoints through transformers: local files, safetensors only, without running code from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caramba_fast.hf.adapter import HuggingFaceModel
from caramba_fast.hf.compat import BEFORE_5
from caramba_fast.hf.gguf_tokenizer import gguf_tokenizer
from caramba_fast.models.config import CheckpointError
from caramba_fast.models.gguf import SUFFIX as GGUF
from caramba_fast.models.gguf import GgufFile

#: Download nothing, run no code from the folder.
_SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_pretrained(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> HuggingFaceModel:
    """The causal language model in ``path``, in eval mode.

    Args:
        path: a folder as written by ``save_pretrained``, with safetensors; or a GGUF file.
        dtype: dtype of the weights; None for the checkpoint's.

    Raises:
        CheckpointError: a damaged folder, pickled or missing weights, or an architecture not in transformers itself.
        TypeError: our caches cannot serve the model.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - it is slow to import

    folder = Path(path)
    if folder.suffix == GGUF:
        return _from_gguf(folder, device, dtype)
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
    """The tokenizer in ``path``, by `AutoTokenizer`; raises CheckpointError if there is none or it is damaged."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    if Path(path).suffix == GGUF:
        return gguf_tokenizer(Path(path))
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


def _rope_before_5(rope: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, of the model or by layer type, as transformers 4 has them in a config."""
    far, near = rope.get("full_attention", rope), rope.get("sliding_attention")
    scaling = {name: value for name, value in far.items() if name != "rope_theta"}
    scaled = scaling if scaling["rope_type"] != "default" else None
    found = {"rope_theta": far["rope_theta"], "rope_scaling": scaled}
    return found if near is None else {**found, "rope_local_base_freq": near["rope_theta"]}


def _from_gguf(
    path: Path, device: torch.device | str, dtype: torch.dtype | None
) -> HuggingFaceModel:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    file = GgufFile(path)
    given = {name: value for name, value in file.config.items() if value is not None}
    if BEFORE_5:
        given |= _rope_before_5(given.pop("rope_parameters"))
    wanted = dtype or file.dtype
    state = file.state(wanted)
    try:
        config = AutoConfig.for_model(**given)
        with torch.device("meta"):
            kind: Any = type(AutoModelForCausalLM.from_config(config))
        loaded = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=wanted,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except Exception as error:  # as above
        raise CheckpointError(f"{path} cannot be loaded by transformers: {error}") from error
    model, report = loaded
    kinds = ("missing", "unexpected", "mismatched")
    wrong = {what: sorted(report.get(f"{what}_keys") or ()) for what in kinds}
    if any(wrong.values()):
        said = "; ".join(
            f"{what} {', '.join(map(str, names[:8]))}" for what, names in wrong.items() if names
        )
        raise CheckpointError(f"{path.name} does not fit its architecture: {said}")
    return HuggingFaceModel(model.to(device).requires_grad_(False).eval())
