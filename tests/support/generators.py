"""A small model, three prompts, and its tokens without a cache, for the tests of `Generator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.infer import Generator
from caramba_fast.models import ModelConfig, Transformer

VOCABULARY = 61
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.3,
)
A, B, C = [3, 14, 15, 9, 26], [5, 35, 8], [9, 7, 9, 3, 2, 38, 4, 6]
MORE, REST = [27, 18, 28], [45, 9]
PAD = 60


def new_model(device: torch.device, **changes: Any) -> Transformer:
    torch.manual_seed(11)
    return Transformer(CONFIG.model_copy(update=changes)).to(device).eval()


def greedy(model: Transformer, **settings: Any) -> Generator:
    defaults = {"temperature": 0.0, "cache_kind": "fp32", "max_new_tokens": 6, "max_seq_len": 128}
    return Generator(model, **{**defaults, **settings})


@torch.no_grad()
def uncached(model: Transformer, ids: Sequence[int], steps: int = 6) -> list[int]:
    """Greedy tokens from full forward passes."""
    row = list(ids)
    for _ in range(steps):
        row.append(int(model(torch.tensor([row], device=model.device))[0, -1].argmax()))
    return row[len(ids) :]


@torch.no_grad()
def next_logits(model: Transformer, history: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(history)], device=model.device))[0, -1]


def new_tokens(out: Tensor, count: int) -> list[list[int]]:
    return out[:, out.shape[1] - count :].tolist()


def an_eos_for(model: Transformer, first: list[int], others: list[list[int]], steps: int) -> int:
    """A token that ``first`` reaches early and the others never."""
    taken = {token for row in others for token in uncached(model, row, steps)}
    path = uncached(model, first, steps)
    eos = next(token for token in path[1:] if token not in taken)
    assert path.index(eos) < steps - 2
    return eos


def front(rows: list[list[int]], fill: int = PAD) -> list[list[int]]:
    width = max(map(len, rows))
    return [[fill] * (width - len(row)) + row for row in rows]
