"""How large a model's queries are: what is measured, of which models, and that the bytes of keys are divided by it."""

from __future__ import annotations

import gc
import math
import threading

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from caramba_fast.cache import LayerKVCache, LayerShape, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig, cache_configs
from caramba_fast.distributed.model import own_heads
from caramba_fast.hf import CarambaCache, accelerate, restore
from caramba_fast.hf.adapter import HuggingFaceModel
from caramba_fast.hf.capabilities import capabilities_of
from caramba_fast.hf.compat import CACHE
from caramba_fast.models import demo_path, load_demo
from caramba_fast.models.context import ContextModel
from caramba_fast.models.query_rms import TOKENS, SquareMeans, probing_ids
from caramba_fast.quality.hard import scale_key_pairs


def measured(model) -> list[dict[str, torch.Tensor]]:
    return [dict(shape.query_rms()) for shape in model.cache_layout]


def stored(model, spec: str = "q4") -> list[torch.Tensor | None]:
    cache = ModelKVCache(model.cache_layout, 1, 64, **cache_configs(spec))
    return [layer.streams[next(iter(layer.streams))].view.query_rms for layer in cache.layers]


@pytest.fixture(scope="module")
def gqa():
    return load_demo("gqa")


@pytest.fixture
def theirs():
    return AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()


def test_it_is_that_of_the_queries_of_64_tokens(gqa):
    """Against what the projections give: RoPE turns pairs of channels, whose sum of squares stays."""
    given = {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, __, out, index=index: given.update({index: out[0]})
        )
        for index, layer in enumerate(gqa.model.layers)
    ]
    ids = probing_ids(gqa.vocab_size, gqa.device)
    assert ids.shape == (1, TOKENS) and ids.unique().numel() == TOKENS
    with torch.no_grad():
        gqa(ids)
    for hook in hooks:
        hook.remove()
    heads, dim = gqa.config.num_key_value_heads, gqa.config.head_dim
    for index, found in enumerate(measured(gqa)):
        mean = given[index].unflatten(-1, (heads, -1, dim)).square().mean((0, 2))
        rms = found["k"]
        assert rms.shape == (heads, dim) and rms.dtype == torch.float32
        torch.testing.assert_close(
            rms.square().unflatten(1, (2, -1)).sum(1), mean.unflatten(1, (2, -1)).sum(1),
            rtol=1e-2, atol=1e-5,
        )  # fmt: skip


def test_decoupled_attention_has_those_of_both_keys():
    model = load_demo("dba")
    for found, shape in zip(measured(model), model.cache_layout, strict=True):
        assert {name: x.shape for name, x in found.items()} == {
            name: (shape.n_kv_heads, getattr(shape, f"{name}_dim") // shape.n_kv_heads)
            for name in ("k_sem", "k_geo")
        }
    layer = ModelKVCache(model.cache_layout, 1, 64, **cache_configs("q4/q4/q4"))[0]
    rms = {name: stream.view.query_rms for name, stream in layer.streams.items()}
    assert rms["k_sem"] is not None and rms["k_geo"] is not None and rms["v"] is None


def test_queries_that_are_smaller_where_keys_are_larger_count_less(gqa):
    """A hard variant with key pairs of eight times their size is measured anew, though it is a copy."""
    measured(gqa)
    hard = scale_key_pairs(gqa, 8, 8)
    for plain, other in zip(measured(gqa), measured(hard), strict=True):
        ratio = plain["k"] / other["k"]
        large = ratio > 4
        assert large.any() and large.float().mean() < 0.5
        torch.testing.assert_close(
            ratio[large], torch.full_like(ratio[large], 8), rtol=2e-2, atol=0
        )
        torch.testing.assert_close(ratio[~large], torch.ones_like(ratio[~large]), rtol=2e-2, atol=0)


def test_a_model_is_asked_once_and_only_for_caches_that_need_it(gqa, monkeypatch):
    calls = []
    model = scale_key_pairs(gqa, 1, 1)
    run = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *args, **more: calls.append(1) or run(*args, **more)
    )
    for spec in ("q8", "fp16", "q4:fit=amax/q4", "q4:plain", "q4:rotate"):
        assert stored(model, spec)[0] is None
    ModelKVCache(model.cache_layout, 1, 64, **cache_configs("q4"), device="meta")
    assert not calls
    first, again = stored(model), stored(model, "nf4")
    assert len(calls) == 1 and all(map(torch.equal, first, again))


def test_a_model_of_transformers_has_those_of_the_same_model_of_ours(gqa, theirs):
    """Through the adapter and in the cache that `generate` uses; the model is as it was afterwards."""
    theirs.train()
    attention = theirs.config._attn_implementation
    adapter = HuggingFaceModel(theirs)
    for ours, found in zip(measured(gqa), measured(adapter), strict=True):
        torch.testing.assert_close(found["k"], ours["k"], rtol=1e-2, atol=1e-4)
    assert theirs.training and all(module.training for module in theirs.modules())
    assert theirs.config._attn_implementation == attention
    accelerate(theirs.eval(), cache="q4")
    cache = CarambaCache(theirs, "q4")
    theirs(torch.arange(40)[None], past_key_values=cache)
    for layer, found in zip(cache.layers, measured(gqa), strict=True):
        rms = layer.store.k.view.query_rms
        torch.testing.assert_close(rms.flatten(), found["k"].flatten(), rtol=1e-2, atol=1e-4)
    restore(theirs)


def test_caches_that_need_none_do_not_run_a_model_of_transformers(theirs):
    CarambaCache(theirs, "q8")
    assert "query_rms" not in vars(capabilities_of(theirs))
    CarambaCache(theirs, "q4")
    assert "query_rms" in vars(capabilities_of(theirs))


def test_a_model_that_needs_a_cache_has_none_and_generates(theirs, monkeypatch):
    run = theirs.forward

    def only_cached(*args, cache=None, past_key_values=None, use_cache=None, **more):
        cache = past_key_values if cache is None else cache
        if cache is None and not use_cache:
            raise ValueError("a cache is needed")
        return run(*args, use_cache=use_cache, **{CACHE: cache}, **more)

    monkeypatch.setattr(theirs, "forward", only_cached)
    accelerate(theirs, cache="q4")
    with pytest.warns(UserWarning, match="a cache is needed.*by ranges alone"):
        assert capabilities_of(theirs).query_rms == {}
    text = theirs.generate(torch.arange(40)[None], max_new_tokens=5, do_sample=False)
    assert text.shape == (1, 45)
    restore(theirs)


def test_no_graph_is_kept_and_parameters_made_without_one_will_do():
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()
    graphs = []
    hook = theirs.model.layers[0].register_forward_hook(
        lambda *_: graphs.append(torch.is_grad_enabled())
    )
    found = capabilities_of(theirs).query_rms
    hook.remove()
    assert set(graphs) == {False} and len(found) == len(theirs.model.layers)


def test_passes_of_other_threads_are_not_counted(theirs):
    accelerate(theirs)
    stop, ids = threading.Event(), torch.arange(100, 120)[None]

    def others() -> None:
        while not stop.is_set():
            with torch.no_grad():
                theirs(ids, use_cache=False)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        beside = capabilities_of(theirs).query_rms
    finally:
        stop.set()
        thread.join()
    capabilities_of(theirs).__dict__.pop("query_rms")
    alone = capabilities_of(theirs).query_rms
    assert all(torch.equal(beside[index], alone[index]) for index in alone)
    restore(theirs)


class OwnAttention(nn.Module):
    """One layer whose queries are ``loud`` times the usual in the first channel."""

    def __init__(self, loud: float) -> None:
        super().__init__()
        self.embed, self.loud = nn.Embedding(50, 64), loud

    def forward(self, tokens, ctx):
        x = self.embed(tokens).unflatten(-1, (2, 32)).transpose(1, 2)
        q = x * torch.tensor([self.loud] + [1.0] * 31)
        return ctx.attend(0, q, x, x).transpose(1, 2).flatten(2) @ self.embed.weight.T


def test_a_model_with_a_context_is_asked_as_well():
    model = ContextModel(OwnAttention(30.0), [LayerShape(64, 64, 2)], 50)
    rms = measured(model)[0]["k"]
    assert (rms[:, 0] > 10 * rms[:, 1:].mean(1)).all()
    assert stored(model)[0] is not None


class ShortAttention(OwnAttention):
    """No position from the 33rd token on."""

    def forward(self, tokens, ctx):
        places = nn.functional.embedding(torch.arange(tokens.shape[1]), torch.ones(32, 1))
        return places * super().forward(tokens, ctx)


def test_a_model_that_cannot_take_the_tokens_says_so_and_has_a_cache():
    model = ContextModel(ShortAttention(1.0), [LayerShape(64, 64, 2)], 50)
    with pytest.warns(UserWarning, match="ContextModel: a forward pass over 64 tokens failed"):
        assert stored(model) == [None]
    assert stored(model) == [None]


def test_a_layout_outlives_its_model():
    layout = load_demo("gqa").cache_layout
    gc.collect()
    cache = ModelKVCache(layout, 1, 64, **cache_configs("q4"))
    assert cache.layers[0].streams["k"].view.query_rms is None


def test_each_rank_has_those_of_its_heads(gqa):
    class Second:
        size, rank = 2, 1

    shape = gqa.cache_layout[0]
    own = own_heads(shape, Second())
    assert torch.equal(own.query_rms()["k"], shape.query_rms()["k"][1:])


def test_a_stream_with_an_infinite_query_is_left_out():
    means = SquareMeans()
    means.add("k", torch.ones(1, 4, 3, 8), 2)
    means.add("k", 3 * torch.ones(1, 4, 1, 8), 2)
    means.add("loud", torch.full((1, 2, 1, 8), math.inf), 2)
    found = means.roots()
    assert found.keys() == {"k"}
    torch.testing.assert_close(found["k"], torch.full((2, 8), math.sqrt(3.0)))


def test_a_cache_made_by_hand_takes_them_and_names_another_shape():
    config = KVCacheTensorConfig(kind="q4_channel", fit="mse")
    rms = torch.rand(2, 64)
    cache = LayerKVCache(1, 64, 128, 128, config, n_kv_heads=2, query_rms=lambda: {"k": rms})
    assert torch.equal(cache.k.view.query_rms.flatten(), rms.flatten())
    assert cache.select_rows([0, 0]).k.view.query_rms is cache.k.view.query_rms
    with pytest.raises(ValueError, match=r"query_rms is \(1, 64\); \(2, 64\) is needed"):
        LayerKVCache(1, 64, 128, 128, config, n_kv_heads=2, query_rms=lambda: {"k": rms[:1]})


def test_a_state_loads_whatever_found_its_scales():
    """Reading asks for neither ``fit`` nor queries."""
    k = torch.randn(1, 2, 50, 64) * 2.0 ** torch.randint(-3, 4, (64,))
    amax, mse = (KVCacheTensorConfig(kind="q4_channel", fit=fit) for fit in ("amax", "mse"))
    old = LayerKVCache(1, 64, 128, 128, amax, n_kv_heads=2)
    old.append(k, k)
    new = LayerKVCache(
        1, 64, 128, 128, mse, n_kv_heads=2, query_rms=lambda: {"k": torch.rand(2, 64)}
    )
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.get()[0], old.get()[0])
    other = LayerKVCache(
        1, 64, 128, 128, KVCacheTensorConfig(kind="q4_channel", qblock=64), n_kv_heads=2
    )
    with pytest.raises(ValueError, match="k is stored as"):
        other.load_state_dict(old.state_dict())
