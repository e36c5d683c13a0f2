"""What a generator or an engine holds is freed with it, without waiting for the garbage collector: caches are large."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.engines import engine
from support.generators import new_model

from caramba_fast import GenerateConfig, Generator, SpeculativeGenerator

IDS = torch.arange(5, 55)[None]
CONFIG = GenerateConfig(cache_kind="q4", max_seq_len=256, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def generated():
    generator = Generator(new_model(torch.device("cpu")), CONFIG)
    generator.generate(IDS, max_new_tokens=4)
    return generator, generator.cache


def left_early():
    generator = Generator(new_model(torch.device("cpu")), CONFIG)
    steps = generator.generate_iter(IDS, max_new_tokens=40)
    next(steps)
    return (generator, steps), generator.cache


def beams():
    generator = Generator(new_model(torch.device("cpu")), CONFIG)
    generator.generate(IDS, max_new_tokens=4, num_beams=2)
    return generator, generator.cache


def speculative():
    model, draft = (new_model(torch.device("cpu")) for _ in range(2))
    generator = SpeculativeGenerator(model, draft, max_seq_len=256, temperature=0.0)
    generator.generate(IDS, max_new_tokens=8)
    return generator, generator.cache


def served():
    serving = engine()
    serving.generate_batch([[1, 2, 3, 4]], max_new_tokens=4)
    return serving, serving.pool


@pytest.mark.parametrize("make", [generated, left_early, beams, speculative, served])
def test_a_cache_goes_with_its_owner(make):
    owner, cache = make()
    held = weakref.ref(cache)
    del cache
    assert held() is not None
    del owner
    assert held() is None
