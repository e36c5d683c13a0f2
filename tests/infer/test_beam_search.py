"""Beam search finds what Hugging Face's finds, from a cache that is reordered as it goes."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.twins import VOCABULARY, left_padded, twins

from caramba_fast.infer import GenerateConfig, Generator

PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8], [9, 7, 9, 3, 2, 38, 4, 6]]
MORE = [[27, 18], [28], [45, 9, 1]]
PAD, NEW = 60, 14


def ours(**settings: Any) -> Generator:
    defaults = {
        "cache_kind": "fp32",
        "max_new_tokens": NEW,
        "max_seq_len": 128,
        "pad_token_id": PAD,
    }
    return Generator(twins()[1], **{**defaults, **settings})


def theirs(rows: list[list[int]], **settings: Any) -> Any:
    ids, mask = left_padded(rows, PAD)
    return twins()[0].generate(
        ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=PAD, do_sample=False,
        return_dict_in_generate=True, output_scores=True, **settings,
    )  # fmt: skip


CASES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"num_beams": 3, "num_return_sequences": 2, "early_stopping": "never", "length_penalty": 2.0},
    {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "repetition_penalty": 1.3},
    {"num_beams": 2, "num_return_sequences": 2, "length_penalty": -1.0, "early_stopping": True},
    {"num_beams": 5, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    {"num_beams": 3, "bad_words_ids": [[9], [3, 14]], "suppress_tokens": [2, 7]},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("eos", [None, 9, (3, 30)], ids=str)
def test_the_answers_are_those_of_hugging_face(settings: dict[str, Any], eos: Any) -> None:
    ids, mask = left_padded(PROMPTS, PAD)
    want = theirs(PROMPTS, eos_token_id=list(eos) if isinstance(eos, tuple) else eos, **settings)
    got: Any = ours(eos_token_id=eos, return_dict=True, **settings).generate(ids, mask)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-3, rtol=1e-5)
    ended = [row[ids.shape[1] :] for row in got.sequences.tolist()]
    stops = {eos} if isinstance(eos, int) else set(eos or ())
    assert all((reason == "eos") == bool(stops & set(row)) for reason, row in zip(
        got.finish_reasons, ended, strict=True
    ))  # fmt: skip


def test_all_beams_of_a_step_can_be_scored_again() -> None:
    """The score of an answer is the mean of its tokens' log-probabilities."""
    generator = ours(num_beams=3, num_return_sequences=3, return_dict=True, ignore_eos=True)
    got: Any = generator.generate(PROMPTS[0])
    logits = twins()[1](got.sequences)[:, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    log_p = logits.gather(-1, got.sequences[:, len(PROMPTS[0]) :, None])[..., 0]
    torch.testing.assert_close(log_p.mean(1), got.sequences_scores, atol=1e-5, rtol=1e-5)
    assert got.beam_indices.shape == (3, NEW) and got.metrics.new_tokens == sum(got.new_tokens)


def test_as_many_beams_as_texts_find_the_likeliest() -> None:
    """Exhaustive: with one beam for every prefix, the answer is the argmax over all texts."""
    generator = ours(num_beams=VOCABULARY, max_new_tokens=2, ignore_eos=True)
    found = generator.generate(PROMPTS[1])[0, -2:].tolist()
    texts = list(product(range(VOCABULARY), repeat=2))
    model = twins()[1]
    first = model(torch.tensor([PROMPTS[1]]))[0, -1].log_softmax(-1)
    rows = torch.tensor([[*PROMPTS[1], token] for token in range(VOCABULARY)])
    second = model(rows)[:, -1].log_softmax(-1)
    best = max(texts, key=lambda text: float(first[text[0]] + second[text[0], text[1]]))
    assert found == list(best)


@pytest.mark.parametrize("kind", ["fp32", "q4"])
@pytest.mark.parametrize("answers", [1, 2])
def test_a_conversation_goes_on_from_the_answers(kind: str, answers: int) -> None:
    settings = {"cache_kind": kind, "prefill": "stored", "ignore_eos": True}
    generator = ours(num_beams=3, num_return_sequences=answers, **settings)
    first, held = generator.generate(PROMPTS), generator.tokens
    assert [row[-NEW:] for row in held] == first[:, -NEW:].tolist()
    assert [len(row) for row in held] == [
        len(prompt) + NEW for prompt in PROMPTS for _ in range(answers)
    ]
    more = [row for row in MORE for _ in range(answers)]
    second = generator.generate(more, num_beams=1, num_return_sequences=1, temperature=0.0)
    joined = [row + extra for row, extra in zip(held, more, strict=True)]
    again = ours(temperature=0.0, **settings)
    if kind == "fp32":
        assert torch.equal(again.generate(joined)[:, -NEW:], second[:, -NEW:])
    assert generator.cache is not None and generator.cache.batch_size == len(more)


def test_beams_that_are_sampled_repeat_with_a_seed() -> None:
    settings = {"num_beams": 3, "do_sample": True, "temperature": 1.5, "ignore_eos": True}
    runs = [ours(seed=seed, **settings).generate(PROMPTS) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_a_failure_leaves_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = ours(num_beams=3, ignore_eos=True)
    generator.generate(PROMPTS)
    before, lengths = generator.tokens, generator.cache.row_lengths
    with pytest.raises(ZeroDivisionError):
        generator.generate(MORE, logits_processor=lambda ids, scores: scores / (1 // 0))
    assert generator.tokens == before and generator.cache.row_lengths == lengths
    assert generator.generate(MORE).shape == (3, 3 + NEW)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "more answers than beams": (
        {"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3.*num_beams=2",
    ),
    "several greedy answers": (
        {"num_return_sequences": 2, "temperature": 0.0}, "num_return_sequences is 2.*greedy",
    ),
    "a penalty without beams": ({"length_penalty": 2.0}, "length_penalty is 2.0.*num_beams"),
    "stopping without beams": ({"early_stopping": True}, "early_stopping is True.*num_beams"),
    "no beams": ({"num_beams": 0}, "num_beams.*greater than or equal to 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_settings_that_contradict_are_named(name: str) -> None:
    settings, message = BAD[name]
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        GenerateConfig(**settings)


def test_beams_cannot_be_streamed() -> None:
    with pytest.raises(ValueError, match=r"num_beams is 2; generate_iter allows 1"):
        ours(num_beams=2).generate_iter(PROMPTS)


def test_rows_of_prompts_are_what_is_asked_of_allowed_tokens() -> None:
    seen = set()

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        seen.add(row)
        return [10 + row, 20 + row, 30 + row]

    out = ours(num_beams=2, ignore_eos=True).generate(PROMPTS, prefix_allowed_tokens_fn=allowed)
    assert seen == {0, 1, 2}
    assert all({t % 10 for t in row} == {i} for i, row in enumerate(out[:, -NEW:].tolist()))


def test_a_streamer_is_refused() -> None:
    with pytest.raises(ValueError, match="streamer is given and num_beams is 2"):
        ours(num_beams=2).generate(PROMPTS, streamer=SimpleNamespace(put=print, end=print))


def test_rows_stay_as_many_over_turns() -> None:
    generator = ours(num_beams=4, num_return_sequences=2, ignore_eos=True)
    assert len(generator.generate(PROMPTS)) == 6 == len(generator.generate(MORE * 2))


def test_sampled_beams_have_real_scores() -> None:
    settings = {"num_beams": 3, "num_return_sequences": 3, "do_sample": True, "top_k": 1, "seed": 1}
    got: Any = ours(**settings, return_dict=True).generate(PROMPTS)
    assert got.sequences_scores.isfinite().all()
