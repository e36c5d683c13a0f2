"""RoPE of accelerated models: one op where that gives the model's own numbers, and the model's own again afterwards."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import weakref

import pytest
import torch
from support.hf_matrix import tiny
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache

from caramba_fast.cache import Rope
from caramba_fast.hf import CarambaCache, CarambaStaticCache, accelerate, restore, rotary
from caramba_fast.ops.apply_rotary_emb import rotary_op
from caramba_fast.serve import Engine

IDS = torch.tensor([[5, 9, 17, 8, 21, 5], [3, 4, 4, 80, 11, 60]])


def rope_of(model):
    return getattr(sys.modules[type(model).__module__], rotary.NAME)


@pytest.fixture(autouse=True)
def nothing_is_fused(monkeypatch):
    """Models of other tests may still be there."""
    rotary.unfuse(rotary.fused())
    monkeypatch.setattr("caramba_fast.hf.integration._ACCELERATED", weakref.WeakSet())


@pytest.fixture
def within_appends(monkeypatch):
    """As on CUDA."""
    monkeypatch.setattr(Rope, "FASTER_ON", ("cpu", "cuda"))


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
        rotary.unfuse(rotary.fused())
        assert torch.equal(found, model(IDS).logits)
    restore(model)


def test_another_model_of_a_dtype_that_the_op_does_not_know(llama, calls):
    double = copy.deepcopy(llama).double()
    with torch.no_grad():
        expected = double(IDS).logits
        accelerate(llama, "q4")
        assert torch.equal(double(IDS).logits, expected)
    assert not calls
    restore(llama)


@torch.no_grad()
def test_tangents_of_forward_mode_go_through_the_model_s_own(llama, calls):
    llama.set_attn_implementation("eager")  # sdpa has no forward mode
    other = copy.deepcopy(llama)
    given = llama.get_input_embeddings()(IDS)
    along = torch.randn(given.shape, generator=torch.Generator().manual_seed(0))

    def tangent():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given, along)
            return forward_ad.unpack_dual(other(inputs_embeds=dual, use_cache=False).logits).tangent

    expected = tangent()
    accelerate(llama, "q4")
    assert torch.equal(tangent(), expected)
    assert not calls
    restore(llama)


def test_the_model_s_own_comes_back_with_its_last_model(llama):
    first = llama
    second, own = copy.deepcopy(first), rope_of(first)
    accelerate(first, "q4")
    accelerate(second, "q8")
    assert rope_of(first) is not own and rope_of(first).__wrapped__ is own
    restore(first)
    assert rope_of(first) is not own
    restore(second)
    assert rope_of(first) is own and not rotary.fused()


def test_a_function_that_somebody_else_puts_there_meanwhile_stays(llama, monkeypatch):
    """As libraries that extend contexts do."""
    module, own = sys.modules[type(llama).__module__], rope_of(llama)
    monkeypatch.setattr(module, rotary.NAME, own)  # restored at the end

    other = copy.deepcopy(llama)
    accelerate(llama, "q4")
    ours = rope_of(llama)

    @functools.wraps(ours)
    def patched(q, k, cos, sin, *args, **kwargs):
        return own(q * 1.5, k, cos, sin, *args, **kwargs)

    setattr(module, rotary.NAME, patched)
    accelerate(other, "q8")
    assert rope_of(llama) is patched
    restore(other)
    restore(llama)
    assert rope_of(llama) is patched and not rotary.fused()
    # Undone by its owner, who puts back what was there.
    setattr(module, rotary.NAME, ours)
    accelerate(llama, "q4")
    restore(llama)
    assert rope_of(llama) is own


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


def given(rows, heads):
    """Queries of so many heads and keys of two, of one token of each row, and its cos and sin."""
    q, k = (torch.randn(rows, count, 1, 16) for count in (heads, 2))
    return q, k, torch.randn(2, rows, 1, 16)


def steps(model, cache, count=4):
    """Logits of decode steps of two rows behind a prompt."""
    found = [model(IDS, past_key_values=cache).logits]
    for number in range(count):
        token = (IDS[:, :1] + number) % 90
        found.append(model(token, past_key_values=cache).logits)
    return found


@pytest.mark.parametrize("make", [CarambaCache, CarambaStaticCache])
@pytest.mark.parametrize("spec", ["q4", "q8:plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_turn_with_their_append(llama, make, spec, dtype, calls, within_appends):
    """From the second step on no op turns queries and keys of its own; logits are those of two calls."""
    model = llama.to(dtype)
    room = {} if make is CarambaCache else {"max_cache_len": 32}
    accelerate(model, spec)
    with torch.no_grad():
        steps(model, make(model, spec, **room), count=1)
        calls.clear()
        found = steps(model, make(model, spec, **room))
        assert len(calls) <= model.config.num_hidden_layers + 1  # those of the prompt
        rotary.unfuse(rotary.fused())
        wanted = steps(model, make(model, spec, **room))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    restore(model)


def test_engine_steps_over_transformers_turn_with_their_append(llama, within_appends, monkeypatch):
    """Sequences side by side: keys are turned on their way to the pages; probabilities are those of two calls."""
    llama.config.eos_token_id = llama.generation_config.eos_token_id = 96
    accelerate(llama, "q4")
    shapes, call = [], rotary_op.call
    monkeypatch.setattr(
        rotary_op, "call", lambda *given: shapes.append(given[0].shape) or call(*given)
    )

    def served():
        engine = Engine(llama, cache_kind="q4", max_seq_len=64)
        outputs = engine.generate_batch(IDS.tolist(), max_new_tokens=12, logprobs=1, temperature=0)
        return [(output.generated_tokens, output.logprobs) for output in outputs]

    found = served()
    asked = len(shapes)
    assert asked < 12 * llama.config.num_hidden_layers
    rotary.unfuse(rotary.fused())
    assert found == served()
    assert len(shapes) == asked
    restore(llama)


def test_another_cache_gets_values(llama, within_appends):
    """A stock cache after ours: it takes what an append was to turn, and gets the model's own numbers."""
    accelerate(llama, "q4")
    with torch.no_grad():
        steps(llama, CarambaCache(llama, "q4"))
        module = rope_of(llama)
        q, k, angles = given(2, 4)
        lazy = module(q, k, *angles)
        assert all(type(x) is rotary.RotatedStates for x in lazy)
        assert all(map(torch.equal, lazy, module.__wrapped__(q, k, *angles)))
        assert not any(type(x) is rotary.RotatedStates for x in module(q, k, *angles))
        steps(llama, CarambaCache(llama, "q4"))
        found = steps(llama, DynamicCache(config=llama.config))
        rotary.unfuse(rotary.fused())
        wanted = steps(llama, DynamicCache(config=llama.config))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    restore(llama)


def test_a_failed_append_leaves_values(llama, within_appends):
    """Keys that a cache refuses can still be asked for."""
    accelerate(llama, "q4")
    with torch.no_grad():
        cache = CarambaCache(llama, "q4")
        steps(llama, cache)
        q, k, angles = given(3, 4)
        lazy_q, lazy_k = rope_of(llama)(q, k, *angles)
        with pytest.raises(ValueError, match="2 rows, and 3 came"):
            cache.update(lazy_k, k, 0)
        wanted = rope_of(llama).__wrapped__(q, k, *angles)
        assert all(map(torch.equal, (lazy_q, lazy_k), wanted))
    restore(llama)


def test_a_recorded_pass_gets_tensors_of_ops(llama, within_appends):
    """What `make_fx` and `torch.jit.trace` see has to come from ops, or it would be a constant."""
    accelerate(llama, "q4")
    with torch.no_grad():
        steps(llama, CarambaCache(llama, "q4"))
        module = rope_of(llama)
        q, k, angles = given(2, 4)
        assert type(module(q, k, *angles)[0]) is rotary.RotatedStates
        graph = make_fx(lambda q, k: module(q, k, *angles))(q, k)
        q, k = q + 1, k + 1
        assert all(map(torch.equal, graph(q, k), module.__wrapped__(q, k, *angles)))
    restore(llama)


def test_queries_are_not_taken_for_keys(llama, within_appends):
    """Whatever a model hands to its cache is stored as it is."""
    accelerate(llama, "q4")
    with torch.no_grad():
        steps(llama, CarambaCache(llama, "q4"))
        q, k, angles = given(2, 2)
        lazy_q, _ = rope_of(llama)(q, k, *angles)
        stored, rope = rotary.to_append(lazy_q)
        assert rope is None
        assert torch.equal(stored, rope_of(llama).__wrapped__(q, k, *angles)[0])
    restore(llama)
