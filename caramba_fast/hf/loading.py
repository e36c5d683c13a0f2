"""Checkpoint folders through transformers: local, safetensors only, no code of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caramba_fast.hf.adapter import HuggingFaceModel
from caramba_fast.models.config import CheckpointError
from caramba_fast.models.gguf import SUFFIX as GGUF
from caramba_fast.models.gguf import GgufFile

#: Nothing is downloaded, nothing in the folder is run.
_SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_pretrained(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> HuggingFaceModel:
    """The causal language model in ``path``, in eval mode.

    Args:
        path: a folder as ``save_pretrained`` writes it, with safetensors; or a GGUF file.
        dtype: None for what the checkpoint stores.

    Raises:
        CheckpointError: a damaged folder, pickled weights, missing weights, or an architecture that
            transformers does not have itself.
        TypeError: a model our caches cannot serve.
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
    """The tokenizer in ``path`` as `AutoTokenizer` gives it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    if Path(path).suffix == GGUF:
        return _gguf_tokenizer(Path(path))
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


def _from_gguf(
    path: Path, device: torch.device | str, dtype: torch.dtype | None
) -> HuggingFaceModel:
    """A model of transformers with the weights of a GGUF file."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    file = GgufFile(path)
    given = {name: value for name, value in file.config.items() if value is not None}
    config, wanted = AutoConfig.for_model(**given), dtype or file.dtype
    with torch.device("meta"):
        kind: Any = type(AutoModelForCausalLM.from_config(config))
    loaded = kind.from_pretrained(
        None,
        config=config,
        state_dict=file.state(wanted),
        dtype=wanted,
        output_loading_info=True,
    )
    model, report = loaded
    wrong = {what: sorted(report.get(f"{what}_keys") or ()) for what in ("missing", "unexpected")}
    if any(wrong.values()):
        said = "; ".join(
            f"{what} {', '.join(map(str, names[:8]))}" for what, names in wrong.items() if names
        )
        raise CheckpointError(f"{path.name} does not fit its architecture: {said}")
    return HuggingFaceModel(model.to(device).requires_grad_(False).eval())


#: Of these a whole word that is a token is one, and a text begins with BOS unless the file says otherwise.
_OF_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken")
#: Byte-level vocabularies whose words are cut as GPT-2's are, but each digit alone.
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "codeshell", "command-r")


def _gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file.

    Raises:
        CheckpointError: there is none, or words are cut in a way that is not known (``tokenizer.ggml.pre``).
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    kind, cut, begins = GgufFile(path).tokenizer
    try:
        found: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **_SAFE)
        if kind != "gpt2" or cut == "gpt-2":
            return found
        from tokenizers import pre_tokenizers  # noqa: PLC0415
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (  # noqa: PLC0415
            GGUF_PRE_TOKENIZER_SPLITS,
        )
    except Exception as error:  # as above
        raise CheckpointError(
            f"{path} holds no tokenizer transformers can load: {error}"
        ) from error
    if cut in _DIGITS_ALONE:
        found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif cut not in GGUF_PRE_TOKENIZER_SPLITS:
        known = sorted({"gpt-2", *_DIGITS_ALONE, *GGUF_PRE_TOKENIZER_SPLITS})
        raise CheckpointError(
            f"{path.name}: tokenizer.ggml.pre is {cut!r}, which says how text is cut into words; known are "
            f"{', '.join(known)}"
        )
    if cut in _OF_LLAMA_3:  # as llama.cpp reads such files
        found.backend_tokenizer.model.ignore_merges = True
        if begins is None:
            found.add_bos_token = True
    return found
