"""Decoupled attention in the native model: cached equals uncached, folders load, null keys count."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from caramba_fast.cache import ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.infer import Generator
from caramba_fast.models import CheckpointError, ModelConfig, Transformer, load_model


def make(null_kv=False, kv_heads=4, **changes):
    settings = dict(
        model_type="caramba_dba",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        decoupled={"sem_dim": 32, "geo_dim": 64, "v_dim": 128, "null_kv": null_kv},
    )
    model = Transformer(ModelConfig(**{**settings, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False)


@pytest.mark.parametrize("null_kv", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("page_size", [None, 32])
def test_cached_logits_equal_uncached_ones(null_kv, kv_heads, page_size):
    model = make(null_kv, kv_heads)
    ids = torch.randint(0, 64, (2, 50))
    configs = cache_configs("fp32/fp32/fp32")
    cache = ModelKVCache(model.cache_layout, 2, 64, page_size=page_size, **configs)
    parts = [model(ids[:, :7], cache), model(ids[:, 7:8], cache), model(ids[:, 8:], cache)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-4)


def test_null_keys_change_what_is_computed():
    with_null, without = make(null_kv=True), make()
    without.load_state_dict(
        {k: v for k, v in with_null.state_dict().items() if "null" not in k}, strict=True
    )
    ids = torch.randint(0, 64, (1, 10))
    assert not torch.allclose(with_null(ids), without(ids))


def test_semantic_keys_carry_no_position():
    """Without the geometric product, attention sees a set: swapping two old tokens changes nothing."""
    model = make(num_hidden_layers=1)
    model.model.layers[0].self_attn.q_geo_proj.weight.zero_()
    ids = torch.tensor([[5, 9, 11, 3]])
    swapped = torch.tensor([[9, 5, 11, 3]])
    torch.testing.assert_close(model(ids)[:, -1], model(swapped)[:, -1])


def test_the_cache_takes_what_the_widths_say():
    model = make()
    plain = cache_configs("q4:plain/q8:plain/q4:plain")
    cache = ModelKVCache(model.cache_layout, 1, 128, **plain)
    assert cache.bytes_per_token == 2 * (32 * 4.5 + 64 * 8.5 + 128 * 4.5) / 8
    assert cache.nbytes == 128 * cache.bytes_per_token


def test_a_folder_loads(tmp_path):
    model = make(null_kv=True)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_hf()))
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    ids = torch.randint(0, 64, (1, 12))
    assert torch.equal(loaded(ids), model(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(decoupled={"sem_dim": 30, "geo_dim": 64, "v_dim": 128}), "sem_dim"),
        (dict(decoupled={"sem_dim": 32, "geo_dim": 12, "v_dim": 128}), "RoPE needs it even"),
        (dict(decoupled=None), "caramba_dba"),
        (dict(sliding_window=16), "sliding_window is 16; decoupled attention has no window"),
        (dict(decoupled={"sem_dim": 32, "geo_dim": 64}), "v_dim"),
    ],
)
def test_widths_that_do_not_fit_are_named(change, message):
    raw = make().config.to_hf()
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf({**raw, **change})


def test_generation_with_mixed_kinds_runs_and_standard_models_refuse_them():
    model = make()
    settings = dict(cache_kind="q4/q8/q4", temperature=0.0, max_new_tokens=5, max_seq_len=64)
    assert Generator(model, **settings).generate([[1, 2, 3]]).shape == (1, 8)
    standard = make(model_type="llama", decoupled=None)
    with pytest.raises(ValueError, match="decoupled attention"):
        Generator(standard, **settings).generate([[1, 2, 3]])
