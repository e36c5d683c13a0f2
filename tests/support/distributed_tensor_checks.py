"""Checks of tensor parallelism, alone and with context parallelism, run on every rank."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from support.distributed_models import bytes_given, demo_ids, ids, model

from caramba_fast.bench.serving.traffic import StepShape, decode_step
from caramba_fast.cache import DecoupledLayerShape, ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.distributed import RankGroup, context_parallel, tensor_parallel
from caramba_fast.infer import Generator
from caramba_fast.models import load_demo
from caramba_fast.ops import use_backend


@functools.cache
def group():
    return RankGroup(timeout=60)


def split(name):
    return tensor_parallel(copy.deepcopy(model(name)), group())


@torch.no_grad()
def logits(given, spec, prefill):
    """Logits of a ragged prompt, a chunk and a decode step."""
    cache = ModelKVCache(given.cache_layout, 2, 300, prefill=prefill, **cache_configs(spec))
    out = [given.forward(ids(2, 70), cache, query_lens=[70, 41])[:, :41]]
    out += [given.forward(ids(2, n, 6), cache) for n in (20, 1, 1)]
    return torch.cat(out, dim=1), cache


def check_logits_are_those_of_one_process():
    with use_backend("reference"):
        for name in ("gqa", "biases", "qk_norm", "window", "dba", "dba_wide", "deep"):
            whole_numbers = ("fp32", "fp16") if name == "dba" else ("fp32",)
            for spec in whole_numbers if name in ("dba", "deep") else ("fp32", "fp16", "q8", "q4"):
                for prefill in ("exact", "stored")[name != "gqa" :]:
                    expected, whole = logits(model(name), spec, prefill)
                    found, own = logits(split(name), spec, prefill)
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                    assert own[0].n_kv_heads * group().size == whole[0].n_kv_heads


def check_caches_hold_local_heads():
    for name in ("gqa", "qk_norm", "dba"):
        given, whole = split(name), model(name)
        for own, shape in zip(given.cache_layout, whole.cache_layout, strict=True):
            assert own.n_kv_heads == shape.n_kv_heads // 2
            assert own.v_dim == shape.v_dim // 2
            if isinstance(own, DecoupledLayerShape):
                assert (own.k_sem_dim, own.k_geo_dim) == (
                    shape.k_sem_dim // 2,
                    shape.k_geo_dim // 2,
                )
            else:
                assert own.k_dim == shape.k_dim // 2
    sizes = [
        ModelKVCache(given.cache_layout, 1, 512, **cache_configs("q8")).nbytes
        for given in (model("gqa"), split("gqa"))
    ]
    assert sizes[0] == 2 * sizes[1]


def check_the_generator_writes_the_same_tokens():
    for name, specs in (("gqa", ("fp16", "q8", "q4")), ("dba", ("fp16",))):
        demo = load_demo(name)
        prompt = demo_ids(200)
        runs = []
        for given in (demo, tensor_parallel(load_demo(name), group())):
            for spec in specs:
                generator = Generator(given, cache_kind=spec, max_seq_len=256, do_sample=False)
                runs.append(
                    generator.generate([prompt], max_new_tokens=16, ignore_eos=True).tolist()
                )
        assert runs[: len(specs)] == runs[len(specs) :], name


def check_bytes_are_those_of_the_formulas():
    given = split("deep")
    cache = ModelKVCache(given.cache_layout, 2, 300, **cache_configs("fp32"))
    with torch.no_grad():
        given.forward(ids(2, 5), cache)
        with bytes_given() as counted:
            given.forward(ids(2, 1), cache)
    shape = StepShape(3, 64, 4, 2, 32, 4, 2 * cache[0].bytes_per_token)
    step = decode_step(shape, 6, batch=2, tensor=2)
    assert (len(counted), sum(counted)) == (step.collectives, step.given)
    assert step.cache_read == 2 * 6 * cache.bytes_per_token


def check_what_cannot_be_split_is_refused():
    with pytest.raises(
        ValueError,
        match="the model has 3 kv heads, which do not divide by 2 ranks; allowed are 1, 3",
    ):
        split("three")
    with pytest.raises(
        TypeError, match=r"model is a Linear; tensor parallelism is for caramba_fast\.models\.Tra"
    ):
        tensor_parallel(torch.nn.Linear(2, 2), group())
    once = copy.deepcopy(model("gqa"))
    tensor_parallel(once, group())
    with pytest.raises(ValueError, match="split over ranks already"):
        tensor_parallel(once, group())
    odd = copy.deepcopy(model("gqa"))
    odd.model.layers[0].mlp.gate_proj.out_features = 97
    with pytest.raises(ValueError, match="the MLP's width of 97 does not divide by 2 ranks"):
        tensor_parallel(odd, group())


def check_heads_and_tokens_at_once():
    """Four ranks: pairs share the heads, and the two ranks with the same heads share the tokens."""
    rank = dist.get_rank()
    groups = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    heads, tokens = (
        RankGroup(next(groups[p] for p in pairs if rank in p), timeout=60)
        for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    )
    with use_backend("reference"):
        for name in ("gqa", "dba_wide"):
            for spec in ("fp32", "q4"):
                expected, _ = logits(model(name), spec, "stored")
                given = context_parallel(tensor_parallel(copy.deepcopy(model(name)), heads), tokens)
                found, cache = logits(given, spec, "stored")
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    shape = StepShape(1, 64, 4, 2, 32, 4, 0.0)
    given = context_parallel(tensor_parallel(copy.deepcopy(model("gqa")), heads), tokens)
    cache = ModelKVCache(given.cache_layout, 2, 300, **cache_configs("fp32"))
    with torch.no_grad():
        given.forward(ids(2, 5), cache)
        with bytes_given() as counted:
            given.forward(ids(2, 1), cache)
    step = decode_step(shape, 6, batch=2, tensor=2, context=2)
    assert (len(counted), sum(counted)) == (step.collectives, step.given)
