"""CarambaStaticCache: plain tensors of fixed size, one graph a step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from support.hf_matrix import IS_OLD, PAD, exists, tiny
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    CompileConfig,
    MllamaForCausalLM,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from caramba_fast.hf import CarambaCache, CarambaStaticCache, accelerate, compat, restore
from caramba_fast.hf.static_layer import check_no_codes

FAMILIES = ["llama", "qwen2", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "gpt2"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(count: int = 20) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, count), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    ids[1, :7] = PAD
    return {"input_ids": ids, "attention_mask": mask}


def test_layers_that_store_images_are_refused_by_name() -> None:
    """An image has another number of states than the text has tokens: a larger cache would not help."""
    rope = {"rope_scaling": {"rope_type": "default"}} if compat.BEFORE_5 else {}
    config = MllamaTextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **rope,
        num_key_value_heads=2, max_position_embeddings=64, cross_attention_layers=[1], pad_token_id=PAD,
    )  # fmt: skip
    model = accelerate(MllamaForCausalLM(config).eval(), "q8")
    with pytest.raises(TypeError, match=r"store images .*cross_attention_layers.*use CarambaCache"):
        CarambaStaticCache(model, "q8", max_cache_len=64)
    restore(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_the_same_tokens_as_with_the_stock_cache(family: str, prefill: str) -> None:
    if (family, prefill) == ("llama4_text", "stored"):
        pytest.skip("prompts of chunked layers are exact")
    model = tiny(family)
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
    expected = [model.generate(**batch(), **options, **more) for more in ({}, {"num_beams": 2})]
    accelerate(model, "fp32", prefill=prefill)
    for wanted, more in zip(expected, ({}, {"num_beams": 2}), strict=True):
        found = model.generate(
            **batch(),
            **options,
            **more,
            cache_implementation="static",
            return_dict_in_generate=True,
        )
        assert torch.equal(found.sequences, wanted)
        assert isinstance(found.past_key_values, CarambaStaticCache)
    restore(model)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *product(("q4", "fp32"), ("gemma3_text", "gpt_oss")),
        ("q8", "gemma3_text"),
        ("nf4/bf16", "llama"),
        ("q8", "llama"),
    ],
)
def test_one_graph_for_every_step_and_every_cache(family: str, kind: str) -> None:
    if IS_OLD and family == "gpt_oss":
        pytest.skip("its experts do not compile in this transformers")
    model = accelerate(tiny(family), kind)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    ids = torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        static = CarambaStaticCache(model, kind, max_cache_len=100)
        eager = CarambaCache(model, kind)
        for cache in (static, eager):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        for token in range(4):
            given = torch.tensor([[7 + token]])
            place = {"cache_position": torch.tensor([70 + token])} if IS_OLD else {}
            a = step(input_ids=given, past_key_values=static, use_cache=True, **place).logits
            b = model(input_ids=given, past_key_values=eager, use_cache=True).logits
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert counter.frame_count == 1
        assert int(static.get_seq_length()) == 74


@torch.no_grad()
def test_reset_and_reorder() -> None:
    model = accelerate(tiny("llama"), "q8")
    cache = CarambaStaticCache(model, "q8", max_cache_len=40)
    ids = batch()["input_ids"][:1].repeat(2, 1)
    ids[1] = ids[1].flip(0)
    first = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    next_ids = torch.tensor([[5], [9]])
    expected = model(input_ids=next_ids, past_key_values=cache, use_cache=True).logits
    cache.reset()
    assert torch.equal(model(input_ids=ids, past_key_values=cache, use_cache=True).logits, first)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = model(input_ids=next_ids.flip(0), past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found.flip(0), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="has 2 rows, and 3 came"):
        cache.reset()
        model(input_ids=ids[[0, 1, 0]], past_key_values=cache, use_cache=True)


def refused(model: PreTrainedModel) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        CarambaStaticCache(model, "q8", max_cache_len=40)
    return str(caught.value)


def test_models_that_cannot_have_one() -> None:
    assert "accelerate(model)" in refused(tiny("llama"))
    assert "not on the attention interface" in refused(accelerate(tiny("falcon")))
    if not IS_OLD:
        assert "as tensors" in refused(accelerate(tiny("deepseek_v3")))
        assert "layers of other kinds" in refused(accelerate(tiny("qwen3_next")))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_began_in_inference_mode_goes_on_outside_of_it(family: str) -> None:
    model, ids = accelerate(tiny(family), "q4"), batch()["input_ids"]
    found = []
    for first in (torch.no_grad(), torch.inference_mode()):
        with first:
            cache = CarambaStaticCache(model, "q4", max_cache_len=40)
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        with torch.no_grad():
            step = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits
            cache.reset()
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        found.append(step)
    assert torch.equal(*found)


@torch.no_grad()
def test_a_model_that_is_restored_meanwhile_is_named() -> None:
    model = accelerate(tiny("llama"), "fp32")
    cache = CarambaStaticCache(model, "fp32", max_cache_len=40)
    ids = torch.arange(3, 12)[None]
    model(ids, past_key_values=cache)
    restore(model)
    with pytest.raises(ValueError, match=r"does not use our attention.*accelerate"):
        model(ids[:, :1], past_key_values=cache)
    assert int(cache.get_seq_length()) == 9


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_are_named(family: str) -> None:
    if not exists(family):
        pytest.skip("not in this transformers")
    assert "keys and values of earlier ones" in refused(accelerate(tiny(family)))


@torch.no_grad()
def test_what_a_static_cache_does_not_do_is_said() -> None:
    model = accelerate(tiny("llama"), "q8")
    cache = CarambaStaticCache(model, "q8", max_cache_len=40)
    model(**batch(), past_key_values=cache, use_cache=True)
    before = held(cache)
    for name, given in {
        "batch_repeat_interleave": (2,), "batch_select_indices": (torch.tensor([0]),), "offload": (0,),
        "prefetch": (0,), "state_dict": (), "load_state_dict": ({},),
    }.items():  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"has no {name}.*use CarambaCache"):
            getattr(cache, name)(*given)
    assert held(cache) == before


@torch.no_grad()
def test_a_refused_pass_leaves_the_cache_as_it_was() -> None:
    model = accelerate(tiny("llama"), "q4")
    cache = CarambaStaticCache(model, "q4", max_cache_len=64)
    prompt = batch()["input_ids"]
    model(prompt, past_key_values=cache)
    before, ids = held(cache), prompt[:, :1]
    own = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    for reason, options in {
        "not a mask": {"attention_mask": own},
        "gives no weights": {"output_attentions": True},
    }.items():
        with pytest.raises(ValueError, match=reason):
            model(ids, past_key_values=cache, **options)
        assert [int(layer.cumulative_length) for layer in cache.layers] == [20, 20]
        assert held(cache) == before
    roomy = CarambaStaticCache(model, "q4", max_cache_len=256)
    model(prompt, past_key_values=roomy)
    long, twin = ids.repeat(1, 200), copy.deepcopy(roomy)
    with pytest.raises(ValueError, match="not a mask"):
        model(long, past_key_values=roomy, attention_mask=own[..., :1].expand(2, 1, 200, 256))
    found, wanted = (model(ids, past_key_values=made).logits for made in (roomy, twin))
    assert torch.equal(found, wanted)
    for rows in (1, 3):
        given = {"input_ids": ids[:1].repeat(rows, 1), "attention_mask": torch.ones(rows, 21)}
        given["attention_mask"][-1, :5] = 0
        with pytest.raises(ValueError, match=f"has 2 rows, and {rows} came; make another one"):
            model(**given, past_key_values=cache)
    chunked = accelerate(tiny("llama4_text"), "q4")
    cache = CarambaStaticCache(chunked, "q4", max_cache_len=64)
    chunked(prompt, past_key_values=cache)
    with pytest.raises(ValueError, match="one token at a time"):
        chunked(ids.repeat(1, 3), past_key_values=cache)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [20, 20]


@torch.no_grad()
def test_a_compiled_step_refuses_values_that_are_too_large() -> None:
    model = accelerate(tiny("llama"), "q4")
    cache = CarambaStaticCache(model, "q4", max_cache_len=64)
    prompt = batch()["input_ids"]
    model(prompt, past_key_values=cache)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    length = prompt.shape[1]
    first, second = (
        {"cache_position": torch.tensor([at])} if IS_OLD else {} for at in (length, length + 1)
    )
    step(prompt[:, :1], past_key_values=cache, **first)
    model.model.layers[1].self_attn.v_proj.weight.mul_(1e7)
    with pytest.raises(RuntimeError, match=r"values are too large, since a cache in .*'bf16'"):
        step(prompt[:, :1], past_key_values=cache, **second)


@pytest.mark.parametrize("kind", [CarambaCache, CarambaStaticCache])
def test_a_copy_made_in_inference_mode_goes_on_outside_of_it(kind: Any) -> None:
    model = accelerate(tiny("llama"), "q4")
    cache = kind(model, "fp32", **({} if kind is CarambaCache else {"max_cache_len": 64}))
    with torch.inference_mode():
        model(batch()["input_ids"], past_key_values=cache)
        copied = copy.deepcopy(cache)
    with torch.no_grad():
        given = batch()["input_ids"][:, :1]
        found, wanted = (model(given, past_key_values=made).logits for made in (copied, cache))
    assert torch.equal(found, wanted)


def test_the_codes_of_a_copy_are_not_taken_for_keys() -> None:
    model = accelerate(tiny("llama"), "fp32")
    cache = CarambaStaticCache(model, "fp32", max_cache_len=64)
    with torch.no_grad():
        model(batch()["input_ids"], past_key_values=cache)
    for made in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        with pytest.raises(RuntimeError, match="whose update was not the last one"):
            check_no_codes(made.layers[0].keys)


@torch.no_grad()
def test_a_copy_knows_when_its_model_is_restored() -> None:
    model = accelerate(tiny("llama"), "fp32")
    cache = CarambaStaticCache(model, "fp32", max_cache_len=128)
    ids = torch.arange(3, 12)[None]
    model(ids, past_key_values=cache)
    copied = copy.deepcopy(cache)
    expected, found = (model(ids[:, :1], past_key_values=x).logits for x in (cache, copied))
    assert torch.equal(found, expected)
    restore(model)
    with pytest.raises(ValueError, match=r"does not use our attention.*accelerate"):
        model(ids[:, :1], past_key_values=copied)
    both = copy.deepcopy([model, cache])
    assert both[1].common.config is both[0].config is not model.config


@torch.no_grad()
def test_padding_between_tokens_is_refused() -> None:
    model = accelerate(tiny("llama"), "q8")
    given = batch()
    given["attention_mask"][0, 4] = 0
    cache = CarambaStaticCache(model, "q8", max_cache_len=40)
    with pytest.raises(ValueError, match="padding between tokens"):
        model(**given, past_key_values=cache, use_cache=True)


# -- room --------------------------------------------------------------------------------------


def held(cache: CarambaStaticCache) -> tuple[int, list[int], bytes]:
    """What a cache holds."""
    layer = cache.layers[-1]
    codes = b"".join(x.numpy().tobytes() for x in (layer.k.codes, layer.v.codes))
    return int(cache.get_seq_length()), layer.lengths.tolist(), codes


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_more_tokens_than_room_raise_before_anything_is_written(kind: str) -> None:
    model = accelerate(tiny("llama"), kind)
    cache = CarambaStaticCache(model, kind, max_cache_len=22)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM: .*room for 22 tokens, holds 0, and 30"
    ):
        model(input_ids=batch(30)["input_ids"], past_key_values=cache, use_cache=True)
    model(input_ids=batch(20)["input_ids"], past_key_values=cache, use_cache=True)
    before = held(cache)
    for count in (3, 40):
        with pytest.raises(ValueError, match=rf"holds 20, and {count} more came.*max_cache_len"):
            model(input_ids=batch(count)["input_ids"], past_key_values=cache, use_cache=True)
        assert held(cache) == before
    model(input_ids=batch(2)["input_ids"][:, :2], past_key_values=cache, use_cache=True)
    assert int(cache.get_seq_length()) == 22
    k, v = torch.zeros(2, 2, 2, 1, 16)
    before = held(cache)
    with pytest.raises(ValueError, match="holds 22, and 1 more"):
        cache.update(k, v, 1)
    assert held(cache) == before


@pytest.mark.parametrize("compiled", [False, True])
def test_generate_says_that_a_static_cache_is_full(compiled: bool) -> None:
    """Masks are made outside of the compiled step: there the host knows."""
    model = accelerate(tiny("llama"), "q8")
    cache = CarambaStaticCache(model, "q8", max_cache_len=24)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = compiled
    with pytest.raises(ValueError, match="room for 24 tokens, holds 24, and 1 more came"):
        model.generate(
            **batch(), past_key_values=cache, max_new_tokens=12, do_sample=False, compile_config=config
        )  # fmt: skip


# -- crop --------------------------------------------------------------------------------------


def crop(cache: Any, removed: int) -> None:
    cache.crop(-removed if compat.CROP_REMOVES else int(cache.get_seq_length()) - removed)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kind", ["fp32", "q4", "nf4:plain,sink_len=4,residual_len=8,tail_slack=4"])
@pytest.mark.parametrize("removed", [2, 11, 31])
def test_a_cropped_cache_is_what_a_cropped_dynamic_one_is(
    family: str, kind: str, removed: int
) -> None:
    """Within the slack of a tail that is as if the tokens had never been."""
    model = accelerate(tiny(family, initializer_range=0.05), kind)
    ids = torch.randint(3, 97, (2, 110), generator=torch.Generator().manual_seed(3))
    static = CarambaStaticCache(model, kind, max_cache_len=160)
    caches: list[Any] = [static, CarambaCache(model, kind)]
    feed(model, caches, [ids[:, :70], *ids[:, 70:].split(1, dim=1)])
    for cache in caches:
        crop(cache, removed)
    assert int(static.get_seq_length()) == 110 - removed
    if removed <= 4:
        caches.append(CarambaStaticCache(model, kind, max_cache_len=160))
        feed(model, caches[2:], [ids[:, :70], *ids[:, 70 : 110 - removed].split(1, dim=1)])
    found = feed(model, caches, ids[:, :3].split(1, dim=1))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-3, atol=1e-3)
    crop(static, 113 - removed)
    assert int(static.get_seq_length()) == 0
    fresh = CarambaStaticCache(model, kind, max_cache_len=160)
    first, second = feed(model, [static, fresh], [ids[:, :70], ids[:, 70:71]])
    assert torch.equal(first, second)


def feed(model: Any, caches: list[Any], parts: Any) -> list[torch.Tensor]:
    """The logits of the last of ``parts`` with each cache."""
    found = []
    for cache in caches:
        for part in parts:
            logits = model(input_ids=part, past_key_values=cache, use_cache=True).logits
        found.append(logits)
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("by", ["lookup", "assistant"])
def test_assisted_generation(family: str, by: str) -> None:
    model = tiny(family)
    ids = torch.tensor([[5, 9, 17, 8, 21, 5, 9, 17, 8, 33, 40, 5, 9]])
    given: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, input_ids=ids)
    expected = model.generate(**given)
    given |= (
        {"prompt_lookup_num_tokens": 4}
        if by == "lookup"
        else {"assistant_model": tiny("llama", num_hidden_layers=1)}
    )
    accelerate(model, "fp32")
    cache = CarambaStaticCache(model, "fp32", max_cache_len=64)
    if not IS_OLD:
        assert torch.equal(model.generate(**given, past_key_values=cache), expected)
        if compat.CACHE == "cache":  # from 5.24 on
            assert torch.equal(model.generate(**given, cache_implementation="static"), expected)
            return
        with pytest.raises(ValueError, match="not supported with Static cache"):
            model.generate(**given, cache_implementation="static")
        return
    with pytest.raises(ValueError, match="not supported with Static cache"):
        model.generate(**given, past_key_values=cache)
    with pytest.warns(UserWarning, match="a CarambaCache is used"):
        assert torch.equal(model.generate(**given, cache_implementation="static"), expected)


@torch.no_grad()
def test_a_sliding_layer_has_room_for_whole_rows() -> None:
    model = accelerate(tiny("mistral"), "fp32")
    ids = torch.arange(600)[None] % 50 + 3
    fixed = CarambaStaticCache(model, "fp32", max_cache_len=600)
    growing = CarambaCache(model, "fp32")
    for part in (ids[:, :300], *ids[:, 300:].split(100, dim=1)):
        found, expected = (
            model(input_ids=part, past_key_values=cache, use_cache=True).logits
            for cache in (fixed, growing)
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("family", "prefill"), [("llama", "stored"), ("gemma3_text", "exact")])
def test_more_tokens_at_once_than_a_tail_has_room_for(family: str, prefill: Any) -> None:
    """Chunks of a prompt and later turns, with steps between them, and steps that the host does not see."""
    model = accelerate(tiny(family, initializer_range=0.05), "q4", prefill=prefill)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    fixed = CarambaStaticCache(model, "q4", prefill=prefill, max_cache_len=200)
    growing = CarambaCache(model, "q4", prefill=prefill)
    mask = torch.ones(2, 181, dtype=torch.int64)
    mask[1, :7] = 0
    ids = torch.randint(3, 97, (2, 181), generator=torch.Generator().manual_seed(3))
    end = 0
    for count in (40, 1, 1, 50, 14, 1, 33, 40, 1):
        start, end = end, end + count
        found, expected = (
            run(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
                cache_position=torch.arange(start, end),
            ).logits[:, -1]
            for run, cache in (
                (step if count == 1 and not IS_OLD else model, fixed),
                (model, growing),
            )
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_model_that_remembers_positions_of_what_it_last_generated() -> None:
    """The trial whether it reads packed is of one row, whatever came before."""
    text = dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    vision = dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4)
    torch.manual_seed(3)
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision)
    ).eval()
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, pad_token_id=PAD)
    expected = model.generate(**batch(), **options)
    accelerate(model, "fp32")
    assert torch.equal(
        model.generate(**batch(), **options, cache_implementation="static"), expected
    )
