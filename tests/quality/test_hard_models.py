"""Hard variants: the same function as the model they come from, and clearly harder on 4-bit caches."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from caramba_fast.models import (
    CheckpointError,
    ModelConfig,
    Transformer,
    demo_path,
    demo_tokenizer,
    held_out_text,
    load_demo,
    load_model,
)
from caramba_fast.models.config import DecoupledDims
from caramba_fast.models.demos import DELTA, HARD_NAMES, NAMES, save_demo, with_delta
from caramba_fast.quality import RecallFormat, compare_caches, draw_needles
from caramba_fast.quality.hard import hard_variants, scale_key_pairs, scale_value_channels

CHANGES = (
    lambda model: scale_key_pairs(model, 2, 64, count=3, seed=1),
    lambda model: scale_value_channels(model, 2, 64, count=3, seed=1),
)


def random_model(family: str) -> Transformer:
    """A small model with every parameter random, biases, norms and null keys included."""
    torch.manual_seed(0)
    decoupled = DecoupledDims(sem_dim=32, geo_dim=32, v_dim=64, null_kv=True)
    config = ModelConfig(
        model_type=family,
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        qkv_bias=family == "qwen2",
        o_bias=family == "llama",
        qk_norm=family == "qwen3",
        decoupled=decoupled if family == "caramba_dba" else None,
    )
    model = Transformer(config).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def held_out():
    ids = demo_tokenizer().encode(held_out_text()).ids
    return torch.tensor(ids[: 8 * 1024]).view(8, 1024)


@pytest.fixture(scope="module")
def biased():
    return load_demo("gqa_bias")


@pytest.mark.parametrize("change", CHANGES, ids=["keys", "values"])
@pytest.mark.parametrize("name", [*NAMES, "gqa_bias", "llama", "qwen2", "qwen3", "caramba_dba"])
def test_the_function_is_preserved(name, change, held_out):
    model = load_demo(name) if name in (*NAMES, *HARD_NAMES) else random_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = held_out[:2, :200] % model.vocab_size
    changed = change(model)
    torch.testing.assert_close(changed(ids), model(ids), rtol=0, atol=1e-4)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} of the original changed"
    keys = changed.state_dict()
    assert any(not torch.equal(value, before[key]) for key, value in keys.items())
    assert changed.lm_head.weight is changed.model.embed_tokens.weight or name not in NAMES


def key_growth(model: Transformer, changed: Transformer) -> torch.Tensor:
    """Growth (layers, heads, D) of every key channel."""
    rows = [
        after.self_attn.k_proj.weight.norm(dim=1) / before.self_attn.k_proj.weight.norm(dim=1)
        for before, after in zip(model.model.layers, changed.model.layers, strict=True)
    ]
    return torch.stack(rows).unflatten(1, (model.config.num_key_value_heads, -1))


def test_both_dims_of_a_pair_grow_alike_in_every_head():
    model = load_demo()
    growth = key_growth(model, scale_key_pairs(model, 2, 64, count=3))
    first, second = growth.chunk(2, dim=-1)
    torch.testing.assert_close(first, second)
    grown = first > 1.5
    assert (grown.sum(-1) == 3).all() and (first[~grown] - 1).abs().max() < 1e-5
    assert first.max() < 64.01 and len(first[grown].unique()) > 20
    assert not torch.equal(grown[0, 0], grown[0, 1])


def test_the_seed_decides():
    model = load_demo()
    growth = [key_growth(model, scale_key_pairs(model, 8, 8, seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(growth[0], growth[1]) and not torch.equal(growth[0], growth[2])


@pytest.mark.parametrize("scale", [scale_key_pairs, scale_value_channels])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(low=0, high=2), "0 < low <= high"),
        (dict(low=4, high=2), "0 < low <= high"),
        (dict(low=2, high=math.inf), "0 < low <= high"),
        (dict(low=2, high=4, count=0), "1 or more"),
        (dict(low=2, high=4, count=99), "a head has"),
    ],
)
def test_settings_that_make_no_sense_raise(scale, args, message):
    with pytest.raises(ValueError, match=message):
        scale(random_model("llama"), **args)


def test_variants_by_name():
    scaled = {"outliers-8", "outliers-64", "value-outliers"}
    assert set(hard_variants("gqa")) == scaled | {"bias"}
    assert set(hard_variants("dba")) == scaled
    assert hard_variants("gqa")["bias"]().config.model_type == "qwen2"
    with pytest.raises(ValueError, match="known are gqa, dba"):
        hard_variants("gqa_bias")


@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name in NAMES for variant in hard_variants(name)]
)
def test_plain_4_bits_break_and_16_bits_do_not(name, variant, held_out):
    model, ids = hard_variants(name)[variant](), held_out[:2, :512]
    fp16, q4 = compare_caches(model, ids, ["fp16", "q4_0:plain"], baseline="fp32")
    assert abs(fp16.delta_nll) < 2e-3 and fp16.top1_agreement > 0.995
    assert q4.ppl_ratio > 1.05


def test_biases_are_large_exact_and_few(biased):
    for layer in biased.model.layers:
        bias = layer.self_attn.k_proj.bias.view(2, 2, 32)
        assert torch.equal(bias, bias.half().float())
        norms = bias.norm(dim=1)
        for low, high in ((0, 6), (10, 19), (26, 32)):
            band = norms[:, low:high]
            assert ((band > 19.9).sum(-1) == 1).all() and (band.sum(-1) < 200.1).all()
        assert ((norms > 0).sum(-1) == 3).all()


def test_the_biased_model_is_as_good_as_its_base(biased, held_out):
    def perplexity(model):
        logits = model(held_out[::2, :-1])
        return float(F.cross_entropy(logits.flatten(0, 1), held_out[::2, 1:].flatten()).exp())

    assert perplexity(biased) < 1.02 * perplexity(load_demo())


def test_the_biased_model_finds_what_it_read_1024_tokens_ago(biased):
    tokenizer = demo_tokenizer("gqa_bias")
    text = np.asarray(tokenizer.encode(held_out_text()).ids)
    needles = draw_needles(RecallFormat.of(tokenizer), text, 1024, 24)
    answers = [
        biased(torch.from_numpy(prompt)[None], logits_index=torch.tensor([len(prompt) - 1]))
        for prompt, _ in needles
    ]
    found = sum(
        int(logits.argmax()) == value for logits, (_, value) in zip(answers, needles, strict=True)
    )
    assert found >= 22


def test_the_delta_holds_queries_and_keys_alone(biased):
    base = load_demo().state_dict()
    for name, value in biased.state_dict().items():
        changed = name not in base or not torch.equal(value, base[name])
        assert not changed or any(part in name for part in ("q_proj", "k_proj", "v_proj.bias"))


def test_a_biased_model_is_saved_as_a_qwen2_checkpoint(tmp_path, biased, held_out):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_demo("gqa_bias", tmp_path / "full")
    for name, value in load_model(tmp_path / "full").state_dict().items():
        assert torch.equal(value, biased.state_dict()[name]), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32)
    assert type(theirs).__name__ == "Qwen2ForCausalLM"
    ids = held_out[:1, :300]
    with torch.no_grad():
        torch.testing.assert_close(biased(ids), theirs(ids).logits, rtol=1e-3, atol=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "full")
    assert tokenizer.encode("import os\n") == demo_tokenizer("gqa_bias").encode("import os\n").ids


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_demo_is_the_demo(tmp_path, name):
    save_demo(name, tmp_path)
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / file).read_bytes() == (demo_path(name) / file).read_bytes()
    shipped = load_demo(name).state_dict()
    for key, value in load_model(tmp_path).state_dict().items():
        assert torch.equal(value, shipped[key]), key


def test_a_hard_variant_has_no_checkpoint_folder():
    with pytest.raises(ValueError, match=r"delta to 'gqa'.*save_demo"):
        demo_path("gqa_bias")
    with pytest.raises(ValueError, match="known are gqa, dba, gqa/bias"):
        load_demo("nothing")


def test_a_damaged_delta_says_so(tmp_path):
    package = demo_path("gqa").parent / "gqa_bias"
    (tmp_path / "config.json").write_bytes((package / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=DELTA):
        with_delta(load_demo(), tmp_path)
    content = (package / DELTA).read_bytes()
    (tmp_path / DELTA).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        with_delta(load_demo(), tmp_path)
    (tmp_path / DELTA).write_bytes(content)
    with pytest.raises(CheckpointError, match="does not fit"):
        with_delta(load_demo("dba"), tmp_path)


def test_the_delta_names_its_base_and_its_card_the_figures():
    folder = demo_path("gqa").parent / "gqa_bias"
    with safe_open(folder / DELTA, "pt") as file:
        assert file.metadata()["base"] == "gqa"
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    for part in ("train_biased.py", "| step |", "perplexity", "recall at 1024"):
        assert part in card
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen2" and config["vocab_size"] == 2048
