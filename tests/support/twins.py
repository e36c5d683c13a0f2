"""The same random model twice: Hugging Face's, and ours loaded from its checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from caramba_fast.models import Transformer, load_model

VOCABULARY = 61


@cache
def twins(seed: int = 5) -> tuple[Any, Transformer]:
    """A small Llama as (Hugging Face's, ours), float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None, pad_token_id=None, max_position_embeddings=512,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, load_model(Path(folder))


def left_padded(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) ids padded at the front, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
