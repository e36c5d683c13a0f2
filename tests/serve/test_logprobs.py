"""Log-probabilities: of the model's own distribution, the same from every place that tells them."""

from __future__ import annotations

import math

import pytest
import torch
from support.engines import alone, engine, small_model, text

from caramba_fast.infer import Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.infer.logprobs import token_logprobs

PROMPT = text(3, 24)
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 4, "frequency_penalty": 0.5}


def generated(**options):
    found = Generator(
        small_model(), cache_kind="q4", cache_residual_len=0, prefill="stored", max_seq_len=256,
        return_dict=True,
    ).generate([PROMPT], max_new_tokens=12, **options)  # fmt: skip
    assert found.logprobs is not None
    return found


def test_they_are_those_of_the_models_own_logits():
    logits = torch.randn(3, 7)
    told = token_logprobs(logits, [4, 0, 6], 2)
    wanted = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    for row, one in enumerate(told):
        assert one.logprob == pytest.approx(float(wanted[row, one.token]), abs=1e-5)
        order = wanted[row].argsort(descending=True)[:2].tolist()
        assert [token for token, _ in one.top] == order
    assert len(token_logprobs(logits, [0, 0, 0], 99)[0].top) == 7
    assert token_logprobs(logits, [0, 0, 0], 0)[0].top == ()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED])
def test_a_generator_tells_them_before_penalties_temperature_and_filters(options):
    found = generated(logprobs=3, output_logits=True, **options)
    [told] = found.logprobs
    assert [one.token for one in told] == found.sequences[0, len(PROMPT) :].tolist()
    for one, logits in zip(told, found.logits, strict=True):
        assert one == token_logprobs(logits, [one.token], 3)[0]


@pytest.mark.parametrize("lookup", [0, 3])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED])
def test_an_engine_tells_those_of_a_generator(options, lookup):
    wanted = generated(logprobs=2, **options).logprobs[0]
    served = engine(lookup_tokens=lookup, max_batch_size=4)
    other = served.add_request(text(9, 40), max_new_tokens=20, temperature=0.0)
    served.add_request(PROMPT, max_new_tokens=12, logprobs=2, **options)
    streamed, output = [], None
    for event in served:
        if event.request_id == other:
            assert not event.logprobs
            continue
        assert len(event.logprobs) == len(event.tokens)
        streamed += event.logprobs
        output = event.output or output
    assert output.logprobs == [streamed]
    assert [one.token for one in streamed] == output.generated_tokens
    for got, want in zip(streamed, wanted, strict=True):
        assert got.token == want.token
        assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert [t for t, _ in got.top] == [t for t, _ in want.top]


def test_requests_of_one_step_may_ask_for_different_numbers_and_answers():
    served = engine(max_batch_size=8)
    counts = {served.add_request(PROMPT, max_new_tokens=3, seed=1, logprobs=k): k for k in (0, 5)}
    twice = served.add_request(PROMPT, max_new_tokens=3, seed=1, logprobs=1, num_return_sequences=2)
    outputs = {e.request_id: e.output for e in served if e.output is not None}
    for name, count in counts.items():
        assert [len(one.top) for one in outputs[name].logprobs[0]] == [count] * 3
    both = outputs[twice]
    assert [[one.token for one in told] for told in both.logprobs] == both.answers


def test_an_interrupted_step_tells_nothing_twice(monkeypatch):
    served = engine()
    served.add_request(PROMPT, max_new_tokens=6, temperature=0.0, logprobs=1)
    told = [one for event in served.step() for one in event.logprobs]
    emit = served._outputs.emit

    def interrupted(sequence):
        monkeypatch.setattr(served._outputs, "emit", emit)
        raise KeyboardInterrupt

    monkeypatch.setattr(served._outputs, "emit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        served.step()
    told += [one for event in served for one in event.logprobs]
    assert [one.token for one in told] == alone(
        "q4", tuple(PROMPT), (("max_new_tokens", 6), ("temperature", 0.0))
    )


def test_speculation_tells_them_too():
    plain = generated(logprobs=1, temperature=0.0).logprobs[0]
    config = SpeculativeConfig(
        cache_kind="q4", cache_residual_len=0, prefill="stored", max_seq_len=256, return_dict=True
    )
    found = SpeculativeGenerator(small_model(), config=config).generate(
        [PROMPT], max_new_tokens=12, logprobs=1, temperature=0.0
    )
    assert [one.token for one in found.logprobs[0]] == [one.token for one in plain]
    for got, want in zip(found.logprobs[0], plain, strict=True):
        assert math.isclose(got.logprob, want.logprob, abs_tol=1e-3)


def test_what_cannot_be_told_is_refused():
    with pytest.raises(ValueError, match="return_dict=True"):
        Generator(small_model(), logprobs=2)
    with pytest.raises(ValueError, match="num_beams is 2"):
        Generator(small_model(), logprobs=2, num_beams=2, return_dict=True)
    with pytest.raises(ValueError, match="max_logprobs allows 20"):
        engine().add_request(PROMPT, logprobs=21)
