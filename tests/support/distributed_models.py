"""Models and tokens that are the same on every rank, and a count of the bytes passed to collectives."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.models.config import DecoupledDims
from caramba_fast.models.demos import demo_tokenizer, held_out_text

SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
)  # fmt: skip
WIDTHS = DecoupledDims(sem_dim=32, geo_dim=64, v_dim=64, null_kv=True)
#: Each semantic head fills a block, so that no block holds values of several heads.
WIDE = DecoupledDims(sem_dim=128, geo_dim=128, v_dim=128, null_kv=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": dict(model_type="qwen2", qkv_bias=True),
    "window": dict(model_type="qwen2", qkv_bias=True, sliding_window=150),
    "dba": dict(model_type="caramba_dba", decoupled=WIDTHS),
    "dba_wide": dict(model_type="caramba_dba", decoupled=WIDE),
    "biases": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": dict(model_type="qwen3", qk_norm=True, num_attention_heads=8, num_key_value_heads=4),
    "deep": dict(num_hidden_layers=3, tie_word_embeddings=True),
    "three": dict(num_attention_heads=6, num_key_value_heads=3),
}


@functools.cache
def model(name: str) -> Transformer:
    """A small model with random weights; key biases, if any, are large."""
    generator = torch.Generator().manual_seed(1)
    made = Transformer(ModelConfig(**{**SIZES, **VARIANTS[name]})).eval().requires_grad_(False)
    for title, parameter in made.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.copy_(noise + (1.0 if "norm" in title else 0.0))
        if title.endswith("k_proj.bias"):
            parameter[[3, 19, 40]] += 4.0
    return made


def ids(rows: int, tokens: int, seed: int = 5) -> Tensor:
    return torch.randint(97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def demo_ids(count: int, start: int = 0) -> list[int]:
    return demo_tokenizer().encode(held_out_text()[:40_000]).ids[start : start + count]


class _Counting(TorchDispatchMode):
    """Records the bytes of the input tensors of all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            taken = args[1] if "allgather" in name else args[0]
            parts = taken if isinstance(taken, list) else [taken]
            self.found.append(sum(x.nbytes for x in parts))
        return func(*args, **(kwargs or {}))


@contextmanager
def bytes_given() -> Iterator[list[int]]:
    """The bytes this rank passes to each collective in the block."""
    mode = _Counting()
    with mode:
        yield mode.found
