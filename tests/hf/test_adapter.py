"""Models of transformers under our generation: their own tokens, whatever the family, batch and turn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from packaging.version import parse
from support.hf_matrix import (
    FAMILIES,
    FOLLOWING,
    GPT,
    GROUPED,
    IS_OLD,
    NARROW,
    PAD,
    ROWS,
    SMALL,
    STEPS,
    VOCABULARY,
    greedy,
    new_model,
    new_tokens,
    stock,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from caramba_fast.cache import AttentionLimits, LayerShape, ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.hf import HuggingFaceModel
from caramba_fast.hf.row_layout import LeftPadded
from caramba_fast.infer import Generator
from caramba_fast.infer.inferencer import CausalInferencer, GreedySampling
from caramba_fast.infer.kv_cache import QuantizedKVCache
from caramba_fast.models import LanguageModel, demo_path, load_demo, registry
from caramba_fast.models.context import ContextModel, InferContext
from caramba_fast.models.registry import as_language_model, register_adapter
from caramba_fast.quality.text import begin_token, sample_text

WINDOWED = ("mistral", "gemma2", "gemma3_text", "gpt_oss")
#: Relative L2 of logits and stored values: a rounding apart, some values take the neighbouring code.
CLOSE = {"fp32": 1e-4, "q8:plain": 0.02, "q4:plain": 0.05}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_MADE: dict[str, tuple[PreTrainedModel, list[Any]]] = {}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(family: str) -> tuple[PreTrainedModel, list[Any]]:
    """The model and its own tokens for `ROWS`."""
    if family not in _MADE:
        model = new_model(family)
        _MADE[family] = (model, stock(model, ROWS))
    return _MADE[family]


# -- every family ----------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_one_row(made: tuple[PreTrainedModel, list[Any]], prefill: str) -> None:
    model, expected = made
    assert len({token for row in expected for token in row}) > 3, "the test would show nothing"
    for row, tokens in zip(ROWS, expected, strict=True):
        assert new_tokens(greedy(model, prefill=prefill).generate([row])) == [tokens]


@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_a_ragged_batch_and_the_conversation_after_it(
    made: tuple[PreTrainedModel, list[Any]], prefill: str
) -> None:
    model, expected = made
    generator = greedy(model, prefill=prefill)
    assert new_tokens(generator.generate(ROWS)) == expected
    histories = [a + b + c for a, b, c in zip(ROWS, expected, FOLLOWING, strict=True)]
    assert new_tokens(generator.generate(FOLLOWING)) == stock(model, histories)


def test_a_left_padded_batch(made: tuple[PreTrainedModel, list[Any]]) -> None:
    model, expected = made
    width = max(map(len, ROWS))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ROWS])
    out = greedy(model).generate(ids, attention_mask=mask)
    assert torch.equal(out[:, :width], ids)
    assert new_tokens(out) == expected


def test_chunks_of_a_prompt(made: tuple[PreTrainedModel, list[Any]]) -> None:
    model, expected = made
    generator = greedy(model, prefill="stored", prefill_chunk=5)
    assert new_tokens(generator.generate(ROWS)) == expected


def test_the_model_stays_as_it_was(made: tuple[PreTrainedModel, list[Any]]) -> None:
    model, expected = made
    greedy(model, cache_kind="q4:plain").generate(ROWS)
    assert stock(model, ROWS[1:2]) == expected[1:2]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_other_implementations_of_attention(
    family: str, made: tuple[PreTrainedModel, list[Any]]
) -> None:
    model = new_model(family)
    model.set_attn_implementation("eager")
    generator = greedy(model, prefill="stored")
    assert new_tokens(generator.generate(ROWS)) == made[1]
    histories = [a + b + c for a, b, c in zip(ROWS, made[1], FOLLOWING, strict=True)]
    assert new_tokens(generator.generate(FOLLOWING)) == stock(model, histories)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_masks_that_matter(
    family: str, made: tuple[PreTrainedModel, list[Any]]
) -> None:
    logits = [
        greedy(model, prefill="stored").prefill(ROWS[:1])
        for model in (made[0], new_model(family, sliding_window=200))
    ]
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) > 1e-2


# -- the forward pass, against the native model ------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> tuple[HuggingFaceModel, Any]:
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    return HuggingFaceModel(model), load_demo()


def caches(demo: tuple[Any, Any], kind: str, rows: int = 3, **more: Any) -> list[ModelKVCache]:
    return [
        ModelKVCache(model.cache_layout, rows, 64, **cache_configs(kind), **more) for model in demo
    ]


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["exact", "stored"])
@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("page_size", [None, 32])
def test_ragged_steps_give_the_native_models_logits(
    demo: Any, kind: str, prefill: Any, page_size: int | None
) -> None:
    stores = caches(demo, kind, prefill=prefill, page_size=page_size)
    for lens in ([5, 3, 1], [2, 6, 1], [1, 0, 4], None, [1, 1, 0]):
        ids = torch.randint(2, 2000, (3, 6 if lens else 1))
        a, b = (
            model.forward(ids, store, query_lens=lens)
            for model, store in zip(demo, stores, strict=True)
        )
        assert a.shape == b.shape
        for row, length in enumerate(lens or [1, 1, 1]):
            x, y = a[row, :length], b[row, :length]
            assert float((x - y).norm()) <= CLOSE[kind] * float(y.norm())
        assert stores[0].row_lengths == stores[1].row_lengths
    for ours, native in zip(stores[0], stores[1], strict=True):
        for x, y in zip(ours.get(), native.get(), strict=True):
            assert float((x - y).norm() / y.norm()) <= CLOSE[kind]


@torch.no_grad()
@pytest.mark.parametrize("lens", [None, [5, 3, 1]])
@pytest.mark.parametrize("index", [[4, 2, 0], [3, 0, 0], [0, 1, 0]])
def test_logits_at_one_place_a_row(demo: Any, lens: Any, index: list[int]) -> None:
    ids = torch.randint(2, 2000, (3, 5))
    whole, single = (
        demo[0].forward(ids, caches(demo, "fp32")[0], query_lens=lens, **more)
        for more in ({}, {"logits_index": torch.tensor(index)})
    )
    assert single.shape == (3, 1, whole.shape[2])
    torch.testing.assert_close(single[:, 0], whole[torch.arange(3), index], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_a_cache(demo: Any) -> None:
    ids = torch.randint(2, 2000, (2, 7))
    torch.testing.assert_close(demo[0](ids), demo[1](ids), rtol=1e-3, atol=1e-3)
    index = torch.tensor([6, 2])
    picked = demo[0](ids, logits_index=index)
    torch.testing.assert_close(picked[:, 0], demo[1](ids)[[0, 1], index], rtol=1e-3, atol=1e-3)


def test_exact_prompts_see_exact_keys_and_values(demo: Any) -> None:
    ids = torch.randint(2, 2000, (1, 20))
    with torch.no_grad():
        expected = demo[0](ids)
        out = {
            prefill: demo[0].forward(ids, caches(demo, "q4:plain", 1, prefill=prefill)[0])
            for prefill in ("exact", "stored")
        }
    torch.testing.assert_close(out["exact"], expected, rtol=1e-4, atol=1e-4)
    assert float((out["stored"] - expected).norm() / expected.norm()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q4", "nf4:plain,residual_len=8,sink_len=4", "q8"])
@pytest.mark.parametrize("page_size", [None, 32])
def test_tails_and_sinks_are_read_as_the_native_model_reads_them(
    demo: Any, kind: str, page_size: int | None
) -> None:
    prompt = torch.randint(2, 2000, (2, 80))
    for lens in (None, [80, 50]):
        stores = [
            ModelKVCache(model.cache_layout, 2, 128, **cache_configs(kind), page_size=page_size)
            for model in demo
        ]
        for model, store in zip(demo, stores, strict=True):
            model.forward(prompt, store, query_lens=lens)
            store.crop([2, 0])
        for token in (7, 8, 9):
            a, b = (
                model.forward(torch.full((2, 1), token), store)
                for model, store in zip(demo, stores, strict=True)
            )
            assert float((a - b).norm() / b.norm()) < 0.01


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_a_reach_narrows_what_is_read(demo: Any, prefill: Any) -> None:
    stores = caches(demo, "fp32", prefill=prefill)
    for store in stores:
        store.reach = AttentionLimits(local_window=3)
    for lens in ([6, 3, 1], [4, 5, 1], None, [1, 0, 2]):
        ids = torch.randint(2, 2000, (3, max(lens) if lens else 1))
        a, b = (
            model.forward(ids, store, query_lens=lens)
            for model, store in zip(demo, stores, strict=True)
        )
        assert a.shape == b.shape
        for row, length in enumerate(lens or [1, 1, 1]):
            torch.testing.assert_close(a[row, :length], b[row, :length], rtol=1e-3, atol=2e-3)
    index = torch.tensor([0, 1, 0])
    whole = demo[1].forward(torch.arange(6).view(3, 2) + 5, stores[1])
    picked = demo[0].forward(torch.arange(6).view(3, 2) + 5, stores[0], logits_index=index)
    torch.testing.assert_close(picked[:, 0], whole[[0, 1, 2], index], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["fp16", "q8", "q4", "nf4", "q8/q4"])
def test_every_kind_runs_and_takes_its_bytes(demo: Any, kind: str) -> None:
    ours, native = (greedy(model, cache_kind=kind, seed=0) for model in demo)
    a, b = (generator.generate([[5, 6, 7, 8], [9]]) for generator in (ours, native))
    assert a.shape == b.shape
    assert ours.metrics is not None and native.metrics is not None
    assert ours.metrics.bytes_per_token == native.metrics.bytes_per_token
    assert ours.metrics.cache_bytes == native.metrics.cache_bytes


def test_half_precision_models(demo: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.bfloat16)
    out = greedy(model, cache_kind="q8").generate([[5, 6, 7], [8]])
    assert out.shape[1] <= 3 + STEPS


def test_the_inferencer_protocols_work_over_it(demo: Any) -> None:
    outs = []
    for model in demo:
        inferencer, cache = CausalInferencer(model), QuantizedKVCache.of(model, "fp32", 1, 64)
        first = inferencer.prefill(torch.tensor([[5, 6, 7]]), cache, GreedySampling()).token_ids
        cache.crop(1)
        first = inferencer.prefill(torch.tensor([[7]]), cache, GreedySampling()).token_ids
        outs.append(inferencer.decode(first, cache, 8, GreedySampling()).token_ids.tolist())
    assert outs[0] == outs[1]


def test_beams_reorder_the_cache() -> None:
    model = new_model("llama")
    ids = torch.tensor([ROWS[0]])
    expected = model.generate(
        ids, max_new_tokens=6, num_beams=3, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    out = greedy(model, max_new_tokens=6, num_beams=3).generate(ids)
    assert out.tolist() == expected.tolist()


def test_rows_move_to_the_front_and_back() -> None:
    frame = LeftPadded([3, 0, 1], [2, 3, 0], torch.device("cpu"))
    assert (frame.tokens, frame.past, frame.total) == (3, 2, 5)
    assert frame.attention_mask is not None
    assert frame.attention_mask.tolist() == [[1] * 5, [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert frame.position_ids.tolist() == [[2, 3, 4], [0, 1, 2], [0, 0, 0]]
    ids = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [0, 0, 0, 0]])
    front = frame.to_layout(ids)
    assert front.tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0]]
    back = frame.from_layout(front, 1, 4)
    assert back[0, :2].tolist() == [1, 2] and back[1, :3].tolist() == [3, 4, 5]
    assert back.shape == ids.shape
    keys = torch.arange(1, 6).view(1, 1, 5, 1).expand(3, 2, 5, 4)
    assert frame.keys_to_front(keys)[:, 1, :, 2].tolist() == [
        [1, 2, 3, 4, 5], [4, 5, 1, 2, 3], [2, 3, 4, 5, 1],
    ]  # fmt: skip
    assert frame.query_column(torch.tensor([1, 0, 0])).tolist() == [2, 0, 2]
    whole = LeftPadded([4, 4], [1, 1], torch.device("cpu"))
    assert whole.attention_mask is None
    assert whole.position_ids.tolist() == [[4], [4]]


# -- what the model says of itself -------------------------------------------------------------


def test_it_is_a_language_model(demo: Any) -> None:
    model, native = demo
    assert isinstance(model, LanguageModel)
    assert model.vocab_size == native.vocab_size
    assert model.device == native.device
    assert (model.eos_token_ids, model.pad_token_id) == (native.eos_token_ids, native.pad_token_id)
    for ours, theirs in zip(model.cache_layout, native.cache_layout, strict=True):
        assert (ours.k_dim, ours.v_dim, ours.n_kv_heads) == (128, 128, 2)
        assert ours == theirs


def test_special_ids_come_from_the_generation_config_first() -> None:
    model = new_model("llama", eos_token_id=5)
    model.generation_config.eos_token_id = [7, 8]
    model.generation_config.pad_token_id = None
    wrapped = HuggingFaceModel(model)
    assert (wrapped.eos_token_ids, wrapped.eos_token_id, wrapped.pad_token_id) == ((7, 8), 7, PAD)
    model.generation_config.eos_token_id = None
    assert wrapped.eos_token_ids == (5,)
    model.config.eos_token_id = None
    assert (wrapped.eos_token_ids, wrapped.eos_token_id) == ((), None)


def test_measured_texts_begin_with_the_models_bos() -> None:
    """cache="auto" is judged on windows behind BOS, as the model sees text in use."""
    model = new_model("llama")
    model.config.bos_token_id, model.generation_config.bos_token_id = 6, None
    wrapped = HuggingFaceModel(model)
    assert (wrapped.bos_token_id, begin_token(wrapped)) == (6, 6)
    model.generation_config.bos_token_id = 9
    assert begin_token(wrapped) == 9
    assert sample_text(wrapped, rows=2, length=3)[:, 0].tolist() == [9, 9]
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    assert begin_token(wrapped) is None


def test_generation_stops_at_the_models_own_end() -> None:
    model = new_model("llama")
    path = stock(model, ROWS[:1])[0]
    step = next(i for i in range(2, STEPS) if path[i] not in path[:i])
    model.generation_config.eos_token_id = [96, path[step]]
    out = greedy(model).generate(ROWS[:1])
    assert out[0, len(ROWS[0]) :].tolist() == path[: step + 1]


def test_asking_leaves_training_as_it_was() -> None:
    model = new_model("gpt2").train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    HuggingFaceModel(model)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_more_tokens_than_positions_is_an_error_before_any_index_is_wrong(family: str) -> None:
    name = "max_position_embeddings" if family == "opt" else "n_positions"
    generator = greedy(new_model(family, **{name: 20}), ignore_eos=True)
    assert new_tokens(generator.generate([ROWS[2]]))[0]
    with pytest.raises(ValueError, match=r"20 positions|model has 20"):
        generator.generate([ROWS[0]])
    assert generator.cache is not None
    assert generator.cache.row_lengths == [len(ROWS[2]) + STEPS - 1]


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral"])
def test_no_table_of_positions_is_no_limit(family: str) -> None:
    changes = {} if family == "bloom" else {"max_position_embeddings": 20}
    assert HuggingFaceModel(new_model(family, **changes))._capabilities.max_positions is None


def test_models_whose_positions_count_padding_refuse_ragged_rows() -> None:
    config = transformers.TrOCRConfig(
        vocab_size=VOCABULARY, d_model=64, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=96, init_std=0.3, pad_token_id=PAD, eos_token_id=None, is_decoder=True,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.TrOCRForCausalLM(config).eval()
    alone = greedy(model, ignore_eos=True)
    with pytest.raises(ValueError, match="one row at a time"):
        greedy(model, ignore_eos=True).generate(ROWS)
    assert alone.generate([ROWS[0], ROWS[0]]).shape == (2, len(ROWS[0]) + STEPS)


def small(name: str, **settings: Any) -> PreTrainedModel:
    """A random causal model of a config class of transformers."""
    ids = dict(bos_token_id=1, eos_token_id=None, pad_token_id=PAD)
    torch.manual_seed(3)
    config = getattr(transformers, name)(vocab_size=VOCABULARY, **{**SMALL, **ids, **settings})
    return AutoModelForCausalLM.from_config(config).eval()


def test_models_whose_masks_count_an_image_refuse_ragged_rows() -> None:
    """GIT puts columns in front of the mask of a step, so that padding is seen there, though not in the prompt.

    Some versions of transformers do not: there rows are what they are alone.
    """
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = small("GitConfig", vision_config=vision)
    made = greedy(model, ignore_eos=True)
    try:
        found = new_tokens(made.generate(ROWS))
    except ValueError as error:
        assert "masks count padding; give it one row at a time" in str(error)
        made.reset()
        equal = [ROWS[0], ROWS[0][::-1]]
        assert new_tokens(made.generate(equal)) == stock(model, equal)
    else:
        assert IS_OLD and found == [stock(model, [row])[0] for row in ROWS]


def test_a_window_that_no_mask_has_is_not_crossed() -> None:
    """The caches of a Moshi drop tokens which its masks would show."""
    model = small("MoshiConfig", head_dim=16, sliding_window=8, ffn_dim=96)
    made = greedy(model, ignore_eos=True)
    assert new_tokens(made.generate([ROWS[1]], max_new_tokens=5), 5) == stock(model, ROWS[1:2], 5)
    assert IS_OLD or made.report["cache_reads"] == "packed"
    for ids in ([ROWS[0]], ROWS[1:2]):
        made.reset()
        with pytest.raises(ValueError, match="MoshiForCausalLM has a window of 8 in its caches"):
            made.generate(ids)
    assert HuggingFaceModel(model).why_not_ragged is not None
    masked = new_model("mistral")  # has the same window, in its masks
    assert new_tokens(greedy(masked).generate(ROWS)) == stock(masked, ROWS)


def test_models_that_count_their_own_positions_are_told_them() -> None:
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY, **SMALL, is_decoder=True, pad_token_id=PAD, eos_token_id=None
    )
    torch.manual_seed(3)
    model = transformers.RobertaForCausalLM(config).eval()
    model.generation_config.pad_token_id = PAD
    out = greedy(model, ignore_eos=True).generate(ROWS)
    assert new_tokens(out) == stock(model, ROWS)


# -- models that cannot be served ----------------------------------------------------------------


def unservable(name: str) -> PreTrainedModel:
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1)
    if name == "t5":
        config = transformers.T5Config(d_model=32, num_layers=1, vocab_size=50, d_kv=8, num_heads=4)
        return transformers.T5ForConditionalGeneration(config)
    if name == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    if name == "headless":
        return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=50, **SMALL))
    if name == "images":
        config = MllamaTextConfig(
            vocab_size=50, **GROUPED, cross_attention_layers=[1], pad_token_id=PAD
        )
        return transformers.MllamaForCausalLM(config)
    if name == "float64":
        return new_model("llama").double()
    if name == "cross":
        config = transformers.GPT2Config(**GPT, vocab_size=50, add_cross_attention=True)
        return transformers.GPT2LMHeadModel(config)
    if name == "convolutions":  # which transformers does not call stateful
        if parse(transformers.__version__) < parse("5.0"):
            pytest.skip("there it brings a cache of its own")
        config = transformers.Lfm2Config(
            vocab_size=50, **GROUPED, layer_types=["conv", "full_attention"]
        )
        return transformers.Lfm2ForCausalLM(config)
    layers = dict(layer_types=["linear_attention", "full_attention"], num_experts=2)
    config = transformers.Qwen3NextConfig(vocab_size=50, **NARROW, **layers)
    return transformers.Qwen3NextForCausalLM(config)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("mamba", "(no keys and values|is not .only. keys and values)"),
        ("headless", "no language-model head"),
        ("cross", "cross-attention"),
        ("float64", "weights are float64: model.float()"),
        ("images", "attend to images alone"),
        ("hybrid", "recurrent or hybrid"),
        ("convolutions", "recurrent or hybrid"),
    ],
)
def test_models_that_cannot_be_served_say_why(name: str, reason: str) -> None:
    if name == "mamba" and parse(transformers.__version__) < parse("5.1"):
        pytest.skip("there it looks for CUDA kernels")
    with pytest.raises(TypeError, match=rf"{reason}.*decoder-only causal.*supported"):
        as_language_model(unservable(name))


def test_the_adapter_takes_models_of_transformers_only() -> None:
    with pytest.raises(TypeError, match="no transformers PreTrainedModel"):
        HuggingFaceModel(nn.Linear(2, 2))  # type: ignore[arg-type]


# -- the registry ----------------------------------------------------------------------------


def test_the_generator_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match=r"no LanguageModel.*lacks .*cache_layout"):
        Generator(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"a path .* is loaded by .*Generator\.from_checkpoint"):
        Generator("some/folder")
    with pytest.raises(TypeError, match="encoder-decoder"):
        Generator(unservable("t5"))


def test_language_models_pass_as_they_are(demo: Any) -> None:
    for model in demo:
        assert as_language_model(model) is model


@pytest.mark.parametrize("other", [nn.Linear(2, 2), 3, "gpt2", None, transformers.LlamaForCausalLM])
def test_anything_else_is_an_error_that_lists_what_is_missing(other: Any) -> None:
    with pytest.raises(TypeError, match=r"no LanguageModel.*lacks .*vocab_size.*cache_layout"):
        as_language_model(other)


def test_adapters_can_be_registered(monkeypatch: pytest.MonkeyPatch, demo: Any) -> None:
    monkeypatch.setattr(registry, "_ADAPTERS", list(registry._ADAPTERS))
    register_adapter(lambda model: model == "the demo", lambda _: demo[1])
    assert as_language_model("the demo") is demo[1]


def test_the_layer_above_is_loaded_for_a_model_of_transformers() -> None:
    code = (
        "import sys, caramba_fast.infer, transformers\n"
        "from caramba_fast.models.registry import as_language_model\n"
        "assert 'caramba_fast.hf' not in sys.modules\n"
        f"config = transformers.LlamaConfig(vocab_size=9, **{GROUPED!r})\n"
        "print(type(as_language_model(transformers.LlamaForCausalLM(config))).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "HuggingFaceModel", done.stderr


# -- models called with a context ----------------------------------------------------------------


class Contextual(nn.Module):
    """One attention layer in the style ``model(tokens, ctx=…)``."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.vocab_size, self.eos_token_id = VOCABULARY, 7
        self.cache_layout = [LayerShape(32, 32, 2)] * layers
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.place = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64 + 32 + 32) for _ in range(layers))
        self.head = nn.Linear(64, VOCABULARY)
        self.seen: list[InferContext] = []

    def forward(self, tokens: Tensor, ctx: InferContext) -> Tensor:
        self.seen.append(ctx)
        x = self.embed(tokens) + self.place(ctx.positions)
        for index, block in enumerate(self.blocks):
            q, k, v = block(x).split((64, 32, 32), dim=-1)
            q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in (q, k, v))
            x = x + ctx.attend(index, q, k, v).transpose(1, 2).flatten(2)
        return self.head(x)


@torch.no_grad()
def uncached(model: ContextModel, ids: Sequence[int], steps: int = STEPS) -> list[int]:
    row = list(ids)
    for _ in range(steps):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[len(ids) :]


@pytest.mark.parametrize("prefill", ["exact", "stored"])
@pytest.mark.parametrize("options", [{}, {"local_window": 5}, {"q_chunk": 2}], ids=str)
def test_a_model_with_a_context_generates(prefill: str, options: dict[str, int]) -> None:
    model = ContextModel(Contextual(), **options)
    assert isinstance(model, LanguageModel)
    generator = greedy(model, prefill=prefill, ignore_eos=True)
    expected = [uncached(model, row) for row in ROWS]
    assert new_tokens(generator.generate(ROWS)) == expected
    histories = [a + b + c for a, b, c in zip(ROWS, expected, FOLLOWING, strict=True)]
    assert new_tokens(generator.generate(FOLLOWING)) == [uncached(model, row) for row in histories]


def test_a_long_chunk_on_top_of_a_prefix_is_taken_in_pieces() -> None:
    outs = []
    for options in ({}, {"q_chunk": 8}):
        torch.manual_seed(1)
        model = ContextModel(Contextual(), **options)
        cache = ModelKVCache(model.cache_layout, 1, 128, **cache_configs("fp32"))
        with torch.no_grad():
            model(torch.tensor([ROWS[0]]), cache)
            outs.append(model(torch.arange(80)[None] % VOCABULARY, cache))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


def test_the_context_says_where_things_stand() -> None:
    inner = Contextual()
    greedy(inner, max_new_tokens=3, ignore_eos=True).generate(ROWS)
    first, second = inner.seen[0], inner.seen[1]
    assert first.caches is not None and len(first.caches) == 2
    assert (first.pos_offset, first.query_lens) == (0, [13, 4, 7])
    assert second.pos_offset == 13
    assert second.positions.tolist() == [[13], [4], [7]]


def test_what_a_context_model_needs() -> None:
    wrapped = as_language_model(Contextual())
    assert isinstance(wrapped, ContextModel)
    assert (wrapped.eos_token_id, wrapped.pad_token_id) == (7, None)

    def plain(tokens: Tensor, ctx: Any) -> Tensor:
        return torch.zeros(*tokens.shape, 9)

    with pytest.raises(TypeError, match="lacks cache_layout, vocab_size"):
        as_language_model(plain)
    assert ContextModel(plain, [LayerShape(32, 32, 1)], 9).device == torch.device("cpu")
    with pytest.raises(TypeError, match="ctx="):
        ContextModel(lambda tokens: tokens, [LayerShape(32, 32, 1)], 9)
    for name in ("q_chunk", "local_window"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            ContextModel(Contextual(), **{name: 0})
