"""RoPE as a part of a cache's append: what is stored and read is that of keys turned beforehand."""

from __future__ import annotations

import pytest
import torch

from caramba_fast.cache import DecoupledLayerKVCache, LayerKVCache, Rope
from caramba_fast.config import cache_configs
from caramba_fast.models import attention
from caramba_fast.models.demos import demo_tokenizer, load_demo
from caramba_fast.ops import apply_rotary_emb, planned
from caramba_fast.ops.apply_rotary_emb import rotary_op
from caramba_fast.serve import Engine


def layer(spec, decoupled=False, **options):
    if decoupled:
        configs = cache_configs("/".join([spec] * 3))
        return DecoupledLayerKVCache(2, 512, 64, 64, 64, **configs, n_kv_heads=2, **options)
    return LayerKVCache(2, 512, 64, 64, **cache_configs(spec), n_kv_heads=2, **options)


def numbers(seed, heads=2, tokens=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, heads, 32, generator=source).transpose(1, 2)


def steps(cache, together, new_lens=None):
    """What some steps attend to, over several groups of keys by channel; then all that is stored."""
    keys, outs = len(cache.streams) - 1, []
    cache.append(*[numbers(i, tokens=9) for i in range(keys + 1)])
    for step in range(40):
        *before, k, v = [numbers(10 * step + i, tokens=2) for i in range(keys + 1)]
        *others, q = [numbers(7 * step + i, 4, 2) for i in range(keys)]
        cos, sin = torch.randn(2, 1, 2, 16, generator=torch.Generator().manual_seed(step))
        rope = Rope(q, cos, sin) if together else None
        if rope is None:
            q, k = apply_rotary_emb(q, k, cos, sin)
        cache.append(*before, k, v, new_lens, rope=rope)
        outs.append(cache.attend(*others, q if rope is None else rope.out))
    return [*outs, *cache.get()]


@torch.no_grad()
@pytest.mark.parametrize("spec", ["q4", "q8", "nf4:plain", "fp16"])
@pytest.mark.parametrize("new_lens", [None, (2, 1)], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "options", [{}, {"page_size": 64}, {"decoupled": True}], ids=["contiguous", "paged", "decoupled"]
)  # fmt: skip
def test_a_cache_turns_what_it_stores(spec, new_lens, options):
    cache = layer(spec, **options)
    found = steps(cache, True, new_lens)
    if new_lens is None:
        kept = [plan.replay for name, plan in cache.plans._plans.items() if "append" in name[0]]
        assert any(isinstance(x, planned.Replay) for x in kept), "nothing was kept"
    wanted = steps(layer(spec, **options), False, new_lens)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@torch.no_grad()
def test_flat_keys_are_turned_as_well_and_angles_are_checked():
    cache, other = layer("q8"), layer("q8")
    k, q = numbers(0, tokens=3), numbers(1, 4, 3)
    cos, sin = torch.randn(2, 1, 3, 32)
    flat, rope = k.transpose(1, 2).flatten(2), Rope(q, cos, sin)
    with pytest.raises(ValueError, match="rotary_cos has shape"):
        cache.append(flat, flat, rope=Rope(q, cos[..., :8], sin[..., :8]))
    assert cache.is_empty
    cache.append(flat, flat, rope=rope)
    turned, keys = apply_rotary_emb(q, k, cos, sin)
    other.append(keys, k)
    assert torch.equal(rope.out, turned)
    assert all(torch.equal(a, b) for a, b in zip(cache.get(), other.get(), strict=True))


@pytest.mark.parametrize("name", ["gqa", "dba"])
@pytest.mark.parametrize("spec", ["q4", "q8:plain"])
def test_steps_of_the_native_model_and_the_engine_turn_with_their_append(name, spec, monkeypatch):
    """After prompts no op turns keys of its own; tokens and their probabilities are those of two calls."""
    model, tokenizer = load_demo(name), demo_tokenizer(name)
    prompts = [tokenizer.encode(text).ids for text in ("def read(path):", "class A:\n    def")]

    def served():
        engine = Engine(model, cache_kind=spec, max_seq_len=256)
        outputs = engine.generate_batch(prompts, max_new_tokens=40, logprobs=1, temperature=0)
        return [(output.generated_tokens, output.logprobs) for output in outputs]

    calls, call = [], rotary_op.call
    monkeypatch.setattr(
        rotary_op, "call", lambda *given: calls.append(given[0].shape) or call(*given)
    )
    monkeypatch.setattr(Rope, "FASTER_ON", ("cpu",))
    found = served()
    assert all(shape[0] > 2 or shape[2] > 1 for shape in calls)
    monkeypatch.setattr(attention.Step, "rope", lambda *_: None)
    assert found == served()
