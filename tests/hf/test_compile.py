"""Accelerated models under torch.compile, and the caches `generate` makes for compiled steps and for assistants."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.hf_matrix import IS_OLD, NEVER, PAD, VOCABULARY, tiny
from torch import Tensor
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM, PreTrainedModel

from caramba_fast.hf import CarambaCache, CarambaStaticCache, accelerate
from caramba_fast.hf.compat import CACHE

PROMPTS = [torch.arange(n)[None] * 7 % 90 + 3 for n in (6, 10)]
#: A kind that is stored as it is, and one that is quantized.
KINDS = ("fp32", "q8")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def generated(model: PreTrainedModel, ids: Tensor, **options: Any) -> list[list[int]]:
    given = dict(max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids), **options)
    return model.generate(ids, **given).tolist()


@pytest.mark.parametrize(("kind", "whole"), [*zip(KINDS, (False, True), strict=True)])
def test_a_compiled_model_takes_prompts_of_several_lengths(kind: str, whole: bool) -> None:
    model = accelerate(tiny("llama"), kind)
    expected = [generated(model, ids) for ids in PROMPTS]
    if whole:
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    assert [generated(model, ids) for ids in PROMPTS] == expected


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_steps_of_a_static_cache_are_whole_graphs(kind: str, family: str) -> None:
    model = accelerate(tiny(family), kind)
    options = dict(cache_implementation="static")
    expected = [generated(model, ids, disable_compile=True, **options) for ids in PROMPTS]
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert [generated(model, ids, **options) for ids in PROMPTS] == expected


def test_compiled_passes_of_both_caches_take_turns() -> None:
    """In one process, and whether the model is compiled before or after it is accelerated."""
    for compiled_first in (True, False):
        model = tiny("llama", num_hidden_layers=1)
        expected = [generated(model, ids) for ids in PROMPTS]
        compiled = torch.compile(model.forward, backend="eager")
        if compiled_first:
            model.forward = compiled
        accelerate(model, "fp32")
        model.forward = compiled
        for options in ({"cache_implementation": "static"}, {}, {"cache_implementation": "static"}):
            assert [generated(model, ids, **options) for ids in PROMPTS] == expected


def test_compiled_passes_through_stored_keys_have_no_gradient_either() -> None:
    model = accelerate(tiny("llama", num_hidden_layers=1), "q8")
    for cache in (CarambaStaticCache(model, "q8", max_cache_len=24), CarambaCache(model, "q8")):
        with torch.no_grad():
            model(PROMPTS[0], **{CACHE: cache})
        step = torch.compile(model.forward, backend="aot_eager")
        logits = step(input_ids=PROMPTS[0][:, :1], **{CACHE: cache}, use_cache=True).logits
        with pytest.raises(RuntimeError, match="no gradient flows"):
            logits.sum().backward()


def plain_loop(model: PreTrainedModel, forward: Any, cache: Any) -> list[list[int]]:
    """Greedy tokens of two rows, one of them padded in front, from forward passes of one's own."""
    ids = torch.cat((PROMPTS[1], PROMPTS[1] + 1))
    mask = (torch.arange(10) >= torch.tensor([[0], [4]])).long()
    found = []
    with torch.no_grad():
        for _ in range(4):
            places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = forward(
                input_ids=ids, attention_mask=mask, position_ids=places, **{CACHE: cache},
                use_cache=True,
            ).logits  # fmt: skip
            ids = logits[:, -1:].argmax(-1)
            found.append(ids)
            mask = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
    return torch.cat(found, dim=1).tolist()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_compiled_passes_take_starts_of_rows_from_their_masks(family: str) -> None:
    model = tiny(family)
    expected = plain_loop(model, model, DynamicCache(config=model.config))
    accelerate(model, "fp32")
    for compiled in (False, True):
        cache = CarambaStaticCache(model, "fp32", max_cache_len=32)
        cache.initialize(model, 2)
        forward = (
            torch.compile(model.forward, backend="eager", fullgraph=True) if compiled else model
        )
        assert plain_loop(model, forward, cache) == expected


def test_uncompiled_passes_go_on_where_rows_of_a_compiled_prompt_start() -> None:
    model = tiny("llama")
    expected = plain_loop(model, model, DynamicCache(config=model.config))
    accelerate(model, "fp32")
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = CarambaStaticCache(model, "fp32", max_cache_len=32)
    cache.initialize(model, 2)
    passes = iter([compiled, model, compiled, model])

    def forward(**given: Any) -> Any:
        return next(passes)(**given)

    assert plain_loop(model, forward, cache) == expected


@pytest.mark.parametrize("kind", ["fp32", "q4"])
@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_compiled_prompts_of_generate_know_where_rows_start(kind: str, prefill: Any) -> None:
    """`generate` makes their masks outside of what is compiled."""
    model, ids = accelerate(tiny("llama"), kind, prefill=prefill), torch.cat([PROMPTS[1]] * 2)
    mask = torch.ones_like(ids)
    mask[1, :7], ids[1, :7] = 0, PAD
    options: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=9, do_sample=False)
    options |= {"cache_implementation": "static", "disable_compile": True}
    expected = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected)


def test_padding_between_tokens_raises_in_a_compiled_pass_too() -> None:
    model = accelerate(tiny("llama"), "fp32")
    cache = CarambaStaticCache(model, "fp32", max_cache_len=32)
    cache.initialize(model, 1)
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(RuntimeError, match="padding in front of rows alone"), torch.no_grad():
        forward(input_ids=PROMPTS[0], attention_mask=mask, **{CACHE: cache}, use_cache=True)


def test_a_call_that_needs_fewer_slots_compiles_nothing_again() -> None:
    model = accelerate(tiny("llama"), "fp32")
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
    for first, ids in enumerate((PROMPTS[1], PROMPTS[1])):
        before = len(compiled)
        generated(model, ids, cache_implementation="static", min_new_tokens=5 - 2 * first)
        assert (len(compiled) > before) == (first == 0)
    before = len(compiled)
    model.generate(PROMPTS[1], max_new_tokens=2, cache_implementation="static", do_sample=False)
    assert len(compiled) == before


@pytest.mark.parametrize("kind", KINDS)
def test_several_rows_without_padding_in_a_static_cache(kind: str) -> None:
    model = accelerate(tiny("llama"), kind)
    ids = torch.cat((PROMPTS[1], PROMPTS[1] + 2))
    expected = generated(model, ids)
    found = generated(model, ids, cache_implementation="static", disable_compile=True)
    assert found == expected


@pytest.mark.skipif(IS_OLD, reason="LFM2 brings a cache of its own in this transformers")
@pytest.mark.parametrize("window", [False, True])
def test_assistants_with_convolutions_or_windows_are_rolled_back(window: bool) -> None:
    if window:
        assistant: Any = tiny("mistral", num_hidden_layers=1)
    else:
        config = Lfm2Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=PAD,
            layer_types=["conv", "full_attention", "conv"],
        )  # fmt: skip
        torch.manual_seed(0)
        assistant = Lfm2ForCausalLM(config).eval()
        assistant.generation_config.eos_token_id = NEVER
    model = tiny("llama")
    expected = generated(model, PROMPTS[1])
    accelerate(model, "fp32")
    accelerate(assistant, "fp32")
    assert generated(model, PROMPTS[1], assistant_model=assistant) == expected


@torch.no_grad()
def test_a_compiled_step_past_the_room_keeps_lengths_within_the_buffers() -> None:
    """It cannot raise; kernels that read whatever a length says would leave them."""
    model = accelerate(tiny("llama"), "q8")
    cache = CarambaStaticCache(model, "q8", max_cache_len=12)
    model(PROMPTS[1], **{CACHE: cache})
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    for place in range(10, 15):
        step(PROMPTS[0][:, :1], **{CACHE: cache}, position_ids=torch.tensor([[place]]))
    assert [layer.lengths.tolist() for layer in cache.layers] == [[12]] * len(cache.layers)


def test_a_mask_of_ones_own_is_refused_by_a_compiled_pass_too() -> None:
    """Whatever passes came before: an exact prompt leaves no mask that could be taken for ours."""
    model = accelerate(tiny("llama"), "q8")
    cache = CarambaStaticCache(model, "q8", max_cache_len=24)
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    given: dict[str, Any] = {CACHE: cache, "use_cache": True}
    with torch.no_grad():
        step(input_ids=PROMPTS[0], **given)
        step(input_ids=PROMPTS[0][:, :1], **given)
        own = torch.ones(1, 1, 1, 24, dtype=torch.bool)
        with pytest.raises(Exception, match="not a mask"):
            step(input_ids=PROMPTS[0][:, :1], attention_mask=own, **given)
