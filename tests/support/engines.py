"""A model with reproducible rounding, and the tokens of a request alone, for the tests of the serving engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import Transformer
from caramba_fast.models.config import ModelConfig
from caramba_fast.serve import Engine

VOCABULARY = 61


class SteadyLinear(nn.Linear):
    """Products in float64, rounded: independent of the rest of the batch, unlike float32."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.double()
        return nn.functional.linear(x.double(), self.weight.double(), bias).float()


def steady(model: Transformer) -> Transformer:
    """Makes a model's products independent of the batch, so that tokens can be compared exactly."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = SteadyLinear
    return model


@cache
def small_model(**changes: Any) -> Transformer:
    """A random model whose predictions depend on all earlier tokens."""
    torch.manual_seed(7)
    settings = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.3, eos_token_id=3,
    )  # fmt: skip
    config = ModelConfig(**{**settings, **changes})
    return steady(Transformer(config).eval().requires_grad_(False))


def engine(**options: Any) -> Engine:
    return Engine(small_model(), **{"cache_kind": "q4", "max_seq_len": 256, **options})


@cache
def alone(
    kind: str, prompt: tuple[int, ...], settings: tuple[tuple[str, Any], ...], model: Any = None
) -> list[int]:
    config = GenerateConfig(
        cache_kind=kind, cache_residual_len=0, prefill="stored", max_seq_len=512,
        return_dict=True, **dict(settings),
    )  # fmt: skip
    found: Any = Generator(model or small_model(), config).generate(torch.tensor([prompt]))
    return found.sequences[0, len(prompt) :].tolist()


def text(seed: int, length: int) -> list[int]:
    """Tokens with repetitions for prompt lookup; none is an end of text."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(4, VOCABULARY, (5, 4), generator=generator)
    picks = torch.randint(5, (length // 4 + 1,), generator=generator)
    return words[picks].flatten()[:length].tolist()
