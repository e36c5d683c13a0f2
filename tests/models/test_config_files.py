"""What a configuration says is what a file of it says, or the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from caramba_fast.models.config import ModelConfig
from caramba_fast.models.demos import DELTA, with_delta
from caramba_fast.models.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", {}), ("llama", {"qkv_bias": True, "o_bias": True}), ("mistral", {"sliding_window": 16}),
        ("qwen2", {"qkv_bias": True, "sliding_window": 16}), ("qwen3", {"qk_norm": True}),
    ],
)  # fmt: skip
def test_what_a_file_can_hold_is_read_back(family: str, given: dict[str, Any]) -> None:
    config = ModelConfig(model_type=family, **SIZES, **given)
    read = ModelConfig.from_hf(config.to_hf())
    assert {name: getattr(read, name) for name in given} == given


@pytest.mark.parametrize(
    ("family", "given", "named"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window=16"),
        ("llama", {"qk_norm": True}, "qk_norm=True"),
        ("llama", {"qkv_bias": True}, "o_bias=False"),
        ("mistral", {"qkv_bias": True}, "o_bias=False"),
    ],
)
def test_what_it_cannot_hold_is_named(family: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"config.json of '{family}' cannot hold {named}"):
        ModelConfig(model_type=family, **SIZES, **given).to_hf()


def test_a_delta_has_the_rope_of_its_own_file(tmp_path: Path) -> None:
    base = Transformer(ModelConfig(**SIZES)).eval()
    raw = base.config.to_hf()
    raw["rope_theta"] = raw["rope_parameters"]["rope_theta"] = 5e5
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / DELTA)
    made = with_delta(base, tmp_path)
    assert made.config.rope.rope_theta == 5e5
    assert torch.equal(made.rope.inv_freq, Transformer(made.config).rope.inv_freq)
    assert not torch.equal(made.rope.inv_freq, base.rope.inv_freq)
