"""Padding in front of rows, and masks, as caches are told of them step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import parse
from support.hf_matrix import tiny
from torch import Tensor

from caramba_fast.hf import CarambaCache, CarambaStaticCache, accelerate, restore
from caramba_fast.hf.layers import Common
from caramba_fast.hf.masks import Pattern, PatternMask
from caramba_fast.hf.settings import CacheSettings

LEAD = 11


def padded(lead: int = LEAD) -> tuple[Tensor, Tensor]:
    """Ids and mask of two rows of 20, the first with ``lead`` tokens of padding in front."""
    ids = torch.arange(3, 43).view(2, 20).clone()
    mask = torch.ones_like(ids)
    ids[0, :lead], mask[0, :lead] = 0, 0
    return ids, mask


def caches(model: Any, kind: str, prefill: str = "stored") -> list[Any]:
    return [
        CarambaStaticCache(model, kind, max_cache_len=64, prefill=prefill),
        CarambaCache(model, kind, prefill=prefill),
    ]


@torch.no_grad()
def fed(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    if mask is not None:
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache, **more).logits


# -- rows that start behind the first chunk ----------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_a_static_cache_takes_prompts_in_chunks(family: str, prefill: str) -> None:
    """Padding is longer than the first chunk: where the row starts is known only later."""
    model = tiny(family)
    ids, mask = padded()
    options: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    # transformers 4 counts positions over padding in chunks; 5.0 has no cache for them unless it is given one.
    chunks = {} if parse(transformers.__version__) >= parse("5.0") else {"prefill_chunk_size": 4}
    expected = model.generate(ids, **options, **chunks)
    accelerate(model, "fp32", prefill=prefill)
    options |= {"cache_implementation": "static", "disable_compile": True}
    found = model.generate(ids, **options, prefill_chunk_size=4)
    restore(model)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["fp32", "q8", "q4", "nf4:plain,sink_len=4,residual_len=8"])
def test_chunks_are_stored_as_in_a_dynamic_cache(kind: str) -> None:
    model = accelerate(tiny("llama", initializer_range=0.05), kind, prefill="stored")
    ids, mask = padded()
    found = []
    for cache in caches(model, kind):
        for i in range(0, 20, 5):
            out = fed(model, cache, ids[:, i : i + 5], mask[:, : i + 5])
        longer = torch.cat((mask, mask[:, -1:]), dim=1)
        found.append(torch.stack((out[:, -1], fed(model, cache, ids[:, :1], longer)[:, -1])))
        starts = cache.layers[-1].starts if isinstance(cache, CarambaStaticCache) else None
        assert starts is None or starts.tolist() == [LEAD, 0]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


# -- masks a static cache does not follow ------------------------------------------------------


@pytest.mark.parametrize("lead", [0, 4])
def test_a_contradicting_mask_is_refused(lead: int) -> None:
    model = accelerate(tiny("llama"), "fp32")
    cache = CarambaStaticCache(model, "fp32", max_cache_len=64)
    ids, mask = padded(3)
    fed(model, cache, ids, mask)
    other = torch.ones(2, 21, dtype=torch.int64)
    other[0, :lead] = 0
    for given in (other, None):
        with pytest.raises(ValueError, match="rows start elsewhere"):
            fed(model, cache, ids[:, :1], given)
    assert int(cache.get_seq_length()) == 20
    cache.reset()
    fed(model, cache, ids)
    fed(model, cache, ids[:, :1])


def own_mask(queries: int, keys: int) -> Tensor:
    """(1, 1, T, S): the first six tokens see each other."""
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()
    mask[..., :6, :6] = True
    return mask


@torch.no_grad()
def test_a_mask_of_the_callers_own_is_refused() -> None:
    model = accelerate(tiny("llama"), "fp32", prefill="stored")
    ids = torch.arange(3, 20)[None]
    static = CarambaStaticCache(model, "fp32", max_cache_len=64, prefill="stored")
    with pytest.raises(ValueError, match="of the caller's own"):
        model(input_ids=ids, attention_mask=own_mask(17, 64), past_key_values=static)
    exact = CarambaStaticCache(model, "fp32", max_cache_len=64)
    found = model(input_ids=ids, attention_mask=own_mask(17, 64), past_key_values=exact).logits
    stock = CarambaCache(model, "fp32")
    expected = model(input_ids=ids, attention_mask=own_mask(17, 17), past_key_values=stock).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_an_own_mask_behind_an_exact_prompt_is_refused_too() -> None:
    model = accelerate(tiny("llama"), "fp32")
    ids = torch.arange(3, 20)[None]
    for prompt_mask in (None, torch.ones_like(ids)):
        static = CarambaStaticCache(model, "fp32", max_cache_len=64)
        model(input_ids=ids, attention_mask=prompt_mask, past_key_values=static)
        with pytest.raises(ValueError, match="of the caller's own"):
            model(input_ids=ids[:, :1], attention_mask=own_mask(1, 64), past_key_values=static)


@torch.no_grad()
def test_a_pattern_that_is_not_causal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    make = modeling_llama.create_causal_mask

    def prefix(**given: Any) -> Any:
        return make(**given, or_mask_function=lambda b, h, q, k: k < 6)

    model = accelerate(tiny("llama"), "fp32")
    ids = torch.arange(3, 20)[None]
    stored, exact = caches(model, "fp32")[0], caches(model, "fp32", "exact")
    monkeypatch.setattr(modeling_llama, "create_causal_mask", prefix)
    with pytest.raises(ValueError, match="attends causally"):
        fed(model, stored, ids)
    static, dynamic = (fed(model, cache, ids) for cache in exact)
    torch.testing.assert_close(static, dynamic, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_steps_behind_a_block_that_sees_itself_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind an image's tokens: the function is an unknown one, and what it says is causal from there on."""
    from transformers.models.gemma3 import modeling_gemma3

    def block(make: Any) -> Any:
        return lambda **given: make(
            **given, or_mask_function=lambda b, h, q, k: (q > 12) & (q < 18) & (k > 12) & (k < 18)
        )

    model = accelerate(tiny("gemma3_text"), "fp32")
    ids, mask = padded(3)
    static, dynamic = caches(model, "fp32", "exact")
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(modeling_gemma3, name, block(getattr(modeling_gemma3, name)))
    for tokens in (20, 1, 3):
        longer = torch.cat((mask, mask[:, -1:].expand(2, 4)), dim=1)
        held = int(static.get_seq_length())
        given = ids[:, :tokens], longer[:, : held + tokens]
        found, wanted = (fed(model, cache, *given)[:, -1] for cache in (static, dynamic))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


# -- what is made once -------------------------------------------------------------------------


@torch.no_grad()
def test_steps_with_padding_are_made_with_the_same_tensors() -> None:
    model = accelerate(tiny("mistral"), "q8")
    cache = CarambaCache(model, "q8")
    ids, mask = padded(3)
    fed(model, cache, ids, mask)
    known = cache.common.leftpad
    assert known is not None
    for _ in range(3):
        mask = torch.cat((mask, mask[:, -1:]), dim=1)
        fed(model, cache, ids[:, :1], mask)
        assert cache.common.leftpad is known
    layer = cache.layers[0]
    layer.dropped = 2
    slots = layer.slots_of(known)
    assert slots is layer.slots_of(known) and slots.tolist() == [1, 0]
    layer.dropped = 1
    assert layer.slots_of(known).tolist() == [2, 0]
    assert layer.slots_of(known + 1).tolist() == [3, 0]


def test_starts_may_move_while_nothing_but_padding_is_stored() -> None:
    common = Common("Model", CacheSettings.of("q8"))
    first, later = (torch.tensor([n, 0], dtype=torch.int32) for n in (4, 11))
    assert common.rows_start_at(first, 0) and common.rows_start_at(later, 4)
    assert common.leftpad is later
    assert not common.rows_start_at(first, 12) and not common.rows_start_at(None, 12)
    assert not common.rows_start_at(torch.tensor([11, 0, 0], dtype=torch.int32), 12)
    assert common.rows_start_at(later.clone(), 12) and common.leftpad is later


def test_the_values_of_a_mask_are_made_once() -> None:
    leftpad = torch.tensor([0, 3], dtype=torch.int32)
    mask = PatternMask.of((2, 1, 5, 12), torch.device("cpu"), Pattern(causal=True), leftpad)
    assert mask.dense() is mask.dense()
    part = mask[:, :, -2:]
    assert isinstance(part, PatternMask)
    assert torch.equal(part.dense(), mask.dense()[:, :, -2:])
