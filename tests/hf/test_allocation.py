"""What the stores of our caches are made for under transformers: how many tokens, and of which dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hf_matrix import tiny

from caramba_fast.cache import LayerKVCache
from caramba_fast.hf import (
    CarambaCache,
    CarambaStaticCache,
    accelerate,
    growing_layer,
    integration,
)
from caramba_fast.hf.compat import CACHE


@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_an_answer_that_may_be_long_allocates_no_more_than_it_needs(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", vocab_size=64, max_position_embeddings=100_000)
    accelerate(model, "q4")
    prompt = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))

    def stops_at(tokens: int) -> Any:
        return [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= tokens)]

    options = dict(return_dict_in_generate=True, do_sample=False, eos_token_id=None, pad_token_id=0)
    out = model.generate(prompt, **{limit: 90_000}, stopping_criteria=stops_at(44), **options)
    stores = [layer.store for layer in out.past_key_values.layers]
    assert out.sequences.shape[1] == 44
    assert {store.max_seq_len <= 40 + integration.FIRST_TOKENS for store in stores} == {True}
    monkeypatch.setattr(integration, "FIRST_TOKENS", 8)
    grown = model.generate(prompt, **{limit: 90_000}, stopping_criteria=stops_at(160), **options)
    whole = model.generate(prompt, max_length=160, **options)
    assert torch.equal(grown.sequences, whole.sequences) and grown.sequences.shape[1] == 160
    assert grown.past_key_values.layers[0].store.max_seq_len < 400
    total = 70 if limit == "max_length" else 30
    exact = model.generate(prompt, **{limit: total}, **options)
    assert exact.past_key_values.layers[0].store.max_seq_len == 69
    given = CarambaCache(model, "q4", max_seq_len=100)
    with pytest.raises(ValueError, match="max_seq_len=100"):
        model.generate(prompt, **{limit: 90_000}, **options, **{CACHE: given})
    assert given.get_seq_length() == 0


def test_a_window_keeps_its_room_where_an_answer_may_be_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("mistral", vocab_size=64, sliding_window=640, max_position_embeddings=9000)
    accelerate(model, "q4")
    prompt = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    options = dict(max_new_tokens=2600, do_sample=False, eos_token_id=None, pad_token_id=0)
    grown: list[int] = []
    grow, moved = LayerKVCache.grow, LayerKVCache.without_front
    monkeypatch.setattr(
        LayerKVCache, "grow", lambda store, size: grown.append(size) or grow(store, size)
    )
    sizes: list[int] = []
    monkeypatch.setattr(
        LayerKVCache, "without_front",
        lambda store, count, size: sizes.append(size) or moved(store, count, size),
    )  # fmt: skip
    monkeypatch.setattr(integration, "FIRST_TOKENS", 100)
    model.generate(prompt, **options)
    most = 640 * 3 // 2 + 2 * growing_layer.SLACK
    assert grown and max(grown) <= most, grown
    assert sizes and set(sizes) == {most}, "no growth after a move"


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
)
def test_a_cache_that_was_reset_takes_the_dtype_of_what_comes(
    before: torch.dtype, now: torch.dtype, static: bool
) -> None:
    model = tiny("llama")
    accelerate(model, "q8")

    def made() -> Any:
        return (
            CarambaStaticCache(model, "q8", max_cache_len=64)
            if static
            else CarambaCache(model, "q8")
        )

    cache, ids = made(), torch.arange(5)[None]
    model.to(before)(ids, **{CACHE: cache})
    cache.reset()
    model.to(now)(ids, **{CACHE: cache})
    fresh = made()
    model(ids, **{CACHE: fresh})
    for used, new in zip(cache.layers, fresh.layers, strict=True):
        assert (used.dtype, used.held_below) == (new.dtype, new.held_below) and used.dtype == now
