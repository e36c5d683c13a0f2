"""Small models with and without speculation."""

from __future__ import annotations

from typing import Any

import torch
from support.engines import steady

from caramba_fast.infer import Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.models import ModelConfig, Transformer

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.3,
)


def model_of(seed: int, device: torch.device, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    return steady(Transformer(CONFIG.model_copy(update=changes)).to(device).eval())


SETTINGS: dict[str, Any] = {
    "temperature": 0.0, "cache_kind": "fp32", "max_new_tokens": 17, "max_seq_len": 128,
}  # fmt: skip


def speculative(
    target: Transformer, draft: Transformer | None, **settings: Any
) -> SpeculativeGenerator:
    return SpeculativeGenerator(target, draft, SpeculativeConfig(**{**SETTINGS, **settings}))


def plain(target: Transformer, **settings: Any) -> Generator:
    return Generator(target, **{**SETTINGS, **settings})
