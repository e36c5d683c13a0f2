"""merge_projections: one product for q, k and v, and one for gate and up, in state dicts as if there were several."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from caramba_fast import Generator
from caramba_fast.models import (
    ModelConfig,
    Transformer,
    load,
    load_model,
    merge_projections,
    split_projections,
)
from caramba_fast.models.identity import model_digest
from caramba_fast.models.merged import MergedLinear

IDS = torch.randint(0, 90, (2, 40), generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> Transformer:
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=90, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, **changes,
    )  # fmt: skip
    model = Transformer(config).eval()
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(x)
    return model


def count(model: Transformer) -> int:
    return sum(isinstance(module, MergedLinear) for module in model.modules())


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "mlp_bias": True}, {"qk_norm": True}])
def test_a_merged_model_computes_what_it_did_and_has_the_same_state(changes: dict) -> None:
    model = small(**changes)
    merged = merge_projections(copy.deepcopy(model))
    assert count(merged) == 4 and count(model) == 0
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS), model(IDS), atol=1e-5, rtol=1e-4)
    before, after = model.state_dict(), merged.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model_digest(merged) == model_digest(model)  # sessions and prefixes go on
    for again in (copy.deepcopy(merged), pickle.loads(pickle.dumps(merged)), merged):
        split = split_projections(again)
        assert count(split) == 0 and list(split.state_dict()) == list(before)
        assert torch.equal(split(IDS), model(IDS))


def test_state_dicts_go_in_from_either_layout() -> None:
    torch.manual_seed(5)
    other, merged = small(qkv_bias=True), merge_projections(small(qkv_bias=True))
    for x in other.parameters():
        torch.nn.init.normal_(x, std=0.1)
    merged.load_state_dict(other.state_dict())
    torch.testing.assert_close(merged(IDS), other(IDS), atol=1e-4, rtol=1e-4)
    other = small(qkv_bias=True)
    other.load_state_dict(merged.state_dict())
    torch.testing.assert_close(merged(IDS), other(IDS), atol=1e-4, rtol=1e-4)
    short = {
        name: x
        for name, x in merged.state_dict().items()
        if "layers.1.self_attn.k_proj" not in name
    }
    with pytest.raises(RuntimeError, match="self_attn"):
        merged.load_state_dict(short)


def test_merging_twice_and_training_change_nothing() -> None:
    merged = merge_projections(merge_projections(small()))
    assert count(merged) == 4
    merged(IDS).sum().backward()
    assert all(x.grad is not None for x in merged.parameters())
    frozen = small().requires_grad_(False)
    assert not any(
        x.requires_grad for x in split_projections(merge_projections(frozen)).parameters()
    )


def test_load_merges_and_load_model_does_not(tmp_path: Path) -> None:
    model = small()
    save_file(
        {n: x.contiguous() for n, x in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    config = model.config.model_dump(mode="json") | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    (tmp_path / "config.json").write_text(__import__("json").dumps(config))
    merged, plain = load(tmp_path), load_model(tmp_path)
    assert count(merged) == 4 and count(plain) == 0
    answers = [
        Generator(x, max_new_tokens=8, temperature=0.0, ignore_eos=True).generate(IDS[:1]).tolist()
        for x in (merged, plain)
    ]
    assert answers[0] == answers[1]


def test_quantized_weights_are_not_merged() -> None:
    class Quantized(torch.Tensor):
        pass

    model = small()
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = torch.nn.Parameter(
        projection.weight.detach().as_subclass(Quantized), requires_grad=False
    )
    with pytest.raises(TypeError, match="merge before quantizing"):
        merge_projections(model)


def test_weights_that_were_quantized_behind_it_keep_their_name() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    merged = merge_projections(small().bfloat16())
    torchao.quantize_(merged, torchao.Int8WeightOnlyConfig())
    names = list(merged.state_dict())
    assert "model.layers.0.self_attn.qkv_proj.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight" not in names
    with torch.no_grad():
        assert merged(IDS).isfinite().all()
    with pytest.raises(TypeError, match="not split"):
        split_projections(merged)
