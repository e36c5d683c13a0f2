"""What a `Generator` refuses, with which words, and that nothing has changed then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.generators import (
    MORE,
    PAD,
    REST,
    VOCABULARY,
    A,
    B,
    C,
    greedy,
    new_model,
    new_tokens,
    next_logits,
    uncached,
)
from torch import nn

from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import Transformer


@pytest.fixture(scope="module")
def model(device: torch.device) -> Transformer:
    return new_model(device)


# -- settings and input that are wrong ---------------------------------------------------------

BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown kind": (
        {"cache_kind": "q3"},
        "cache_kind.*q3.*fp32, fp16, bf16, q8_0, q4_0, nf4.*and 'auto'",
    ),
    "misspelt field": ({"max_new_token": 3}, "max_new_token\\n.*did you mean 'max_new_tokens'"),
    "a field by two names": (
        {"cache": "q4", "cache_kind": "q8"},
        "cache and cache_kind are the same setting",
    ),
    "kind of another type": ({"cache_kind": 4}, "cache_kind.*fp16"),
    "negative temperature": ({"temperature": -0.1}, "temperature.*greater than or equal to 0"),
    "infinite temperature": ({"temperature": float("inf")}, "temperature.*finite"),
    "nan temperature": ({"temperature": float("nan")}, "temperature.*finite"),
    "top_p 0": ({"top_p": 0.0}, "top_p.*greater than 0"),
    "top_p 1.5": ({"top_p": 1.5}, "top_p.*less than or equal to 1"),
    "top_p nan": ({"top_p": float("nan")}, "top_p"),
    "top_k 0": ({"top_k": 0}, "top_k.*greater than or equal to 1"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens.*greater than or equal to 1"),
    "no room": ({"max_seq_len": 0}, "max_seq_len.*greater than or equal to 1"),
    "unknown field": ({"top_q": 1}, "top_q"),
    "block": ({"cache_qblock": 48}, "qblock.*48.*32, 64, 128"),
    "prefill": ({"prefill": "fast"}, "prefill.*'exact' or 'stored'"),
    "negative eos": ({"eos_token_id": -1}, "eos_token_id.*0 or more"),
    "true for k": ({"top_k": True}, "top_k=True: True and False are no numbers"),
    "true for an id": ({"eos_token_id": (3, True)}, "eos_token_id=.*True and False are no numbers"),
    "negative eos in a list": ({"eos_token_id": [3, -1]}, "eos_token_id.*0 or more"),
    "a text for eos": (
        {"eos_token_id": [3, "x"]},
        r"^1 valid.*eos_token_id\n.*an id of 0.*=\[3, 'x'\]",
    ),
    "half an eos": (
        {"eos_token_id": 1.5},
        r"^1 valid.*eos_token_id\n.*an id of 0 or more, or a list of.*=1.5",
    ),
    "negative pad": ({"pad_token_id": -1}, "pad_token_id.*greater than or equal to 0"),
    "negative seed": ({"seed": -1}, "seed.*greater than or equal to 0"),
    "a gate for a fixed kind": (
        {"cache_kind": "q4", "cache_quality_max_mean_kl": 0.1},
        "max_mean_kl.*cache='auto'",
    ),
    "a window without a plan": (
        {"decode_local_window": 9},
        "decode_local_window=9 needs decode_plan",
    ),
    "an empty stop": ({"stop": ("a", "")}, "stop.*it holds ''; texts of at least 1 char"),
    "a negative stop": ({"stop": -1}, "stop.*it holds -1; .*ids of 0 or more"),
    "eos both ways": ({"ignore_eos": True, "eos_token_id": 3}, "ignore_eos.*eos_token_id"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_name_the_field_and_what_is_allowed(model: Transformer, name: str) -> None:
    settings, message = BAD_SETTINGS[name]
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        GenerateConfig(**settings)
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        Generator(model, **settings)
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        GenerateConfig().updated(**settings)


def test_overrides_change_single_fields(model: Transformer) -> None:
    config = GenerateConfig(temperature=0.0, cache_kind="q4", top_k=3)
    generator = Generator(model, config, top_k=None, max_new_tokens=2)
    assert generator.config == GenerateConfig(temperature=0.0, cache_kind="q4", max_new_tokens=2)
    assert config.top_k == 3


def test_a_seed_torch_cannot_take_is_refused_by_name(model: Transformer) -> None:
    with pytest.raises(ValueError, match="seed"):
        Generator(model, seed=2**64)


def test_a_models_own_end_outside_its_vocabulary_is_refused_as_its_own(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "config", model.config.model_copy(update={"eos_token_id": (3, 61)}))
    with pytest.raises(
        ValueError, match=r"own eos_token_id \(of its config.* is 61; .*0 to 60; set"
    ):
        Generator(model)
    assert Generator(model, ignore_eos=True).eos_ids == frozenset()
    assert Generator(model, eos_token_id=4).eos_ids == {4}


def test_a_models_end_of_minus_1_is_none(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Generator(model, temperature=0.0, max_new_tokens=3, ignore_eos=True).generate([[5, 6]])
    monkeypatch.setattr(model, "config", model.config.model_copy(update={"eos_token_id": -1}))
    generator = Generator(model, temperature=0.0, max_new_tokens=3, min_new_tokens=3)
    assert generator.eos_ids == frozenset()
    assert torch.equal(generator.generate([[5, 6]]), wanted)


@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
def test_special_ids_outside_the_vocabulary_are_refused(model: Transformer, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 61.*0 to 60"):
        Generator(model, **{field: VOCABULARY})


def test_a_block_that_does_not_fit_the_heads_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"qblock.*32"):
        greedy(model, cache_kind="q4", cache_qblock=64).generate([A])


@pytest.mark.parametrize("tokens", [2**31, 10**30])
def test_more_tokens_than_lengths_count_are_refused(model: Transformer, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_seq_len is {tokens}; 1 to 2147483520"):
        greedy(model, max_seq_len=tokens).generate([A])


def test_a_streamer_that_cannot_take_tokens_is_refused(model: Transformer) -> None:
    with pytest.raises(TypeError, match=r"streamer is of type int, without put\(\)"):
        greedy(model).generate([A], streamer=3)


BAD_INPUT: dict[str, tuple[Any, type[Exception], str]] = {
    "no rows": ([], ValueError, "no rows|empty"),
    "an empty prompt": ([[]], ValueError, "prompt 0 is empty"),
    "an empty prompt among others": ([A, []], ValueError, "prompt 1 is empty"),
    "an empty tensor": (torch.zeros(1, 0, dtype=torch.int64), ValueError, "empty"),
    "padding only": (torch.tensor([[4, 5], [PAD, PAD]]), ValueError, "prompt 1 is empty"),
    "an id too large": ([A, [5, VOCABULARY]], ValueError, "prompt 1.*61.*0 to 60"),
    "a negative id": ([[5, -1]], ValueError, "-1.*0 to 60"),
    "floats": ([[1.0, 2.0]], TypeError, "token ids"),
    "a float tensor": (torch.ones(1, 3), TypeError, "integer tensor"),
    "a boolean tensor": (torch.ones(1, 3, dtype=torch.bool), TypeError, "integer tensor"),
    "text": ("hello", TypeError, "tokenizer"),
    "texts": (["hello", "there"], TypeError, "tokenizer"),
    "bytes": (b"hello", TypeError, "tokenizer"),
    "none": (None, TypeError, "token ids"),
    "three dimensions": (torch.ones(1, 2, 3, dtype=torch.int64), TypeError, "integer tensor"),
    "an int": (5, TypeError, "token ids"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_and_changes_nothing(model: Transformer, name: str) -> None:
    ids, error, message = BAD_INPUT[name]
    generator = greedy(model, pad_token_id=PAD)
    for call in (generator.generate, generator.generate_iter, generator.prefill):
        with pytest.raises(error, match=message):
            call(ids)
    assert generator.cache is None
    assert generator.generate([A]).tolist() == [A + uncached(model, A)]


def test_another_batch_size_needs_a_reset(model: Transformer) -> None:
    generator = greedy(model)
    generator.generate([A, B])
    with pytest.raises(ValueError, match=r"2 rows.*1.*reset"):
        generator.generate([A])
    assert new_tokens(generator.generate([MORE, REST]), 6) == [
        uncached(model, A + uncached(model, A) + MORE),
        uncached(model, B + uncached(model, B) + REST),
    ]


def test_decode_step_before_prefill_is_refused(model: Transformer) -> None:
    with pytest.raises(RuntimeError, match="prefill"):
        greedy(model).decode_step([1])


def test_weights_in_float64_are_refused_by_name() -> None:
    made = Generator(model := new_model(torch.device("cpu")))
    model.double()
    with pytest.raises(TypeError, match=r"weights are float64; .* are allowed: model.float\(\)"):
        made.prefill([A])
    assert made.cache is None


@pytest.mark.parametrize(
    ("token", "error"),
    [([1, 2], ValueError), (1, ValueError), ([VOCABULARY], ValueError), ([1.0], TypeError)],
    ids=str,
)
def test_decode_step_takes_one_id_a_row(
    model: Transformer, token: Any, error: type[Exception]
) -> None:
    generator = greedy(model)
    generator.prefill([A])
    with pytest.raises(error):
        generator.decode_step(token)
    assert generator.cache is not None
    assert generator.cache.row_lengths == [len(A)]


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "a model", None], ids=["module", "str", "None"])
def test_what_is_no_language_model_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"no LanguageModel.*cache_layout"):
        Generator(thing)


# -- running out of room ---------------------------------------------------------------------


def test_a_run_that_fits_exactly_works(model: Transformer) -> None:
    """The last token is never cached, so prompt + new tokens - 1 slots are enough."""
    generator = greedy(model, max_seq_len=len(A) + 5)
    assert generator.generate([A]).tolist() == [A + uncached(model, A)]
    assert generator.cache is not None
    assert generator.cache.row_lengths == [generator.config.max_seq_len]


@pytest.mark.parametrize("call", ["generate", "generate_iter", "prefill"])
def test_overflow_raises_before_anything_changed(model: Transformer, call: str) -> None:
    generator = greedy(model, max_seq_len=26)
    history = generator.generate([A])[0].tolist()
    assert generator.cache is not None
    lengths, metrics = generator.cache.row_lengths, generator.metrics
    with pytest.raises(ValueError, match="max_seq_len=26"):
        getattr(generator, call)([list(range(30))])
    assert generator.cache.row_lengths == lengths
    assert generator.metrics == metrics
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


def test_overflow_of_the_first_prompt_leaves_no_conversation(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=8)
    with pytest.raises(ValueError, match="max_seq_len=8"):
        generator.generate([A, A])
    assert generator.cache is None
    assert greedy(model, max_seq_len=8).generate([B]).tolist() == [B + uncached(model, B)]
    assert generator.generate([B]).tolist() == [B + uncached(model, B)]


def test_overflow_by_the_pending_token_alone(model: Transformer) -> None:
    generator = greedy(model, max_new_tokens=2, max_seq_len=10)
    history = generator.generate([A])[0].tolist()
    with pytest.raises(ValueError, match="max_seq_len"):
        generator.generate([[1, 2, 3]])
    out = generator.generate([[1, 2]])
    assert out.tolist() == [[1, 2, *uncached(model, [*history, 1, 2], 2)]]


def test_decode_step_on_a_full_cache_is_refused(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=5)
    generator.prefill([A])
    with pytest.raises(ValueError, match="max_seq_len"):
        generator.decode_step([1])
    generator.rollback(1)
    torch.testing.assert_close(
        generator.decode_step([1])[0], next_logits(model, [*A[:4], 1]), atol=1e-3, rtol=0
    )


def test_the_longest_row_decides_and_is_named(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=12)
    with pytest.raises(ValueError, match="row 1"):
        generator.generate([A, C])
