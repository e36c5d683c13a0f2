"""Calls that the C++ extension keeps: the bits of the op's own way, and nothing is run that does not fit."""

from __future__ import annotations

import gc

import pytest
import torch

from caramba_fast.cache import DecoupledLayerKVCache, LayerKVCache
from caramba_fast.config import cache_configs
from caramba_fast.ops import decode_attention, planned, registry

ATTEND, APPEND = torch.ops.caramba_fast.attention_planned, torch.ops.caramba_fast.append_planned


def layer(spec="q4", decoupled=False, **options):
    if decoupled:
        configs = cache_configs("/".join([spec] * 3))
        return DecoupledLayerKVCache(2, 512, 64, 64, 64, **configs, n_kv_heads=2, **options)
    return LayerKVCache(2, 512, 64, 64, **cache_configs(spec), n_kv_heads=2, **options)


def numbers(seed, heads=2, tokens=1, dtype=torch.float32):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, heads, 32, generator=source).to(dtype).transpose(1, 2)


def steps(cache, count=40, tokens=1, leftpad=None, dtype=torch.float32):
    """What each of some steps attends to, over several groups of keys by channel; then all that is stored."""
    keys = len(cache.streams)
    extra = {} if leftpad is None else {"cache_leftpad": leftpad}
    cache.append(*[numbers(i, tokens=9, dtype=dtype) for i in range(keys)], **extra)
    outs = []
    for step in range(count):
        cache.append(
            *[numbers(10 * step + i, tokens=tokens, dtype=dtype) for i in range(keys)], **extra
        )
        queries = [numbers(7 * step + i, 4, tokens, dtype) for i in range(keys - 1)]
        outs.append(cache.attend(*queries, **extra))
    return [*outs, *cache.get()]


@pytest.mark.parametrize("spec", ["q4", "q8", "nf4", "q4:plain", "q8:plain", "fp16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 64}, {"decoupled": True}],
    ids=["contiguous", "paged", "decoupled"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_steps_that_are_kept_equal_those_that_are_not(spec, options, padded, monkeypatch):
    leftpad = torch.tensor([0, 5], dtype=torch.int32) if padded else None
    with torch.no_grad():
        cache = layer(spec, **options)
        found = steps(cache, leftpad=leftpad)
        kept = [plan.replay for plan in cache.plans._plans.values()]
        assert any(isinstance(x, planned.Replay) for x in kept), "nothing was kept"
        monkeypatch.setattr(registry.Op, "keeper", lambda *_: None)
        other = layer(spec, **options)
        wanted = steps(other, leftpad=leftpad)
        assert not any(plan.replay for plan in other.plans._plans.values())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_several_tokens_and_other_types(dtype, monkeypatch):
    with torch.no_grad():
        found = steps(layer(), 20, 4, dtype=dtype)
        monkeypatch.setattr(registry.Op, "keeper", lambda *_: None)
        wanted = steps(layer(), 20, 4, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def kept_numbers(cache):
    """Of the append and of the attention of one token that a layer keeps."""
    plans = cache.plans._plans.values()
    return [
        [p.replay._op.args[0] for p in plans if name in p.op.name][-1]
        for name in ("append", "attention")
    ]


@pytest.fixture
def cache():
    with torch.no_grad():
        made = layer()
        steps(made, 3)
    return made


def test_a_call_is_forgotten_with_its_plan():
    with torch.no_grad():
        cache = layer()
        steps(cache, 3)
    append, attend = kept_numbers(cache)
    lengths = cache.seq_lens.clone()
    assert ATTEND(attend, numbers(0, 4), lengths)[0].shape == (2, 4, 1, 32)
    del cache
    gc.collect()
    for number, call in ((append, APPEND), (attend, ATTEND)):
        rest = (numbers(1),) if call is APPEND else ()
        with pytest.raises(RuntimeError, match=f"plan {number} is no kept call"):
            call(number, numbers(0), *rest, lengths)


def test_a_call_that_does_not_fit_its_plan_is_refused(cache):
    append, attend = kept_numbers(cache)
    q, k, lengths = numbers(0, 4), numbers(0), cache.seq_lens
    before = [x.clone() for x in cache.get()]
    wrong = {
        "q has not the shape or dtype": lambda: ATTEND(attend, numbers(0, 2), lengths),
        "the plan has 2 streams": lambda: ATTEND(attend, q, lengths, q_geo=q),
        "block_table": lambda: ATTEND(attend, q, lengths, lengths[:, None]),
        "cache_seqlens": lambda: ATTEND(attend, q, lengths.long()),
        "is no kept call of append_": lambda: APPEND(attend, k, k, lengths),
        "is no kept call of attention": lambda: ATTEND(append, q, lengths),
        "the new tokens have not": lambda: APPEND(append, k.half(), k, lengths),
        "new tokens have not the shape": lambda: APPEND(append, k, numbers(0, 4), lengths),
        "start has 3": lambda: APPEND(append, k, k, torch.zeros(3, dtype=torch.int32)),
    }
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            call()
    assert all(torch.equal(a, b) for a, b in zip(before, cache.get(), strict=True))


def test_a_call_that_fails_or_is_not_alone_is_not_kept(cache):
    with planned.recording() as found:
        pass
    assert found.number == 0
    with planned.recording() as found:
        steps(cache, 2)
    assert found.number == 0
    with pytest.raises(ValueError), planned.recording() as found:
        cache.append(numbers(0), numbers(0)[..., :16])
    assert found.number == 0


def test_streams_that_were_given_other_memory_are_read_and_written_there():
    """As torch.multiprocessing does with tensors that it sends: what they had before is freed."""
    with torch.no_grad():
        cache, other = layer(), layer()
        steps(cache, 3), steps(other, 3)
        call, lengths = kept_numbers(cache)[1], cache.seq_lens.clone()
        for stream in cache.streams.values():
            for part in (stream.codes, stream.scales, stream.tail, stream.sink):
                part.share_memory_()
        with pytest.raises(RuntimeError, match="has other memory than when it was made"):
            ATTEND(call, numbers(0, 4), lengths)
        found, wanted = steps(cache, 3), steps(other, 3)
        assert any(plan.replay for plan in cache.plans._plans.values())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_call_that_fails_while_it_is_recorded_leaves_nothing_behind():
    with torch.no_grad():
        cache = layer()
        steps(cache, 1)
        with pytest.raises(KeyboardInterrupt), planned.recording():
            views = [stream.view for stream in cache.streams.values()]
            decode_attention(numbers(0, 4), *views, cache.seq_lens, n_kv_heads=2, residual_len=16)
            raise KeyboardInterrupt
        steps(cache, 3)
    last = min(kept_numbers(cache))
    with pytest.raises(RuntimeError, match=f"plan {last - 1} is no kept call"):
        ATTEND(last - 1, numbers(0, 4), cache.seq_lens)


def test_attention_sinks_of_a_model_are_read_anew_with_every_call():
    """Their values are copied into a call; a kept one would not follow them."""
    with torch.no_grad():
        cache, s_aux = layer(), torch.zeros(4)
        cache.append(numbers(0, tokens=9), numbers(1, tokens=9))
        first = [cache.attend(numbers(2, 4), s_aux=s_aux) for _ in range(2)]
        s_aux += 9
        assert not torch.allclose(cache.attend(numbers(2, 4), s_aux=s_aux), first[1])


def test_an_extension_that_keeps_no_calls_is_called_as_ever(monkeypatch):
    """Sources that were updated and not built again."""
    monkeypatch.setattr(planned, "_extension", object)
    with torch.no_grad():
        cache = layer()
        steps(cache, 3)
        assert not any(plan.replay for plan in cache.plans._plans.values())
