"""Caches and accelerated models that go through pickle, copies included."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_matrix import tiny

from caramba_fast import Generator
from caramba_fast.hf import CarambaCache, CarambaStaticCache, HuggingFaceModel, accelerate, restore

IDS = torch.arange(3, 20)[None]
LOADS = """
import pickle, sys, torch
model = pickle.load(open(sys.argv[1], "rb"))
out = model.generate(torch.arange(3, 20)[None], max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
print(type(out.past_key_values).__name__, out.past_key_values.dequantizations, out.sequences[0].tolist())
"""


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q4", "q8", "fp32"])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_cache_after_steps(kind: str, fixed: bool) -> None:
    model = accelerate(tiny("llama"), kind)
    cache: Any = (
        CarambaStaticCache(model, kind, max_cache_len=40) if fixed else CarambaCache(model, kind)
    )
    for ids in (IDS, IDS[:, :1], IDS[:, :1]):
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    copies = [pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)]
    expected = model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True).logits
    for other in copies:
        found = model(input_ids=IDS[:, :1], past_key_values=other, use_cache=True).logits
        assert torch.equal(found, expected)
        assert int(other.get_seq_length()) == int(cache.get_seq_length()) == 20


def test_the_cache_of_a_generator() -> None:
    generator = Generator(
        tiny("llama"), cache_kind="q4", max_seq_len=64, max_new_tokens=4, ignore_eos=True
    )
    generator.generate(IDS)
    cache = generator.cache
    assert cache is not None
    other = pickle.loads(pickle.dumps(cache))
    assert other.row_lengths == cache.row_lengths
    assert torch.equal(other[0].get()[0], cache[0].get()[0])


def test_an_accelerated_model_in_another_process(tmp_path: Path) -> None:
    model = accelerate(tiny("llama"), "q8")
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)[0].tolist()
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(model))
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"CarambaCache 0 {expected}"


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_what_was_found_of_a_model_is_not_shared_with_its_copy(how: Any) -> None:
    model = HuggingFaceModel(tiny("llama"))
    assert model.why_dense is None
    other = how(model)
    assert other._capabilities.model is other.model is not model.model
    assert other.why_dense is None and other.cache_layout == model.cache_layout


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_caches_of_its_own(how: Any) -> None:
    model = accelerate(tiny("llama"), "q8")
    other = how(model)
    restore(model)
    out = other.generate(IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, CarambaCache)
    accelerate(other, "q4")
    out = other.generate(IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert out.past_key_values.common.settings.k.kind.value.startswith("q4")
    assert restore(other) is not None and restore(model) is None
