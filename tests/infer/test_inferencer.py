"""The inferencer protocols: every statement of their page, over every kind, contiguous and paged.

`KVCacheContract` and `InferencerContract` use nothing but the protocols' names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engines import small_model, steady
from torch import Tensor

from caramba_fast.infer.inferencer import (
    CausalInferencer,
    ChunkwiseInferencer,
    GreedySampling,
    LanguageModel,
    RandomSampling,
)
from caramba_fast.infer.kv_cache import (
    DecodeOutput,
    Inferencer,
    KVCache,
    KVState,
    PrefillOutput,
    QuantizedKVCache,
    SampleStrategy,
)
from caramba_fast.models import ModelConfig, Transformer, load_demo

VOCABULARY, LAYERS, HEADS, DIM = 61, 2, 2, 16
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=HEADS,
    head_dim=DIM,
    initializer_range=0.3,
)
GREEDY = GreedySampling()
QUERY = torch.tensor([[3, 14, 15, 9, 26]])
BATCH = torch.tensor([[3, 14, 15, 9], [5, 35, 8, 31], [9, 7, 2, 38]])
SETUPS = {
    "fp32": {"kind": "fp32"},
    "fp32 paged": {"kind": "fp32", "page_size": 32},
    "bf16": {"kind": "bf16"},
    "q8": {"kind": "q8"},
    "q4 paged": {"kind": "q4:plain", "page_size": 32},
    "q4": {"kind": "q4"},
    "nf4": {"kind": "nf4:plain"},
    "q8/q4": {"kind": "q8:plain/q4:plain"},
}
#: Relative L2 error of what comes back.
TOLERANCE = {"fp32": 0.0, "bf16": 4e-3, "q8": 1e-2, "q4": 0.15, "nf4": 0.15, "q8/q4": 0.15}


def new_model(seed: int = 11, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    return steady(Transformer(CONFIG.model_copy(update=changes)).eval())


@pytest.fixture(scope="module")
def model() -> Transformer:
    return new_model()


@pytest.fixture(params=SETUPS, name="setup")
def _setup(request: pytest.FixtureRequest) -> str:
    return request.param


def new_cache(model: Any, setup: str = "fp32", rows: int = 1, room: int = 64, **more: Any) -> Any:
    return QuantizedKVCache.of(model, batch_size=rows, max_seq_len=room, **SETUPS[setup], **more)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def states(tokens: int, rows: int = 1) -> list[KVState]:
    shape = (rows, HEADS, tokens, DIM)
    return [KVState(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)]


@torch.no_grad()
def uncached(model: Transformer, ids: Tensor, steps: int) -> list[list[int]]:
    for _ in range(steps):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    return ids[:, -steps:].tolist()


# -- the cache -------------------------------------------------------------------------------


class KVCacheContract:
    """For derived classes: ``kv_cache`` is a new cache of one row."""

    def test_it_is_a_kv_cache(self, kv_cache: KVCache) -> None:
        assert isinstance(kv_cache, KVCache)

    def test_a_new_cache_has_no_tokens_and_no_states(self, kv_cache: KVCache) -> None:
        assert kv_cache.get_num_tokens() == 0
        assert kv_cache.get_kv_states() == []

    def test_update_adds_the_tokens_it_is_given(self, kv_cache: KVCache) -> None:
        held = 0
        for count in (1, 7, 32, 1):
            kv_cache.update(states(count))
            held += count
            assert kv_cache.get_num_tokens() == held

    def test_states_have_one_entry_a_layer_in_the_pages_shape(self, kv_cache: KVCache) -> None:
        kv_cache.update(states(5))
        found = kv_cache.get_kv_states()
        assert len(found) == LAYERS
        for state in found:
            assert isinstance(state, KVState)
            assert state.keys.shape == state.values.shape == (1, HEADS, 5, DIM)

    def test_states_are_what_was_stored_in_order(self, kv_cache: KVCache, close: float) -> None:
        first, second = states(6), states(3)
        kv_cache.update(first)
        kv_cache.update(second)
        for a, b, found in zip(first, second, kv_cache.get_kv_states(), strict=True):
            for parts in zip(a, b, found, strict=True):
                whole = torch.cat(parts[:2], dim=2)
                assert float((parts[2] - whole).norm() / whole.norm()) <= close

    @pytest.mark.parametrize("count", [0, 1, 4, 9])
    def test_crop_removes_the_latest_tokens(self, kv_cache: KVCache, count: int) -> None:
        kv_cache.update(states(9))
        before = kv_cache.get_kv_states()
        kv_cache.crop(count)
        assert kv_cache.get_num_tokens() == 9 - count
        for old, new in zip(before, kv_cache.get_kv_states(), strict=True):
            assert torch.equal(new.keys, old.keys[:, :, : 9 - count])
            assert torch.equal(new.values, old.values[:, :, : 9 - count])

    def test_cropping_all_and_storing_again(self, kv_cache: KVCache, close: float) -> None:
        kv_cache.update(states(9))
        kv_cache.crop(9)
        assert [state.keys.shape[2] for state in kv_cache.get_kv_states()] == [0] * LAYERS
        again = states(4)
        kv_cache.update(again)
        found = kv_cache.get_kv_states()[0].values
        assert float((found - again[0].values).norm() / again[0].values.norm()) <= close

    @pytest.mark.parametrize("count", [-1, 10])
    def test_crops_beyond_what_is_stored_raise(self, kv_cache: KVCache, count: int) -> None:
        kv_cache.update(states(9))
        with pytest.raises(ValueError, match=rf"{count}.*0 to 9"):
            kv_cache.crop(count)
        assert kv_cache.get_num_tokens() == 9

    def test_a_crop_of_an_empty_cache_is_nothing_or_an_error(self, kv_cache: KVCache) -> None:
        kv_cache.crop(0)
        assert kv_cache.get_kv_states() == []
        with pytest.raises(ValueError, match="0 to 0"):
            kv_cache.crop(1)

    def test_crops_are_ints(self, kv_cache: KVCache) -> None:
        for count in (1.0, None, True):
            with pytest.raises(TypeError, match="num_tokens_crop"):
                kv_cache.crop(count)  # type: ignore[arg-type]

    def test_a_wrong_number_of_layers_raises_and_stores_nothing(self, kv_cache: KVCache) -> None:
        for wrong in ([], states(2)[:1], states(2) * 2):
            with pytest.raises(ValueError, match=f"{len(wrong)} entries.*{LAYERS} layers"):
                kv_cache.update(wrong)
        assert kv_cache.get_num_tokens() == 0

    def test_unequal_shapes_raise_and_store_nothing(self, kv_cache: KVCache) -> None:
        kv_cache.update(states(3))
        long, wide = states(2), states(2)
        long[1] = states(4)[1]
        wide[1] = KVState(torch.randn(1, HEADS, 2, DIM + 1), wide[1].values)
        flat = [KVState(s.keys[0], s.values[0]) for s in states(2)]
        uneven = [KVState(s.keys, s.values[:, :, :1]) for s in states(2)]
        for wrong in (long, wide, flat, uneven):
            with pytest.raises(ValueError, match=r"same number|shape|needed"):
                kv_cache.update(wrong)
            assert kv_cache.get_num_tokens() == 3
            assert {state.keys.shape[2] for state in kv_cache.get_kv_states()} == {3}

    def test_no_room_raises_and_stores_nothing(self, kv_cache: KVCache) -> None:
        kv_cache.update(states(60))
        with pytest.raises(ValueError, match="max_seq_len is 64"):
            kv_cache.update(states(5))
        assert kv_cache.get_num_tokens() == 60
        kv_cache.update(states(4))


class TestQuantizedKVCache(KVCacheContract):
    @pytest.fixture
    def kv_cache(self, model: Transformer, setup: str) -> KVCache:
        return new_cache(model, setup)

    @pytest.fixture
    def close(self, setup: str) -> float:
        return TOLERANCE[setup.removesuffix(" paged")]


def test_decoupled_layers_keep_semantic_and_geometric_keys_side_by_side() -> None:
    model = load_demo("dba")
    cache = QuantizedKVCache.of(model, "fp32", 1, 64)
    CausalInferencer(model).prefill(QUERY, cache, GREEDY)
    stored = cache.get_kv_states()
    other = QuantizedKVCache.of(model, "fp32", 1, 64)
    other.update(stored)
    for a, b in zip(stored, other.get_kv_states(), strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    with pytest.raises(ValueError, match="semantic"):
        other.update([KVState(s.keys[..., 1:], s.values) for s in stored])


# -- the inferencer --------------------------------------------------------------------------


class InferencerContract:
    """For derived classes: ``inferencer`` and ``setup``, whose cache kinds it is tried with."""

    def cache(self, inferencer: Any, setup: str, rows: int = 1) -> Any:
        return new_cache(inferencer.model, setup, rows, prefill="stored")

    def test_it_is_an_inferencer(self, inferencer: Inferencer) -> None:
        assert isinstance(inferencer, Inferencer)

    @pytest.mark.parametrize("query", [QUERY, BATCH, QUERY[:, :1]], ids=["row", "batch", "one"])
    def test_prefill(self, inferencer: Any, setup: str, query: Tensor) -> None:
        cache = self.cache(inferencer, setup, len(query))
        out = inferencer.prefill(query, cache, GREEDY)
        assert isinstance(out, PrefillOutput)
        assert out.token_ids.shape == (len(query), 1)
        assert out.token_ids.dtype == torch.int64
        assert out.token_logits.shape == (*query.shape, VOCABULARY)
        assert torch.equal(out.token_ids[:, 0], out.token_logits[:, -1].argmax(-1))
        assert cache.get_num_tokens() == query.shape[1]
        assert {len(state.keys) for state in cache.get_kv_states()} == {len(query)}

    def test_decode(self, inferencer: Any, setup: str) -> None:
        cache = self.cache(inferencer, setup, 3)
        first = inferencer.prefill(BATCH, cache, GREEDY).token_ids
        out = inferencer.decode(first, cache, 6, GREEDY)
        assert isinstance(out, DecodeOutput)
        assert out.token_ids.shape == (3, 6)
        assert out.token_logits.shape == (3, 6, VOCABULARY)
        assert torch.equal(out.token_ids, out.token_logits.argmax(-1))
        # the query and all new tokens but the last, whose K and V the next call computes
        assert cache.get_num_tokens() == BATCH.shape[1] + 6

    def test_decoding_in_two_calls_is_decoding_in_one(self, inferencer: Any, setup: str) -> None:
        whole, parts = (self.cache(inferencer, setup) for _ in range(2))
        first = inferencer.prefill(QUERY, whole, GREEDY).token_ids
        inferencer.prefill(QUERY, parts, GREEDY)
        expected = inferencer.decode(first, whole, 7, GREEDY).token_ids
        a = inferencer.decode(first, parts, 3, GREEDY).token_ids
        b = inferencer.decode(a[:, -1:], parts, 4, GREEDY).token_ids
        assert torch.equal(torch.cat((a, b), dim=1), expected)

    def test_a_crop_takes_back_what_was_read(self, inferencer: Any, setup: str) -> None:
        cache = self.cache(inferencer, setup)
        before = inferencer.prefill(QUERY, cache, GREEDY)
        inferencer.prefill(torch.tensor([[7, 8, 9]]), cache, GREEDY)
        cache.crop(3)
        cache.crop(1)
        again = inferencer.prefill(QUERY[:, -1:], cache, GREEDY)
        torch.testing.assert_close(
            again.token_logits[:, -1], before.token_logits[:, -1], rtol=1e-4, atol=1e-4
        )

    @pytest.mark.parametrize("limit", [0, -3, 1.5, None, True])
    def test_max_new_tokens_is_positive(self, inferencer: Any, setup: str, limit: Any) -> None:
        with pytest.raises(ValueError, match="max_new_tokens"):
            inferencer.decode(QUERY[:, :1], self.cache(inferencer, setup), limit, GREEDY)

    @pytest.mark.parametrize(
        "query",
        [QUERY[0], QUERY[None], QUERY[:, :0], BATCH[:2], QUERY.float(), [[1, 2]], QUERY > 3],
        ids=["1-d", "3-d", "empty", "rows", "float", "list", "bool"],
    )
    def test_wrong_queries_raise(self, inferencer: Any, setup: str, query: Any) -> None:
        cache = self.cache(inferencer, setup)
        for call in (
            lambda: inferencer.prefill(query, cache, GREEDY),
            lambda: inferencer.decode(query, cache, 2, GREEDY),
        ):
            with pytest.raises((ValueError, TypeError), match="query_token_ids"):
                call()
        assert cache.get_num_tokens() == 0

    def test_no_room_raises_and_leaves_the_cache(self, inferencer: Any, setup: str) -> None:
        cache = self.cache(inferencer, setup)
        inferencer.prefill(QUERY, cache, GREEDY)
        with pytest.raises(ValueError, match="max_seq_len is 64"):
            inferencer.decode(QUERY[:, :1], cache, 80, GREEDY)
        assert cache.get_num_tokens() == QUERY.shape[1]


@pytest.mark.parametrize("kind", ["q4:residual_len=8", "q8:residual_len=16,sink_len=4"])
@pytest.mark.parametrize("failing", ["decode", "prefill", "update"])
def test_an_error_leaves_the_fp16_tail(model: Transformer, kind: str, failing: str) -> None:
    """What was overwritten there cannot be had from the codes again."""
    query = (torch.arange(40) * 7 % VOCABULARY)[None]
    inferencer, found = ChunkwiseInferencer(model, chunk_size=40), []
    for broken in (False, True):
        cache = QuantizedKVCache.of(model, kind, max_seq_len=128)
        inferencer.prefill(query, cache, GREEDY)
        if broken and failing == "update":
            good = KVState(*torch.ones(2, 1, HEADS, 50, DIM))
            with pytest.raises(ValueError, match="shape"):
                cache.update([good, KVState(good.keys[..., :4], good.values)])
        elif broken and failing == "prefill":
            with pytest.raises(ValueError, match="max_seq_len is 128"):
                inferencer.prefill(query.repeat(1, 3), cache, GREEDY)
        elif broken:
            with pytest.raises(ValueError, match="max_seq_len is 128"):
                inferencer.decode(query[:, :1], cache, 100, GREEDY)
        found.append(inferencer.decode(query[:, :1], cache, 3, GREEDY).token_logits)
    assert torch.equal(*found)


class TestCausalInferencer(InferencerContract):
    @pytest.fixture(params=["fp32", "bf16", "q8", "q4 paged", "q4"], name="setup")
    def _setup(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def inferencer(self, model: Transformer) -> CausalInferencer:
        return CausalInferencer(model)


class TestChunkwiseInferencer(InferencerContract):
    @pytest.fixture(params=["fp32 paged", "q8"], name="setup")
    def _setup(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def inferencer(self, model: Transformer) -> ChunkwiseInferencer:
        return ChunkwiseInferencer(model, 2)


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_chunks_do_not_change_what_is_stored_or_said(
    model: Transformer, setup: str, chunk: int
) -> None:
    outs, caches = [], []
    for inferencer in (CausalInferencer(model), ChunkwiseInferencer(model, chunk)):
        caches.append(new_cache(model, setup, prefill="stored"))
        outs.append(inferencer.prefill(QUERY, caches[-1], GREEDY))
    torch.testing.assert_close(outs[0].token_logits, outs[1].token_logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(outs[0].token_ids, outs[1].token_ids)
    for a, b in zip(*(cache.get_kv_states() for cache in caches), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunk", [7, 45, 512])
@pytest.mark.parametrize(
    "kind", ["fp32", "bf16", "q8", "q4", "nf4", "q4:plain", "nf4:plain", "q8:plain/q4:plain"]
)
def test_no_bit_of_what_is_stored_depends_on_chunks(kind: str, chunk: int) -> None:
    """Over groups of keys, tiles and ends of rings: what a query does not see changes nothing of its result."""
    model = small_model()
    query = torch.randint(4, 61, (1, 150), generator=torch.Generator().manual_seed(chunk))
    caches = []
    for tokens in (1, chunk):
        caches.append(
            QuantizedKVCache.of(model, batch_size=1, max_seq_len=160, kind=kind, prefill="stored")
        )
        ChunkwiseInferencer(model, tokens).prefill(query, caches[-1], GREEDY)
    for a, b in zip(*(cache.get_kv_states() for cache in caches), strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


@pytest.mark.parametrize("query", [QUERY, BATCH], ids=["row", "batch"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_greedy_from_an_fp32_cache_equals_whole_forward_passes(
    model: Transformer, query: Tensor, chunk: int | None
) -> None:
    inferencer = ChunkwiseInferencer(model, chunk) if chunk else CausalInferencer(model)
    cache = new_cache(model, rows=len(query))
    first = inferencer.prefill(query, cache, GREEDY).token_ids
    rest = inferencer.decode(first, cache, 9, GREEDY).token_ids
    assert torch.cat((first, rest), dim=1).tolist() == uncached(model, query, 10)


def test_prefill_logits_are_the_models_at_every_position(model: Transformer) -> None:
    cache = new_cache(model)
    CausalInferencer(model).prefill(QUERY[:, :2], cache, GREEDY)
    out = CausalInferencer(model).prefill(QUERY[:, 2:], cache, GREEDY)
    with torch.no_grad():
        torch.testing.assert_close(out.token_logits, model(QUERY)[:, 2:], rtol=1e-4, atol=1e-4)


# -- the end of a text -----------------------------------------------------------------------


def ending_model(model: Transformer, query: Tensor, row: int, step: int) -> tuple[Transformer, int]:
    """The same model, whose EOS is what greedy decoding of ``row`` says at ``step``."""
    eos = uncached(model, query, 12)[row][step]
    ended = Transformer(model.config.model_copy(update={"eos_token_id": eos, "pad_token_id": 60}))
    ended.load_state_dict(model.state_dict())
    return ended.eval(), eos


def test_decoding_stops_at_the_end_of_sequence(model: Transformer) -> None:
    paths = uncached(model, QUERY, 12)[0]
    step = next(i for i in range(3, 12) if paths[i] not in paths[:i])
    ended, eos = ending_model(model, QUERY, 0, step)
    inferencer, cache = CausalInferencer(ended), new_cache(ended)
    first = inferencer.prefill(QUERY, cache, GREEDY).token_ids
    out = inferencer.decode(first, cache, 20, GREEDY)
    assert out.token_ids[0].tolist() == paths[1 : step + 1]
    assert out.token_ids[0, -1] == eos
    assert out.token_logits.shape[1] == step


def test_rows_that_ended_hold_padding_until_all_have(model: Transformer) -> None:
    paths = uncached(model, BATCH, 12)
    row, step = next(
        (r, i)
        for r in range(3)
        for i in range(2, 9)
        if all(paths[r][i] not in paths[o][: 12 if o != r else i] for o in range(3))
    )
    ended, eos = ending_model(model, BATCH, row, step)
    inferencer, cache = CausalInferencer(ended), new_cache(ended, rows=3)
    first = inferencer.prefill(BATCH, cache, GREEDY).token_ids
    out = inferencer.decode(first, cache, 11, GREEDY).token_ids.tolist()
    expected = [path[1:] for path in paths]
    expected[row] = [*paths[row][1 : step + 1], *[60] * (11 - step)]
    assert out == expected
    assert out[row][step - 1] == eos
    assert cache.get_num_tokens() == BATCH.shape[1] + 11


@pytest.mark.parametrize("pad", [None, -1, VOCABULARY])
def test_no_pad_id_means_the_end_of_sequence_id(pad: int | None) -> None:
    """An id outside the vocabulary is none, as with a `Generator`."""
    ended = new_model(eos_token_id=(7, 8), pad_token_id=pad)
    inferencer = CausalInferencer(ended)
    assert inferencer.eos_token_ids == (7, 8)

    class Script:
        steps = iter([[7, 1], [3, 2], [4, 8]])

        def sample(self, logits: Tensor) -> Tensor:
            return torch.tensor(next(self.steps))

    out = inferencer.decode(BATCH[:2, :1], new_cache(ended, rows=2), 9, Script())
    assert out.token_ids.tolist() == [[7, 7, 7], [1, 2, 8]]


def test_a_model_without_an_end_runs_to_the_limit(model: Transformer) -> None:
    assert model.eos_token_id is None
    out = CausalInferencer(model).decode(QUERY[:, :1], new_cache(model), 15, GREEDY)
    assert out.token_ids.shape == (1, 15)


# -- strategies ------------------------------------------------------------------------------


def test_strategies_are_sample_strategies() -> None:
    for strategy in (GREEDY, RandomSampling()):
        assert isinstance(strategy, SampleStrategy)
    assert not isinstance("greedy", SampleStrategy)


def test_random_sampling_is_repeatable_and_follows_its_filters(model: Transformer) -> None:
    def run(seed: int, **settings: Any) -> list[int]:
        strategy = RandomSampling(generator=torch.Generator().manual_seed(seed), **settings)
        out = CausalInferencer(model).decode(QUERY[:, :1], new_cache(model), 12, strategy)
        return out.token_ids[0].tolist()

    greedy = CausalInferencer(model).decode(QUERY[:, :1], new_cache(model), 12, GREEDY)
    assert run(3) == run(3)
    assert run(3) != run(4)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0}, {"min_p": 1.0}):
        assert run(5, **settings) == greedy.token_ids[0].tolist(), settings


def test_sampling_follows_the_distribution() -> None:
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])
    strategy = RandomSampling(top_p=0.9, generator=torch.Generator().manual_seed(1))
    drawn = strategy.sample(probability.log().expand(20000, -1))
    share = drawn.bincount(minlength=4) / len(drawn)
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.015, rtol=0)


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2}]
)
def test_settings_out_of_range_raise(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RandomSampling(**settings)


@pytest.mark.parametrize("strategy", ["greedy", None, torch.argmax])
def test_a_strategy_that_is_none_is_named(model: Transformer, strategy: Any) -> None:
    with pytest.raises(TypeError, match="sample_strategy is"):
        CausalInferencer(model).prefill(QUERY, new_cache(model), strategy)


def test_other_objects_are_refused_with_what_is_needed(model: Transformer) -> None:
    with pytest.raises(TypeError, match="kv_cache is a list"):
        CausalInferencer(model).prefill(QUERY, [], GREEDY)
    with pytest.raises(TypeError, match=r"lacks.*cache_layout"):
        CausalInferencer(torch.nn.Linear(2, 2))
    for chunk in (0, -1, 2.0):
        with pytest.raises(ValueError, match="chunk_size"):
            ChunkwiseInferencer(model, chunk)
    with pytest.raises(ValueError, match=r"kind|spec"):
        QuantizedKVCache.of(model, "q3")


def test_the_native_model_is_a_language_model(model: Transformer) -> None:
    assert isinstance(model, LanguageModel)


# -- a speculative decoder that knows the protocols only -------------------------------------


def speculative_decode(
    draft: tuple[Inferencer, KVCache],
    target: tuple[Inferencer, KVCache],
    query: Tensor,
    max_new_tokens: int,
    num_draft_tokens: int,
) -> tuple[list[int], int]:
    """Greedy speculative decoding of one row; the tokens, and how often the target was asked."""
    (drafter, draft_cache), (scorer, score_cache) = draft, target
    # 1. Both read the prompt; the target says the first token.
    drafter.prefill(query, draft_cache, GREEDY)
    tokens = scorer.prefill(query, score_cache, GREEDY).token_ids[0].tolist()
    passes = 1
    while len(tokens) < max_new_tokens:
        # 2. Draft: what its cache lacks of the text first, then new tokens.
        text = query[0].tolist() + tokens
        lacking = torch.tensor([text[draft_cache.get_num_tokens() :]])
        drafted = drafter.decode(lacking, draft_cache, num_draft_tokens, GREEDY).token_ids
        # 3. Score all of them in one pass.
        seen = torch.cat((torch.tensor([tokens[-1:]]), drafted), dim=1)
        wanted = scorer.prefill(seen, score_cache, GREEDY).token_logits.argmax(-1)[0].tolist()
        passes += 1
        # 4. Keep drafted tokens up to the first that differs, and the target's own behind them.
        proposals = drafted[0].tolist()
        agreed = 0
        while agreed < len(proposals) and proposals[agreed] == wanted[agreed]:
            agreed += 1
        tokens += wanted[: agreed + 1]
        # 5. Both caches forget what was not kept.
        score_cache.crop(len(proposals) - agreed)
        held = len(text) + agreed
        draft_cache.crop(max(draft_cache.get_num_tokens() - held, 0))
    return tokens[:max_new_tokens], passes


@pytest.mark.parametrize("drafts", [1, 3, 5])
@pytest.mark.parametrize("setup", ["fp32", "fp32 paged"])
@pytest.mark.parametrize("seed", [11, 5], ids=["same model", "another model"])
def test_a_decoder_over_the_protocols_says_what_plain_decoding_says(
    model: Transformer, drafts: int, setup: str, seed: int
) -> None:
    drafter = new_model(seed)
    pair = (CausalInferencer(drafter), new_cache(drafter, setup))
    target = (ChunkwiseInferencer(model, 4), new_cache(model, setup))
    tokens, passes = speculative_decode(pair, target, QUERY, 20, drafts)
    assert tokens == uncached(model, QUERY, 20)[0]
    if seed == 11:
        assert passes <= 2 + 19 // (drafts + 1)
