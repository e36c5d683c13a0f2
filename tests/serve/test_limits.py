"""What one request may cost the others: nothing is looked at that is too long, and no setting makes steps slow."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.engines import VOCABULARY, small_model

from caramba_fast.infer.fields import BeamFields, EditFields, LengthFields, SamplingFields
from caramba_fast.models import demo_tokenizer
from caramba_fast.serve import AsyncEngine, Engine


class Slow:
    """A tokenizer with tokens of up to 8 characters that takes its time, and says when it was asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.asked = seconds, 0

    def get_vocab(self) -> dict[str, int]:
        return {"a" * (1 + index % 8): index for index in range(VOCABULARY)}

    def encode(self, text: str, **_: Any) -> list[int]:
        self.asked += 1
        time.sleep(self.seconds)
        return [5] * (1 + len(text) // 8)

    def decode(self, ids: list[int], **_: Any) -> str:
        return "a" * len(ids)


def engine(**options: Any) -> Engine:
    return Engine(small_model(), **{"cache_kind": "q4", "max_seq_len": 64, **options})


def test_text_that_cannot_fit_is_not_tokenized() -> None:
    tokenizer = Slow()
    serving = engine(tokenizer=tokenizer)
    with pytest.raises(ValueError, match="20000000 characters; max_prompt_chars allows 512"):
        serving.add_request("a" * 20_000_000)
    assert tokenizer.asked == 0
    serving.add_request("a" * 480, max_new_tokens=1)
    assert tokenizer.asked == 1, "61 tokens of eight characters do fit"


def test_the_limit_may_be_given() -> None:
    serving = engine(tokenizer=Slow(), max_prompt_chars=10)
    serving.add_request("a" * 10, max_new_tokens=1)
    with pytest.raises(ValueError, match="max_prompt_chars allows 10"):
        serving.add_request("a" * 11)


def test_what_is_refused_could_not_have_fitted() -> None:
    """With a real vocabulary: the text of its longest token, as often as there is room, is taken."""
    tokenizer = demo_tokenizer()
    serving = engine(tokenizer=tokenizer, max_seq_len=64)
    vocabulary = tokenizer.get_vocab()
    longest = max(vocabulary, key=len)
    with pytest.raises(ValueError, match=f"max_prompt_chars allows {64 * len(longest)}"):
        serving.add_request("a" * (64 * len(longest) + 1))
    for word in sorted(vocabulary, key=len)[-20:]:
        text = tokenizer.decode([vocabulary[word]])
        ids = tokenizer.encode(text * 3).ids
        assert len(text) * 3 <= len(ids) * len(longest)


def test_ids_that_cannot_fit_are_not_looked_at() -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            return 10**9

        def __iter__(self) -> Any:
            raise AssertionError("looked at")

    with pytest.raises(ValueError, match="1000000000 token ids; max_seq_len allows 64"):
        engine().add_request(Endless())


def test_a_model_is_not_asked_for_its_vocabulary_at_every_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of transformers looks it up each time: half a second for 8,000 tokens."""
    asked = []
    serving = engine()
    model = type(serving.model)
    size = property(lambda _: asked.append(1) or VOCABULARY)
    monkeypatch.setattr(model, "vocab_size", size, raising=False)
    counts = []
    for length in (2, 60):
        asked.clear()
        serving.add_request([5] * length, max_new_tokens=1)
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


def test_the_loop_goes_on_while_text_is_tokenized() -> None:
    async def serve() -> float:
        async with AsyncEngine(engine(tokenizer=Slow(0.5))) as server:
            job = asyncio.create_task(server.generate("a", max_new_tokens=1))
            gaps, last = [], time.monotonic()
            while not job.done():
                await asyncio.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - last)
                last = now
            await job
            return max(gaps)

    assert asyncio.run(serve()) < 0.4


def test_closing_does_not_wait_for_a_tokenizer() -> None:
    async def serve() -> None:
        async with AsyncEngine(engine(tokenizer=Slow(0.3))) as server:
            jobs = [asyncio.create_task(server.generate("a", max_new_tokens=1)) for _ in range(3)]
            await asyncio.sleep(0.05)
        found = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 20)
        assert {type(error).__name__ for error in found} == {"EngineStoppedError"}

    asyncio.run(serve())


#: What makes each setting as dear as it gets, for those whose cost grows with what is given.
DEAR: dict[str, Any] = {
    "bad_words_ids": tuple((5, 6) for _ in range(200_000)),
    "sequence_bias": tuple(((5, 6), 1.0) for _ in range(200_000)),
    "suppress_tokens": (5,) * 200_000,
    "stop": ("x" * 200_000,),
    "no_repeat_ngram_size": 200_000,
    "num_return_sequences": 200_000,
    "num_beams": 200_000,
    "max_new_tokens": 200_000,
    "max_length": 200_000,
    "eos_token_id": tuple(range(200_000)),
    "logit_bias": dict.fromkeys(range(200000), 1.0),
}
#: Numbers and switches: the same work whatever they are.
FLAT = {
    "min_new_tokens", "max_time", "ignore_eos", "pad_token_id", "repetition_penalty", "length_penalty",
    "early_stopping", "presence_penalty", "frequency_penalty", *SamplingFields.model_fields,
}  # fmt: skip


def test_every_setting_of_a_request_is_known_to_be_bounded() -> None:
    """A new field has to be put into one of the two lists, and thought about."""
    fields = {
        name
        for part in (LengthFields, SamplingFields, EditFields, BeamFields)
        for name in part.model_fields
    }
    assert fields == FLAT | set(DEAR)


@pytest.mark.parametrize("name", DEAR)
def test_no_setting_of_a_request_costs_without_bound(name: str) -> None:
    serving = engine(tokenizer=Slow())
    with pytest.raises(ValueError, match="allow"):
        serving.add_request([5], **{name: DEAR[name]})
    assert not serving.has_unfinished


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"bad_words_ids": ((5, 6), (7,))}, {"max_edit_ids": 3}),
        ({"sequence_bias": (((5, 6, 7), 1.0),)}, {"max_edit_ids": 3}),
        ({"stop": ("abc", "de")}, {"max_stop_chars": 5}),
        ({"no_repeat_ngram_size": 4}, {"max_ngram": 4}),
    ],
)
def test_limits_are_exact_and_fields_of_the_engine(
    given: dict[str, Any], limit: dict[str, int]
) -> None:
    ((name, allowed),) = limit.items()
    engine(tokenizer=Slow(), **limit).add_request([5], max_new_tokens=1, **given)
    serving = engine(tokenizer=Slow(), **{name: allowed - 1})
    with pytest.raises(ValueError, match=f"{name} allows {allowed - 1}"):
        serving.add_request([5], max_new_tokens=1, **given)


FORK = """
import os, signal
import torch
from support.engines import small_model
from caramba_fast.serve import Engine

torch.set_num_threads(2)
engine = Engine(small_model(), cache_kind="q4", max_seq_len=64, max_new_tokens=2, temperature=0.0)
wanted = engine.generate_batch([[5, 6]])[0].answers
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
try:
    engine.generate_batch([[5, 6]])
except RuntimeError as error:
    assert "forked" in str(error) and "set_num_threads(1)" in str(error), error
    torch.set_num_threads(1)
    assert engine.generate_batch([[5, 6]])[0].answers == wanted
    os._exit(7)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_after_use_is_told_rather_than_hanging() -> None:
    here = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=here, env={**os.environ, "PYTHONPATH": here},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
