"""RoPE of accelerated models: one op where that gives the model's own numbers, and the model's own again afterwards."""

from __future__ import annotations

import copy
import pickle
import sys
import weakref

import pytest
import torch
from support.hf_matrix import tiny

from caramba_fast.hf import accelerate, restore, rotary
from caramba_fast.ops.apply_rotary_emb import rotary_op

IDS = torch.tensor([[5, 9, 17, 8, 21, 5], [3, 4, 4, 80, 11, 60]])


def rope_of(model):
    return getattr(sys.modules[type(model).__module__], rotary.NAME)


@pytest.fixture(autouse=True)
def nothing_is_fused(monkeypatch):
    """Models of other tests may still be there."""
    rotary.unfuse(list(rotary._own))
    monkeypatch.setattr("caramba_fast.hf.integration._ACCELERATED", weakref.WeakSet())


@pytest.fixture
def calls(monkeypatch):
    """How often the op was called."""
    found, call = [], rotary_op.call
    monkeypatch.setattr(rotary_op, "call", lambda *given: found.append(1) or call(*given))
    return found


@pytest.fixture
def llama():
    model = tiny("llama")
    if rotary.is_held(model, rope_of(model)):
        pytest.skip("layers hold the function in this transformers")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_accelerated_model_gives_the_same_numbers_with_fewer_ops(llama, dtype, calls):
    model = llama.to(dtype)
    with torch.no_grad():
        accelerate(model, "q4")
        found = model(IDS).logits
        assert len(calls) == model.config.num_hidden_layers
        rotary.unfuse(list(rotary._own))
        assert torch.equal(found, model(IDS).logits)
    restore(model)


def test_the_model_s_own_comes_back_with_its_last_model(llama):
    first = llama
    second, own = copy.deepcopy(first), rope_of(first)
    accelerate(first, "q4")
    accelerate(second, "q8")
    assert rope_of(first) is not own and rope_of(first).__wrapped__ is own
    restore(first)
    assert rope_of(first) is not own
    restore(second)
    assert rope_of(first) is own and not rotary._own


def test_a_function_that_layers_hold_stays_and_models_can_be_pickled():
    """As with transformers 5.0, where every attention has its rope as an attribute."""
    model, other = tiny("llama"), tiny("llama")
    own = rope_of(model)
    for part in (*model.model.layers, *other.model.layers):
        part.self_attn.rotary_fn = own
    accelerate(model, "q4")
    assert rope_of(model) is own
    for given in (model, other):
        assert pickle.loads(pickle.dumps(given)).model.layers[0].self_attn.rotary_fn is own
    restore(model)


def test_a_function_in_the_dictionary_of_kernels_stays():
    """As the package kernels keeps it; and a model that holds it is left alone after others were fused."""
    other, model = tiny("llama"), tiny("llama")
    held = rotary.is_held(other, rope_of(other))
    for part in model.model.layers:
        vars(part.self_attn)["_kernel_funcs"] = {"rotary_pos_emb": rope_of(model)}
    assert rotary.fuse(model) == []
    assert (rotary.fuse(other) != []) is not held
    assert rotary.fuse(model) == []


def test_gradients_and_unusual_calls_take_the_model_s_own(calls):
    model = tiny("llama")
    accelerate(model, "q4")
    model(IDS, labels=IDS).loss.backward()
    q, cos = torch.randn(2, 4, 3, 16), torch.randn(2, 3, 16)
    with torch.no_grad():
        rope = rope_of(model)
        rope(q.transpose(1, 2), q.transpose(1, 2), cos, cos, unsqueeze_dim=2)
        rope(q, q, cos.double(), cos.double())
        rope(q[:, :, :1], q[:, :, :1], cos[:, :1, None], cos[:, :1, None], unsqueeze_dim=0)
    assert not calls
    restore(model)


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_neox"])
def test_a_rope_of_another_kind_stays(family):
    model = tiny(family)
    own = getattr(sys.modules[type(model).__module__], rotary.NAME, None)
    accelerate(model, "q4")
    with torch.no_grad():
        model(IDS)
    if own is None or not rotary.is_ours(own):
        assert getattr(sys.modules[type(model).__module__], rotary.NAME, None) is own
    restore(model)


def test_functions_that_only_look_like_it_are_told_apart():
    def same(q, k, cos, sin):
        half = q.shape[-1] // 2
        turn = [torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k)]
        return tuple(x * cos[:, None] + t * sin[:, None] for x, t in zip((q, k), turn, strict=True))

    assert rotary.is_ours(same)
    assert not rotary.is_ours(lambda q, k, cos, sin: same(q, k, sin, cos))
    assert not rotary.is_ours(lambda q, k, cos, sin: same(q.float(), k.float(), cos, sin))
    assert not rotary.is_ours(lambda x, cos, sin: x)
