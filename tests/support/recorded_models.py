"""Small models whose decode steps are recorded or compiled, and generators for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba_fast.infer import Generator
from caramba_fast.models import ModelConfig, Transformer

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=1024,
)  # fmt: skip
MODELS: dict[str, Any] = {
    "gqa": dict(head_dim=32),
    "tied": dict(head_dim=32, tie_word_embeddings=True),
    "window": dict(model_type="mistral", head_dim=16, sliding_window=6),
    "decoupled": dict(
        model_type="caramba_dba", head_dim=16,
        decoupled={"sem_dim": 32, "geo_dim": 64, "v_dim": 64, "null_kv": True},
    ),
}  # fmt: skip


def new_model(name: str = "gqa", kind: type[Transformer] = Transformer) -> Transformer:
    torch.manual_seed(5)
    return kind(ModelConfig(**SIZES, **MODELS[name])).eval()


def prompt(tokens: int, rows: int = 1) -> Tensor:
    return torch.randint(0, 61, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def generator(model: Transformer, **settings: Any) -> Generator:
    defaults = {"temperature": 0.0, "max_new_tokens": 70, "max_seq_len": 600, "ignore_eos": True}
    return Generator(model, **{**defaults, **settings})
