"""One model in several threads: a pass is read by what it asked for, whatever others put into the config."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.hf_matrix import tiny
from torch import Tensor

from caramba_fast import Generator
from caramba_fast.hf import CarambaStaticCache, accelerate
from caramba_fast.hf.scope import implementation, our_attention, set_implementation
from caramba_fast.hf.static_layer import current

IDS = torch.arange(3, 37).view(2, 17)


@contextmanager
def held_elsewhere(config: Any) -> Iterator[threading.Event]:
    """Another thread has our attention in ``config``, until the event is set or the block ends."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with our_attention([config]):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    leave.thread = thread  # type: ignore[attr-defined]
    try:
        yield leave
    finally:
        leave.set()
        thread.join()


def logits(model: Any, mask: Tensor | None, **options: Any) -> Tensor:
    """Of the tokens that are no padding."""
    with torch.no_grad():
        out = model(input_ids=IDS, attention_mask=mask, use_cache=False, **options).logits
    return out if mask is None else out[mask.bool()]


def padding() -> Tensor:
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    return mask


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", [None, padding()])
@pytest.mark.parametrize("leaves", ["afterwards", "between mask and attention"])
def test_a_plain_pass_while_another_thread_generates(
    family: str, own: str, mask: Tensor | None, leaves: str
) -> None:
    if own == "sdpa" and family in ("gemma2", "gpt_oss"):
        pytest.skip("its own sdpa lacks caps or sinks")
    model: Any = tiny(family)
    model.set_attn_implementation(own)
    expected = logits(model, mask)
    with held_elsewhere(model.config) as leave:
        assert model.config._attn_implementation == "caramba_fast"
        assert implementation(model.config) == own

        def go(*_: Any) -> None:
            leave.set()
            leave.thread.join()  # type: ignore[attr-defined]

        blocks = model.transformer.h if family == "gpt2" else model.model.layers
        if leaves != "afterwards":
            blocks[0].register_forward_pre_hook(go)
        found = logits(model, mask)
    assert model.config._attn_implementation == own
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_pass_that_begins_before_another_threads() -> None:
    """Its mask is made by its own function, its attention asked of ours."""
    model = tiny("llama")
    model.set_attn_implementation("eager")
    expected = logits(model, padding())
    stack: list[Any] = []

    def enter(*_: Any) -> None:
        stack.append(held_elsewhere(model.config))
        stack[0].__enter__()

    model.model.layers[0].register_forward_pre_hook(enter)
    found = logits(model, padding())
    stack[0].__exit__(None, None, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_of_attention_are_still_given() -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad(), held_elsewhere(model.config):
        out = model(input_ids=IDS, output_attentions=True)
    assert [tuple(x.shape) for x in out.attentions] == [(2, 4, 17, 17)] * 2


def test_an_attention_that_is_chosen_meanwhile_stays() -> None:
    model = tiny("llama")
    config = model.config
    with held_elsewhere(config):
        model.set_attn_implementation("eager")
        assert implementation(config) == "eager"
        with our_attention([config]):
            assert config._attn_implementation == "caramba_fast"
    assert config._attn_implementation == "eager"
    with held_elsewhere(config):
        set_implementation(config, "sdpa")
    assert config._attn_implementation == "sdpa"


def test_generating_and_plain_passes_at_once() -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    expected = logits(model, padding())
    generator = Generator(
        model, cache_kind="fp32", max_seq_len=128, max_new_tokens=100, ignore_eos=True
    )
    wrong, count, stop = [], [0], threading.Event()

    def plain() -> None:
        while not stop.is_set():
            count[0] += 1
            apart = float((logits(model, padding()) - expected).norm() / expected.norm())
            if apart > 1e-3:
                wrong.append(apart)

    thread = threading.Thread(target=plain)
    thread.start()
    generator.generate(IDS[:1])
    stop.set()
    thread.join()
    assert count[0] and not wrong


# -- static caches -----------------------------------------------------------------------------


@torch.no_grad()
def test_static_caches_of_two_threads() -> None:
    """One thread updates a layer between another's update and its attention."""
    model = accelerate(tiny("llama"), "q8")
    ours, theirs, alone = (CarambaStaticCache(model, "q8", max_cache_len=40) for _ in range(3))
    for cache in (ours, theirs, alone):
        model(input_ids=IDS, past_key_values=cache)
    expected = model(input_ids=IDS[:, :1], past_key_values=alone).logits
    update, between = ours.layers[1].update, []

    def meanwhile(*given: Any, **more: Any) -> Any:
        found = update(*given, **more)
        k, v = torch.zeros(2, 2, 2, 1, 16)
        thread = threading.Thread(target=lambda: between.append(theirs.layers[1].update(k, v)))
        thread.start()
        thread.join()
        return found

    ours.layers[1].update = meanwhile
    assert torch.equal(model(input_ids=IDS[:, :1], past_key_values=ours).logits, expected)
    assert len(between) == 1


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q8", "fp32"])
def test_codes_out_of_turn_are_refused(kind: str) -> None:
    model = accelerate(tiny("llama"), kind)
    cache = CarambaStaticCache(model, kind, max_cache_len=40)
    model(input_ids=IDS, past_key_values=cache)
    update = cache.layers[1].update

    def twice(*given: Any, **more: Any) -> Any:
        found = update(*given, **more)
        current.layer = cache.layers[0]
        return found

    cache.layers[1].update = twice
    with pytest.raises(RuntimeError, match="codes of a static cache whose update was not the last"):
        model(input_ids=IDS[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_static_cache_is_freed_with_its_owner() -> None:
    model = accelerate(tiny("llama"), "q8")
    cache = CarambaStaticCache(model, "q8", max_cache_len=40)
    for ids in (IDS, IDS[:, :1]):
        model(input_ids=ids, past_key_values=cache)
    layer = weakref.ref(cache.layers[-1])
    del cache
    gc.collect()
    assert layer() is None
