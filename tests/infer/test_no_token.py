"""Where nothing can be chosen, every way of decoding says so: NaN and -inf never become a token."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.infer import (
    Generator,
    GreedySampling,
    RandomSampling,
    SpeculativeGenerator,
)
from caramba_fast.infer.inferencer import CausalInferencer, ChunkwiseInferencer
from caramba_fast.infer.kv_cache import QuantizedKVCache
from caramba_fast.models import InferContext, ModelConfig, Transformer
from caramba_fast.models.attention import Attention, DecoupledAttention
from caramba_fast.models.config import DecoupledDims
from caramba_fast.quality.text import sample_text

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.3,
)  # fmt: skip
ROWS = [[3, 14, 15, 9, 26], [5, 35, 8], [9, 7, 9, 3, 2, 38, 4, 6]]
GREEDY = {"temperature": 0.0}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k and top_p": {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "typical_p": {"temperature": 1.0, "typical_p": 0.9},
    "beams": {"num_beams": 3, **GREEDY},
    "drawn beams": {"num_beams": 3, "temperature": 1.0},
    "lookup": {"spec_k": 3, **GREEDY},
    "lookup, drawn": {"spec_k": 3, "temperature": 1.0},
    "lookup, matched": {"spec_k": 3, "temperature": 1.0, "spec_method": "sample_match"},
    "draft": {"spec_k": 3, **GREEDY},
    "draft, drawn": {"spec_k": 3, "temperature": 1.0},
    "draft, matched": {"spec_k": 3, "temperature": 1.0, "spec_method": "sample_match"},
}


class Planted(Transformer):
    """A model whose logits of one row are spoilt from a length on."""

    spoil: Callable[[Tensor], None] | None = None
    row, length = 0, 0

    def forward(self, query_token_ids: Tensor, kv_cache: Any = None, **options: Any) -> Tensor:
        logits = super().forward(query_token_ids, kv_cache, **options)
        longest = query_token_ids.shape[1] if kv_cache is None else kv_cache.pos
        if self.spoil is not None and longest >= self.length:
            self.spoil(logits[min(self.row, len(logits) - 1)])
        return logits


@cache
def _made(seed: int) -> Planted:
    torch.manual_seed(seed)
    return Planted(CONFIG).eval()


def new_model(seed: int = 11) -> Planted:
    return copy.deepcopy(_made(seed))


def generator_of(mode: str, model: Planted, draft: Planted, **settings: Any) -> Generator:
    shared = {"cache_kind": "fp32", "max_new_tokens": 8, "max_seq_len": 64, "seed": 3}
    settings = {**shared, **MODES[mode], **settings}
    if "spec_k" in settings:
        return SpeculativeGenerator(model, draft if "draft" in mode else None, **settings)
    return Generator(model, **settings)


def fill(value: float, ids: slice = slice(None)) -> Callable[[Tensor], None]:
    def spoil(logits: Tensor) -> None:
        logits[..., ids] = value

    return spoil


SPOILT = {
    "all NaN": fill(math.nan),
    "one NaN": fill(math.nan, slice(17, 18)),
    "one +inf": fill(math.inf, slice(17, 18)),
    "all -inf": fill(-math.inf),
}


@pytest.mark.parametrize("late", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("mode", MODES)
def test_spoilt_logits_are_told(mode: str, spoil: str, late: bool) -> None:
    model = new_model()
    model.row = 3 if "beams" in mode and late else 1  # then every prompt has three rows
    model.length = 11 if late else 0
    generator = generator_of(mode, model, new_model(12))
    model.spoil = SPOILT[spoil]
    with pytest.raises(ValueError, match=r"row 1.*token \d+.*model's logits"):
        generator.generate(ROWS)
    assert generator.tokens == [], "the conversation is as it was"


@pytest.mark.parametrize("mode", [mode for mode in MODES if "beams" not in mode])
def test_a_stream_tells_it_too(mode: str) -> None:
    model = new_model()
    generator = generator_of(mode, model, new_model(12))
    model.length, model.spoil = 11, SPOILT["all NaN"]
    with pytest.raises(ValueError, match=r"row 0.*token \d+.*model's logits"):
        list(generator.generate_iter(ROWS))


def banned(_: Tensor, scores: Tensor) -> Tensor:
    return torch.full_like(scores, -torch.inf)


def nan_scores(_: Tensor, scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[1, 5] = torch.nan
    return scores


@pytest.mark.parametrize("mode", MODES)
def test_everything_removed_is_told(mode: str) -> None:
    generator = generator_of(mode, new_model(), new_model(12))
    with pytest.raises(ValueError, match=r"row 0.*token 1.*every token was removed.*suppress_tok"):
        generator.generate(ROWS, suppress_tokens=tuple(range(61)))
    with pytest.raises(ValueError, match=r"row 0.*every token was removed"):
        generator.generate(ROWS, logits_processor=banned)
    with pytest.raises(ValueError, match=r"row \d.*processor.*not finite"):
        generator.generate(ROWS, logits_processor=nan_scores)
    assert generator.generate(ROWS, suppress_tokens=tuple(range(60)))[:, -1].tolist() == [60] * 3


@pytest.mark.parametrize("mode", [mode for mode in MODES if "draft" in mode])
def test_a_draft_that_is_broken_is_told(mode: str) -> None:
    draft = new_model(12)
    generator = generator_of(mode, new_model(), draft)
    draft.spoil = SPOILT["all NaN"]
    with pytest.raises(ValueError, match=r"row 0.*draft model's logits"):
        generator.generate(ROWS)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "draft" in mode])
def test_a_guess_may_run_into_a_dead_end_that_the_text_does_not(mode: str) -> None:
    """The draft would always say 7, behind which nothing is allowed; the target never says it."""
    model, draft = new_model(), new_model(12)
    model.spoil, draft.spoil = fill(-1e9, slice(7, 8)), fill(1e3, slice(7, 8))
    dead_end = tuple((7, token) for token in range(61))
    generator = generator_of(mode, model, draft, bad_words_ids=dead_end)
    new = generator.generate([[50]])[0, 1:].tolist()
    assert len(new) == 8 and 7 not in new
    assert generator.stats.drafted > 0


@pytest.mark.parametrize("mode", ["greedy", "temperature", "beams", "lookup", "draft"])
@pytest.mark.parametrize(
    "where", ["embedding", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "norm", "lm_head"]
)
@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_nan_in_weights_is_told(mode: str, where: str, prefill: str) -> None:
    model = new_model()
    generator = generator_of(mode, model, new_model(12), prefill=prefill)
    with torch.no_grad():
        if where == "embedding":
            model.model.embed_tokens.weight[9, 0] = torch.nan
        else:
            names = [n for n, _ in model.named_parameters() if where in n and "embed" not in n]
            model.get_parameter(names[0]).view(-1)[3] = torch.nan
    with pytest.raises(ValueError, match=r"model's logits"):
        generator.generate(ROWS)


# -- a prompt that attends to its exact K and V --------------------------------------------


def _attended(family: str, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """(B, H, T, D) of exact causal attention, as the family of models computes it."""
    if family == "transformer":
        attention = Attention(CONFIG.model_copy(update={"sliding_window": window}))
        return attention._self_attend(q, k, v)
    if family == "context":
        context = InferContext(None, torch.arange(q.shape[2])[None], local_window=window)
        return context.attend(0, q, k, v)
    dims = DecoupledDims(sem_dim=64, geo_dim=64, v_dim=128, null_kv=family.endswith("null"))
    attention = DecoupledAttention(CONFIG.model_copy(update={"decoupled": dims}))
    return attention._self_attend(*q.split(16, -1), *k.split(16, -1), v)


HALVES = (torch.bfloat16, torch.float16)
ATTENTIONS = [
    *product(("transformer", "context"), (torch.float32, *HALVES), (None, 4)),
    *product(("decoupled", "decoupled with null"), (torch.float32,), (None,)),  # it has no window
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("family", "dtype", "window"), ATTENTIONS)
def test_exact_attention_shows_what_is_not_finite(
    family: str, dtype: torch.dtype, window: int | None, bad: float
) -> None:
    """torch's causal SDPA returns finite numbers for a query, or a key, of NaN."""
    heads = 4
    for which, length in product("qkv", (1, 5, 40, 130)):
        row, place = torch.arange(length), length // 2
        made = [torch.randn(1, h, length, 32).to(dtype) for h in (heads, 2, 2)]
        made["qkv".index(which)][0, 1, place, 3] = bad
        with torch.no_grad():
            spoilt = ~_attended(family, *made, window).isfinite().all(-1)[0]
        seen = (row == place) if which == "q" else (row >= place)
        if which != "q" and window is not None:
            seen &= row - place < window
        mine = [1] if which == "q" else [2, 3]  # heads that read the second kv head
        for head in range(heads):
            if head in mine:
                assert bool((spoilt[head] | ~seen).all()), (which, head, "hidden")
            elif which != "v":
                assert not spoilt[head].any(), (which, head, "other heads are untouched")


# -- single steps ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [GreedySampling(), RandomSampling(), RandomSampling(0.0)])
@pytest.mark.parametrize("spoil", SPOILT)
def test_inferencers_tell_it(strategy: Any, spoil: str) -> None:
    model = new_model()
    for inferencer in (CausalInferencer(model), ChunkwiseInferencer(model, 2)):
        cache = QuantizedKVCache(ModelKVCache(model.cache_layout, 2, 32))
        ids = torch.tensor([[3, 14, 15], [5, 35, 8]])
        model.spoil = None
        first = inferencer.prefill(ids, cache, strategy)
        model.spoil, model.row = SPOILT[spoil], 1
        with pytest.raises(ValueError, match="row 1"):
            inferencer.decode(first.token_ids, cache, 3, strategy)
        assert cache.model_cache.row_lengths == [3, 3]


def test_text_a_model_writes_for_its_own_plan_is_refused() -> None:
    model = new_model()
    model.spoil = SPOILT["all NaN"]
    with pytest.raises(ValueError, match="row 0"):
        sample_text(model, 2, 8)
