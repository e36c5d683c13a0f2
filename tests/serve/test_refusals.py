"""What an engine does not take on, and the reason it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import VOCABULARY, engine, small_model
from torch import nn

from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import demo_tokenizer, load_demo
from caramba_fast.serve import Engine, EngineFullError


@pytest.mark.parametrize(
    ("prompt", "given", "said"),
    [
        ([], {}, "the prompt is empty"),
        ([1.5, 2.0], {}, "float32"),
        ([[1, 2], [3, 4]], {}, r"\(2, 2\)"),
        ([1, VOCABULARY], {}, f"0 to {VOCABULARY - 1}"),
        ([1] * 250, {"max_new_tokens": 10}, "max_seq_len allows 256"),
        ([1], {"num_beams": 2}, "num_beams is 2; an engine allows 1"),
        ([1], {"num_return_sequences": 99, "temperature": 1.0}, "1 to max_batch_size"),
        ([1], {"cache_kind": "q8"}, "cache belongs to the engine"),
        ([1], {"stop": ["x"]}, "Engine\\(tokenizer"),
        ([1], {"deadline": -1.0}, "seconds above 0"),
        ([1], {"deadline": "5"}, "seconds above 0"),
        ([1], {"deadline": True}, "seconds above 0"),
        (None, {}, "the prompt is NoneType"),
        ({1: 2}, {}, "the prompt is dict"),
        ((x for x in [1]), {}, "the prompt is generator"),
        (b"ab", {}, "the prompt is bytes"),
        ([1, True], {}, "the prompt is list"),
        (["a"], {}, "the prompt is list"),
        ([[1], [2, 3]], {}, "the prompt is list"),
        ([2**63], {}, "the prompt is list"),
        (torch.ones(2, dtype=torch.complex64), {}, "complex"),
        ([1], {"return_dict_in_generate": True}, "return_dict belongs to the engine"),
        ([1], {"suppress_tokens": (VOCABULARY,)}, "suppress_tokens"),
    ],
)
def test_bad_requests_are_not_taken_on(prompt: Any, given: dict[str, Any], said: str) -> None:
    serving = engine()
    with pytest.raises(ValueError, match=said):
        serving.add_request(prompt, **given)
    assert not serving.has_unfinished
    assert serving.problems() == []


@pytest.mark.parametrize(
    "given",
    [
        {"eos_token_id": VOCABULARY},
        {"eos_token_id": (3, 10**6)},
        {"pad_token_id": VOCABULARY},
        {"pad_token_id": VOCABULARY, "ignore_eos": True},
        {"stop": (VOCABULARY,)},
        {"logit_bias": {VOCABULARY: 1.0}},
        {"sequence_bias": {(1, VOCABULARY): 1.0}},
        {"bad_words_ids": ((VOCABULARY, 1),)},
        {"suppress_tokens": (VOCABULARY,)},
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_as_by_a_generator(given: dict[str, Any]) -> None:
    """Whatever field they are in, and whether an engine, a request or a generator has it."""
    serving = engine()
    generator = Generator(small_model(), GenerateConfig(max_seq_len=64, cache_kind="q4"))
    said = []
    for call in (
        lambda: generator.generate(torch.tensor([[1]]), **given),
        lambda: serving.add_request([1], **given),
        lambda: engine(**given),
    ):
        with pytest.raises(ValueError, match="vocabulary allows 0 to 60") as refused:
            call()
        said.append(str(refused.value))
    assert said[0] == said[1] == said[2]
    assert not serving.has_unfinished


def test_a_request_longer_than_the_pool_is_refused() -> None:
    serving = engine(num_pages=2)
    with pytest.raises(ValueError, match="the pool allows 128"):
        serving.add_request([1] * 120, max_new_tokens=20)
    serving.add_request([1] * 120, max_new_tokens=9)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(TypeError, match="Engine\\(tokenizer"):
        engine().add_request("hello")


def test_ids_are_not_given_twice() -> None:
    serving = engine()
    serving.add_request([1, 2], request_id="a", max_new_tokens=1)
    with pytest.raises(ValueError, match="'a' is under way"):
        serving.add_request([1, 2], request_id="a")
    list(serving)
    serving.add_request([1, 2], request_id="a", max_new_tokens=1)


def test_only_so_many_wait() -> None:
    serving = engine(max_waiting=2)
    for _ in range(2):
        serving.add_request([1, 2], max_new_tokens=1)
    with pytest.raises(EngineFullError, match="max_waiting=2"):
        serving.add_request([1, 2])
    assert len(serving.generate_batch([[1, 2]] * 7, max_new_tokens=1)) == 7


def test_a_batch_with_a_bad_prompt_answers_none() -> None:
    serving = engine()
    with pytest.raises(ValueError, match="the prompt is empty"):
        serving.generate_batch([[1, 2], []])
    assert not serving.has_unfinished


def test_a_batch_is_no_text_and_settings_are_no_dict() -> None:
    with pytest.raises(TypeError, match="prompts is text"):
        engine(tokenizer=demo_tokenizer()).generate_batch("hello")
    with pytest.raises(TypeError, match="config is a dict"):
        engine().add_request([1], {"max_new_tokens": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_residual_len": 32}, "cache_residual_len is 32; an engine allows 0"),
        ({"cache_kind": "auto"}, "an engine needs a kind"),
        ({"prefill": "exact"}, "an engine allows 'stored'"),
        ({"page_size": 48}, "page_size"),
        ({"num_pages": 4, "cache_bytes": 10_000}, "give one of them"),
        ({"cache_bytes": 10}, "a page of 64 tokens takes"),
        ({"max_batch_tokens": 4}, "max_batch_tokens is 4"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"num_beams": 2}, "num_beams is 2"),
        ({"cuda_graph": True}, "cuda_graph"),
        ({"return_dict": True}, "return_dict is for a Generator"),
        ({"prefix_store_bytes": 2**20}, "there is no prefix_store"),
        ({"cache_budget_mb": 1.0}, "cache_budget_mb=1 is for a Generator"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine(**given)


def test_a_model_without_a_ragged_forward_is_refused() -> None:
    class Plain(nn.Module):
        eos_token_id, pad_token_id, vocab_size, device, cache_layout = 1, 1, 5, "cpu", ()

    with pytest.raises(TypeError, match="no forward_ragged"):
        Engine(Plain())


def test_more_answers_than_the_memory_has_places_for_are_refused() -> None:
    """Or it would wait for ever, and all that come behind it."""
    serving = engine(num_pages=2, page_size=64, max_batch_size=16)
    assert serving.pool.rings == 2
    with pytest.raises(ValueError, match=r"num_return_sequences is 4; 1 to 2 \(so many requests"):
        serving.add_request([5, 6, 7], num_return_sequences=4, temperature=1.0)
    (output,) = serving.generate_batch(
        [[5, 6, 7]], num_return_sequences=2, temperature=1.0, max_new_tokens=4
    )
    assert len(output.answers) == 2 and output.error is None


def test_weights_in_float64_are_refused_at_once() -> None:
    for kind in (Engine, Generator):
        with pytest.raises(TypeError, match=r"the model's weights are float64; .*model\.float\(\)"):
            kind(load_demo().double())
