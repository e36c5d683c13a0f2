"""Models for decode steps: from checkpoints, or of known shapes with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.generation import hf_decode
from caramba_fast.bench.real.models import model_folder
from caramba_fast.models import ModelConfig, Transformer, load_model, merge_projections
from caramba_fast.models.checkpoint import assembled

#: Configurations of models, without weights.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
POSITIONS = 2**18


def models_of(
    name: str, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> tuple[Any, Transformer]:
    """The model for transformers, and the native one for our `Generator`; they share the weights that are not merged.

    ``name`` is that of a shape or a checkpoint. ``layers`` limits the layers of a shape; ValueError for a checkpoint.
    """
    if layers is not None and name not in SHAPES:
        raise ValueError(
            f"{name!r} is a checkpoint; only shapes ({', '.join(SHAPES)}) can have fewer layers"
        )
    auto = hf_decode.transformers.AutoModelForCausalLM
    if name not in SHAPES:
        folder = model_folder(name)
        native = load_model(folder, dtype=dtype, device=device)
        return auto.from_pretrained(folder, dtype=dtype).to(device), merge_projections(native)
    sizes = {**SHAPES[name], **({} if layers is None else {"num_hidden_layers": layers})}
    config = hf_decode.transformers.LlamaConfig(**sizes, max_position_embeddings=POSITIONS)
    with device:
        model = auto.from_config(config, dtype=dtype)
    own = ModelConfig.from_hf(config.to_dict())
    return model, merge_projections(assembled(own, model.state_dict(), Path(name), dtype, device))
