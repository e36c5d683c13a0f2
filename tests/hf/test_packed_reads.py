"""Our generators over models of transformers: packed reads alone, and the tokens of dense ones."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.hf_matrix import (
    DEQUANTIZED,
    FOLLOWING,
    PACKED,
    ROWS,
    STEPS,
    exists,
    greedy,
    new_tokens,
    served,
    stock,
    tiny,
)
from transformers import AutoModelForCausalLM

from caramba_fast.cache import AttentionLimits, LayerCache, ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.hf import CarambaCache, HuggingFaceModel, accelerate, restore
from caramba_fast.hf.compat import CACHE
from caramba_fast.hf.lazy_tensors import PackedStates
from caramba_fast.hf.row_layout import RightPadded
from caramba_fast.hf.scope import implementation, once, our_attention
from caramba_fast.hf.step_cache import StepCache
from caramba_fast.infer import SpeculativeConfig, SpeculativeGenerator
from caramba_fast.models import demo_path, load_demo

#: Families of the matrix the adapter takes: it refuses those that keep more than keys and values.
FAMILIES = [f for f in PACKED.values() if f not in ("qwen3_next", "falcon_h1")]
#: Without a tail: dense reads have one for the newest query alone.
KINDS = ["fp32", "q8", "q4:plain", "nf4:plain,sink_len=4"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_dequantization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads a cache as tensors raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("keys and values were dequantized")

    monkeypatch.setattr(LayerCache, "get", refuse)


def packed(family: str, **changes: Any) -> HuggingFaceModel:
    """A tiny model that is read as it is stored."""
    if not exists(family) or served(family) != "packed":
        pytest.skip("not read packed in this transformers")
    model = HuggingFaceModel(tiny(family, **changes))
    assert model.cache_reads == "packed"
    return model


def dense(model: HuggingFaceModel) -> HuggingFaceModel:
    """Another adapter of a copy of the model, which reads tensors."""
    other = HuggingFaceModel(copy.deepcopy(model.model))
    assert other.why_dense is None
    other._needs_tensors = "the test wants it"
    once(other.model.config, "the test wants it", "")
    return other


# -- the same tokens, packed -------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["exact", "stored"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_and_turns(family: str, prefill: str, no_dequantization: None) -> None:
    model = packed(family)
    expected = stock(model.model, ROWS)
    generator = greedy(model, prefill=prefill, ignore_eos=True)
    assert new_tokens(generator.generate(ROWS)) == expected
    histories = [a + b + c for a, b, c in zip(ROWS, expected, FOLLOWING, strict=True)]
    wanted = stock(model.model, histories)
    assert new_tokens(generator.generate(FOLLOWING)) == wanted
    generator.rollback([len(more) + STEPS for more in FOLLOWING])
    assert new_tokens(generator.generate(FOLLOWING)) == wanted
    assert generator.report["cache_reads"] == "packed"


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_a_prompt(family: str, no_dequantization: None) -> None:
    model = packed(family)
    generator = greedy(model, prefill="stored", prefill_chunk=5, ignore_eos=True)
    assert new_tokens(generator.generate(ROWS)) == stock(model.model, ROWS)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(family: str, no_dequantization: None) -> None:
    model = packed(family)
    ids = torch.tensor(ROWS[:1])
    expected = model.model.generate(
        ids, max_new_tokens=6, num_beams=3, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    out = greedy(model, max_new_tokens=6, num_beams=3, ignore_eos=True).generate(ids)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_speculation(family: str, no_dequantization: None) -> None:
    """Several query tokens at once, ragged, and taken back row by row."""
    model, draft = packed(family), packed("llama", num_hidden_layers=1)
    config = SpeculativeConfig(
        temperature=0.0, cache_kind="fp32", max_new_tokens=STEPS, max_seq_len=128, spec_k=4,
        ignore_eos=True,
    )  # fmt: skip
    expected = stock(model.model, ROWS)
    for other in (draft, None):
        generator = SpeculativeGenerator(model, other, config)
        assert new_tokens(generator.generate(ROWS)) == expected


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["exact", "stored"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "gemma2", "llama4_text"])
def test_logits_are_those_of_dense_reads(family: str, kind: str, prefill: Any) -> None:
    """Step by step over ragged rows, with some taken back."""
    if family == "llama4_text" and "sink" in kind:
        pytest.skip("chunks and sinks are read dense")
    ours = packed(family, initializer_range=0.05)
    models, found = (ours, dense(ours)), []
    for model in models:
        cache = ModelKVCache(model.cache_layout, 3, 128, prefill=prefill, **cache_configs(kind))
        generator = torch.Generator().manual_seed(5)
        logits = []
        for lens in ([70, 30, 1], [1, 1, 1], [3, 0, 9], [1, 1, 0], None):
            ids = torch.randint(3, 97, (3, max(lens or [1])), generator=generator)
            out = model.forward(ids, cache, query_lens=lens)
            logits += [row[: (lens or [1] * 3)[b]] for b, row in enumerate(out)]
            cache.crop([0, 1, 0])
        found.append(torch.cat(logits))
    apart = float((found[0] - found[1]).norm() / found[1].norm())
    assert apart < (1e-4 if kind == "fp32" else 0.03)


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["exact", "stored"])
@pytest.mark.parametrize("kind", ["q4", "nf4:plain,sink_len=4,residual_len=8"])
def test_tails_of_ragged_chunks_are_read_as_natively(kind: str, prefill: Any) -> None:
    hub = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    found = []
    for model in (HuggingFaceModel(hub), load_demo()):
        cache = ModelKVCache(model.cache_layout, 2, 128, prefill=prefill, **cache_configs(kind))
        generator, logits = torch.Generator().manual_seed(5), []
        for lens in ([80, 50], [2, 40], [1, 0], [3, 3]):
            ids = torch.randint(3, 900, (2, max(lens)), generator=generator)
            out = model.forward(ids, cache, query_lens=lens)
            logits += [row[:n] for row, n in zip(out, lens, strict=True)]
            cache.crop([1, 0])
        found.append(torch.cat(logits))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.01


@torch.no_grad()
def test_rows_enter_chunks_at_different_times() -> None:
    """Llama 4: columns are fed in pieces, so that no row is in two chunks at once."""
    model = packed("llama4_text")
    found = []
    for parts in ([(9, 13, 2)], [(1, 1, 1), (7, 0, 1), (1, 12, 0)]):
        cache = ModelKVCache(model.cache_layout, 3, 64, prefill="stored", **cache_configs("fp32"))
        last, ids = [torch.empty(0)] * 3, torch.arange(3, 42).view(3, 13)
        for lens in parts:
            held = cache.row_lengths
            step = torch.stack(
                [row[h : h + 13] for row, h in zip(torch.cat((ids, ids), 1), held, strict=True)]
            )
            out = model.forward(step[:, : max(lens)], cache, query_lens=list(lens))
            last = [out[b, n - 1] if n else last[b] for b, n in enumerate(lens)]
        found.append(torch.stack(last))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_a_reach_narrows_packed_and_dense_reads_alike(family: str, prefill: Any) -> None:
    ours = packed(family)
    found = []
    for model in (ours, dense(ours)):
        cache = ModelKVCache(model.cache_layout, 2, 64, prefill=prefill, **cache_configs("fp32"))
        cache.reach = AttentionLimits(local_window=3)
        ids = torch.arange(3, 31).view(2, 14)
        model.forward(ids[:, :9], cache, query_lens=[9, 4])
        found.append(model.forward(ids[:, 9:], cache, query_lens=[2, 5])[[0, 1], [1, 4]])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_auto_times_packed_reads(no_dequantization: None) -> None:
    model = packed("llama", initializer_range=0.05)
    ids = torch.randint(3, 97, (4, 96), generator=torch.Generator().manual_seed(1))
    generator = greedy(
        model, cache_kind="auto", ignore_eos=True, cache_auto_candidates=("q8", "q4"), calibration_ids=ids,
        cache_plan_path=None, cache_auto_bench_steps=2,
    )  # fmt: skip
    generator.generate(ROWS)
    plan = generator.cache_plan
    assert plan is not None and plan.spec in ("q8_0", "q4_0")
    assert [row.spec for row in plan.rows if row.step_ms is not None]


# -- the model stays what it was ---------------------------------------------------------------


def test_the_attention_is_put_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("gemma3_text")
    config = model.model.config
    before = config._attn_implementation
    seen: list[str] = []
    forward = model.model.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        seen.append(config._attn_implementation)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", fails)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, ignore_eos=True).generate(ROWS)
    assert seen == ["caramba_fast"] * 2
    assert config._attn_implementation == before != "caramba_fast"


@pytest.mark.parametrize("first", ["accelerate", "generator"])
def test_an_accelerated_model_is_read_packed_too(first: str, no_dequantization: None) -> None:
    model = tiny("qwen2")
    before, expected = model.config._attn_implementation, stock(model, ROWS)
    generator = None if first == "accelerate" else greedy(model, ignore_eos=True)
    accelerate(model, "fp32")
    generator = generator or greedy(model, ignore_eos=True)
    assert new_tokens(generator.generate(ROWS)) == expected
    assert stock(model, ROWS) == expected
    assert model.config._attn_implementation == "caramba_fast"
    restore(model)
    assert model.config._attn_implementation == before
    generator.reset()
    assert new_tokens(generator.generate(ROWS)) == expected
    assert stock(model, ROWS) == expected


def test_passes_at_the_same_time_and_accelerate_between_them() -> None:
    model = tiny("llama")
    config, before = model.config, model.config._attn_implementation
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with our_attention([config]):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with our_attention([config]):
        thread.start()
        assert inside.wait(30)
    assert config._attn_implementation == "caramba_fast" and implementation(config) == before
    accelerate(model, "q8")
    restore(model)
    leave.set()
    thread.join()
    assert config._attn_implementation == before


# -- models that need tensors ------------------------------------------------------------------


@pytest.mark.parametrize("family", DEQUANTIZED.values())
def test_dense_reads_are_said_and_warned_of_once(family: str) -> None:
    if served(family) == "packed":
        pytest.skip("read packed in this transformers")
    model = tiny(family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generator = greedy(model, ignore_eos=True)
        assert not [w for w in caught if "dequantized" in str(w.message)], "nothing was read yet"
        assert new_tokens(generator.generate(ROWS)) == stock(model, ROWS)
    told = [str(w.message) for w in caught if "dequantized" in str(w.message)]
    assert len(told) == 1 and type(model).__name__ in told[0]
    assert generator.report["cache_reads"].startswith("dense: ")
    assert generator.model.why_dense and generator.model.why_dense in told[0]


@torch.no_grad()
def test_a_model_that_wants_tensors_only_later_is_read_dense_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = packed("llama")
    attention = model.model.model.layers[1].self_attn
    inner, ids = attention.forward, torch.tensor([[5, 6], [7, 8]])

    def curious(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs[CACHE]
        out = inner(*args, **kwargs)
        if isinstance(cache, StepCache):
            PackedStates.of(cache.layers[1], "k", torch.empty(2, 2, 1, 16)).sum()
        return out

    caches = [
        ModelKVCache(model.cache_layout, 2, 64, prefill="stored", **cache_configs("fp32"))
        for _ in range(2)
    ]
    for cache in caches:
        model.forward(torch.tensor([ROWS[0], ROWS[0]]), cache, query_lens=[13, 6])
    expected = model.forward(ids, caches[0])
    monkeypatch.setattr(attention, "forward", curious)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM: .*slow: its attention"):
        found = model.forward(ids, caches[1])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert caches[1].row_lengths == [15, 8]
    assert model.cache_reads.startswith("dense: its attention")


def test_reasons_not_to_read_packed() -> None:
    chunked = packed("llama4_text")
    cache = ModelKVCache(chunked.cache_layout, 1, 64, **cache_configs("q8:plain,sink_len=4"))
    with pytest.warns(UserWarning, match="sink_len keeps the first tokens"):
        chunked.forward(torch.tensor(ROWS[:1]), cache)


@pytest.mark.parametrize("prefill", ["stored", "exact"])
def test_a_reach_of_dense_reads_within_chunks_is_refused(prefill: Any) -> None:
    model = dense(packed("llama4_text"))
    cache = ModelKVCache(model.cache_layout, 2, 64, prefill=prefill, **cache_configs("fp32"))
    cache.reach = AttentionLimits(local_window=3)
    with pytest.raises(ValueError, match=r"within chunks.*the test wants it; local_window=3"):
        model.forward(torch.arange(3, 31).view(2, 14), cache)
    assert cache.row_lengths == [0, 0]


def test_dropout_is_named_and_forgotten() -> None:
    model = packed("llama", attention_dropout=0.1)
    generator = greedy(model, ignore_eos=True, max_new_tokens=3)
    model.model.train()
    model.train()
    with pytest.warns(UserWarning, match=r"slow: dropout is active.*model\.eval\(\)"):
        generator.generate(ROWS)
    assert generator.report["cache_reads"].startswith("dense: dropout is active")
    model.eval()
    generator.reset()
    assert new_tokens(generator.generate(ROWS), 3) == stock(model.model, ROWS, 3)
    assert generator.report["cache_reads"] == model.cache_reads == "packed"


def test_the_report_is_of_the_generators_own_cache() -> None:
    model = packed("llama4_text")
    generator = greedy(model, cache_kind="q8:plain,sink_len=4", ignore_eos=True)
    with pytest.warns(UserWarning, match="sink_len keeps"):
        generator.generate(ROWS)
    assert generator.report["cache_reads"].startswith("dense: sink_len keeps")
    assert model.cache_reads == "packed"
    other = greedy(model, ignore_eos=True)
    other.generate(ROWS)
    assert other.report["cache_reads"] == "packed"


def test_every_reason_is_warned_of_once() -> None:
    model = packed("llama4_text")
    with pytest.warns(UserWarning, match="sink_len"):
        greedy(model, cache_kind="q8:plain,sink_len=4", ignore_eos=True).generate(ROWS)
    model._needs_tensors = "another"
    with pytest.warns(UserWarning, match="slow: another") as told:
        greedy(model, ignore_eos=True).generate(ROWS)
    assert len([w for w in told if "dequantized" in str(w.message)]) == 1


@pytest.mark.parametrize("how", ["forward", "model"])
def test_a_compiled_model_is_named(how: str) -> None:
    inner = tiny("llama")
    if how == "model":
        inner.compile(backend="eager")
    else:
        inner.forward = torch.compile(inner.forward, backend="eager")
    assert "compiled by torch.compile" in HuggingFaceModel(inner).cache_reads


def test_resized_embeddings_are_asked_again() -> None:
    model = packed("llama")
    generator = greedy(model, ignore_eos=True)
    model.model.resize_token_embeddings(120)
    ids = torch.tensor([[5, 110, 119]])
    for each in (generator, greedy(model.model, ignore_eos=True)):
        assert each.model.vocab_size == 120
        assert each.report["cache_reads"] == "packed"
        assert new_tokens(each.generate(ids)) == stock(model.model, ids.tolist())
    model.model.resize_token_embeddings(20)
    with pytest.raises(ValueError, match="token id 119; 0 to 19"):
        greedy(model.model, ignore_eos=True).generate(ids)


def test_why_no_graph_is_recorded() -> None:
    assert "transformers is told lengths" in packed("llama").why_not_recorded


# -- layouts of rows ---------------------------------------------------------------------------


def test_rows_stay_where_they_are() -> None:
    frame = RightPadded([3, 0, 6], [2, 3, 0], torch.device("cpu"))
    assert (frame.tokens, frame.total, frame.past, frame.padded_queries) == (3, 6, 3, True)
    assert frame.position_ids.tolist() == [[3, 4, 5], [0, 1, 2], [5, 5, 5]]
    ids = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [0, 0, 0, 0]])
    assert frame.to_layout(ids).tolist() == [[1, 2, 0], [3, 4, 5], [0, 0, 0]]
    assert frame.without_padding(ids, 7)[:, :3].tolist() == [[1, 2, 7], [3, 4, 5], [7, 7, 7]]
    assert frame.from_layout(ids[:, :3], 1, 4).tolist()[1][:3] == [3, 4, 5]
    assert frame.query_column(torch.tensor([1, 3, 0])).tolist() == [1, 2, 0]
    whole = RightPadded([4, 4], [1, 1], torch.device("cpu"))
    assert not whole.padded_queries and whole.position_ids.tolist() == [[4], [4]]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q8", "q4", "q4:residual_len=0,sink_len=0"])
@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_later_tokens_do_not_reach_earlier_ones_through_dense_reads(family: str, kind: str) -> None:
    """A group that the last of several new tokens fills is encoded with it; earlier queries may not read its codes."""
    model = accelerate(tiny(family), kind)
    ids = torch.randint(3, 97, (1, 64), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 9) % 90 + 3

    def second_turn(tokens: torch.Tensor) -> torch.Tensor:
        cache = CarambaCache(model, kind)
        model(input_ids=tokens[:, :20], past_key_values=cache)
        return model(input_ids=tokens[:, 20:], past_key_values=cache).logits[0, :-1]

    assert torch.equal(second_turn(ids), second_turn(other))
    restore(model)
