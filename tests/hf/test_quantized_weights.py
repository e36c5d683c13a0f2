"""Models whose weights are quantized by others: the caches know nothing of weights, so text must stay what it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_matrix import tiny
from transformers import AutoModelForCausalLM

from caramba_fast import Generator
from caramba_fast.hf import CarambaCache, accelerate, restore
from caramba_fast.models import load, load_model

IDS = torch.tensor([[5, 9, 17, 8, 21, 5, 40, 3], [3, 4, 4, 80, 11, 60, 2, 9]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def torchao(config: str, **options: Any) -> Callable[[Any, Path], Any]:
    def quantized(model: Any, _: Path) -> Any:
        library = pytest.importorskip("torchao.quantization")
        if "granularity" in options:
            options["granularity"] = library.PerGroup(32)
        library.quantize_(model, getattr(library, config)(**options))
        return model

    return quantized


def bitsandbytes(**options: Any) -> Callable[[Any, Path], Any]:
    def quantized(model: Any, folder: Path) -> Any:
        pytest.importorskip("bitsandbytes")
        transformers = pytest.importorskip("transformers")
        model.save_pretrained(folder)
        config = transformers.BitsAndBytesConfig(**options)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32
        )

    return quantized


WAYS = {
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=32),
    "torchao int8 activations": torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes int8": bitsandbytes(load_in_8bit=True),
    "bitsandbytes nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}


@pytest.fixture(params=WAYS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return WAYS[request.param](tiny("llama", intermediate_size=128), tmp_path).eval()


def test_text_is_that_of_the_stock_cache(model: Any) -> None:
    expected = model.generate(IDS, **GREEDY)
    accelerate(model, "fp32")
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    restore(model)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)


def test_a_packed_cache_is_read_packed(model: Any) -> None:
    accelerate(model, "q4")
    out = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, CarambaCache)
    assert out.past_key_values.dequantizations == 0
    restore(model)


@pytest.mark.parametrize("way", [name for name in WAYS if name.startswith("torchao")])
def test_a_native_model_takes_the_same_weights(way: str, tmp_path: Path) -> None:
    tiny("llama", intermediate_size=128).save_pretrained(tmp_path)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path).eval(), load_model(tmp_path)]
    theirs, own = (WAYS[way](model, tmp_path) for model in models)
    expected = theirs.generate(IDS, **GREEDY)
    generator = Generator(own, cache_kind="fp32", max_seq_len=64, temperature=0, ignore_eos=True)
    assert torch.equal(generator.generate(IDS, max_new_tokens=12), expected)


def test_a_generator_takes_the_model(model: Any) -> None:
    expected = model.generate(IDS, **GREEDY)
    generator = Generator(model, cache_kind="fp32", max_seq_len=64, temperature=0, ignore_eos=True)
    found = generator.generate(IDS, max_new_tokens=12)
    assert torch.equal(torch.as_tensor(found), expected)


def test_weights_that_a_checkpoint_says_to_quantize_are_not_used_as_they_are(
    tmp_path: Path,
) -> None:
    """BitNet's trained weights are floats, rounded to three values when they are loaded."""
    tiny("llama", intermediate_size=128).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    said = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(IDS).logits
    torch.testing.assert_close(load(tmp_path).forward(IDS), expected)
