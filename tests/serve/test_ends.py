"""How requests end: cancelled, late, or with an error that is theirs alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.engines import alone, engine, small_model, text
from torch import nn

from caramba_fast.serve import Engine, RequestOutput, RequestStatus

PROMPT = text(1, 70)


def test_cancelled_requests_keep_what_they_have() -> None:
    serving = engine()
    name = serving.add_request(PROMPT, max_new_tokens=50, ignore_eos=True)
    waiting = serving.add_request(PROMPT, max_new_tokens=50, ignore_eos=True)
    for _ in range(5):
        serving.step()
    serving.cancel(name)
    serving.cancel_request(waiting)
    outputs = {e.request_id: e.output for e in serving.step() if e.output}
    assert set(outputs) == {name, waiting}
    assert len(outputs[name].generated_tokens) == 5
    assert outputs[name].status is RequestStatus.FAILED
    assert outputs[name].finish_reasons == ["cancelled"]
    assert serving.metrics.pages_held == 0
    with pytest.raises(KeyError, match="not under way"):
        serving.cancel(name)


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits() -> None:
    serving = engine(max_batch_size=1)
    for _ in range(2):
        serving.add_request(PROMPT, max_new_tokens=180, ignore_eos=True, deadline=0.05)
    serving.step()
    time.sleep(0.06)
    outputs = [event.output for event in serving.step() if event.output]
    assert [output.finish_reasons for output in outputs] == [["deadline"], ["deadline"]]
    assert [len(output.generated_tokens) for output in outputs] == [1, 0]
    assert serving.problems() == []


@pytest.mark.parametrize(("limit", "reason"), [("deadline", "deadline"), ("max_time", "time")])
def test_reading_the_text_counts_towards_a_limit_of_time(limit: str, reason: str) -> None:
    class Slow:
        def encode(self, text: str, **_: Any) -> list[int]:
            time.sleep(0.2)
            return [5, 6]

        def decode(self, ids: list[int], **_: Any) -> str:
            return "x" * len(ids)

    serving = engine(tokenizer=Slow())
    given: dict[str, Any] = {"max_new_tokens": 2, limit: 0.1}
    serving.add_request("ab", **given)
    [event] = serving.step()
    assert (event.tokens, event.finish_reason) == ([], reason)


class Breaks(nn.Module):
    """A model that fails when it sees a token."""

    def __init__(self, model: Any, token: int, nan: bool = False) -> None:
        super().__init__()
        self.inner, self.token, self.nan = model, token, nan

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)

    def forward_ragged(self, ids: Any, batch: Any, rows: Any) -> Any:
        logits = self.inner.forward_ragged(ids, batch, rows)
        if self.token in ids.tolist():
            if not self.nan:
                raise RuntimeError("the device is on fire")
            logits[(ids[rows] == self.token)] = torch.nan
        return logits


def test_a_model_error_fails_the_requests_in_it_alone() -> None:
    serving = Engine(
        Breaks(small_model(), 2), cache_kind="q4", max_seq_len=256, max_batch_size=2
    )  # fmt: skip
    good = text(1, 20)
    names = [
        serving.add_request(p, max_new_tokens=4, ignore_eos=True)
        for p in (good, [2, 5], good, good)
    ]
    outputs = {event.request_id: event.output for event in serving if event.output}
    reasons = [outputs[name].finish_reasons[0] for name in names]
    assert reasons == ["error", "error", "length", "length"]
    assert outputs[names[1]].error == "RuntimeError: the device is on fire"
    assert outputs[names[2]].error is None
    assert serving.problems() == []
    assert (serving.metrics.pages_held, serving.metrics.failed) == (0, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_one_request(temperature: float) -> None:
    serving = Engine(Breaks(small_model(), 2, nan=True), cache_kind="q4", max_seq_len=256)
    names = [
        serving.add_request(p, max_new_tokens=4, temperature=temperature, ignore_eos=True)
        for p in ([5, 2], text(1, 20))
    ]
    outputs = {event.request_id: event.output for event in serving if event.output}
    assert "NaN" in outputs[names[0]].error
    assert outputs[names[1]].finish_reasons == ["length"]
    assert serving.problems() == []


@pytest.mark.parametrize("new", [1, 4])
def test_one_answer_that_fails_ends_the_others_to_its_prompt(new: int) -> None:
    class Fails(Breaks):
        def forward_ragged(self, ids: Any, batch: Any, rows: Any) -> Any:
            logits = self.inner.forward_ragged(ids, batch, rows)
            logits[:1] = torch.nan if len(rows) == 3 else logits[:1]
            return logits

    serving = Engine(Fails(small_model(), 2), cache_kind="q4", max_seq_len=256)
    given = {"max_new_tokens": new + 1, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    name = serving.add_request(text(1, 20), num_return_sequences=3, **given)
    events = list(serving)
    assert [event.request_id for event in events if event.output] == [name]
    assert events[-1].output is not None, "nothing is told behind the end"
    assert set(events[-1].output.finish_reasons) == {"error"}
    assert serving.problems() == []


@pytest.mark.parametrize("fails", ["read", "write", "copy"])
def test_bytes_that_cannot_be_moved_fail_one_request(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = engine(
        num_pages=6, max_batch_size=4, preemption="swap", prefix_caching=fails == "copy", cache_salt="everybody"
    )  # fmt: skip
    whole = getattr(serving.pool, fails)
    calls = []

    def once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("no room to move to")
        return whole(*args)

    monkeypatch.setattr(serving.pool, fails, once)
    if fails == "copy":
        serving.generate_batch([text(1, 64)], max_new_tokens=1)
        prompts = [text(1, 64), text(2, 60)]
    else:
        prompts = [text(seed, 60) for seed in range(4)]
    given = {"max_new_tokens": 80, "temperature": 0.0, "ignore_eos": True}
    outputs = serving.generate_batch(prompts, **given)
    assert calls
    failed = [output for output in outputs if output.error]
    assert len(failed) == 1
    assert "no room to move to" in str(failed[0].error)
    assert serving.problems() == []
    assert (serving.metrics.pages_held, serving.metrics.swapped_bytes) == (0, 0)
    for prompt, output in zip(prompts, outputs, strict=True):
        if not output.error:
            wanted = alone("q4", tuple(prompt), tuple(sorted(given.items())))
            assert output.generated_tokens == wanted


@pytest.mark.parametrize(
    ("fails", "which"), [("copy_ring", 1), ("copy_ring", 2), ("copy_sinks", 2)]
)
def test_rings_and_sinks_that_cannot_be_copied_fail_one_request(
    fails: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = engine(max_batch_size=4, cache_salt="everybody")
    whole, calls = getattr(serving.pool, fails), []

    def once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == which:
            raise MemoryError("no room to copy to")
        return whole(*args)

    monkeypatch.setattr(serving.pool, fails, once)
    given: Any = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    serving.add_request(text(1, 70), num_return_sequences=3, **given)  # its first page is known
    outputs = [event.output for event in serving if event.output]
    found = serving.add_request(text(1, 90), **given)
    serving.add_request([5, 6], **given)
    outputs += [event.output for event in serving if event.output]
    [failed] = [output for output in outputs if output.error]
    assert "no room to copy to" in str(failed.error)
    assert (failed.request_id == found) == (fails == "copy_sinks")
    assert all(output.error or {"length"} == {*output.finish_reasons} for output in outputs)
    assert serving.problems() == []
    assert serving.metrics.pages_held == 0


def test_a_tokenizer_that_fails_fails_one_request() -> None:
    class Fussy:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [len(text)]

        def decode(self, ids: list[int], **_: Any) -> str:
            if 5 in ids:
                raise IndexError("no such piece")
            return "x" * len(ids)

    serving = engine(tokenizer=Fussy())
    names = [
        serving.add_request(p, max_new_tokens=3, ignore_eos=True)
        for p in (text(3, 8), [7, 5], text(4, 8))
    ]
    outputs = {event.request_id: event.output for event in serving if event.output}
    assert set(outputs) == set(names)
    assert "no such piece" in str(outputs[names[1]].error)
    assert serving.problems() == []


def told(serving: Engine) -> RequestOutput:
    """The one output of the next steps."""
    events = [event for _ in range(4) for event in serving.step()]
    [output] = [event.output for event in events if event.output]
    assert serving.problems() == [] and not serving.has_unfinished
    assert (serving.metrics.pages_held, serving.metrics.failed) == (0, 1)
    return output


def test_an_answer_with_all_its_tokens_ends_where_the_next_one_fails() -> None:
    """The first answer has its one token when the tokenizer fails with that of the second."""

    class Fails:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [5]

        def decode(self, ids: list[int], **_: Any) -> str:
            if ids[-1:] == [second]:
                raise ValueError("no such token")
            return "a" * len(ids)

    given: Any = {"max_new_tokens": 1, "temperature": 1.0, "num_return_sequences": 2, "seed": 1}
    [whole] = engine().generate_batch([[5, 6]], **given)
    (first,), (second,) = whole.answers
    assert first != second
    serving = engine(tokenizer=Fails())
    serving.add_request([5, 6], **given)
    assert "no such token" in str(told(serving).error)


def test_an_answer_with_all_its_tokens_ends_where_its_sinks_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room to copy to")

    serving = engine(cache_salt="everybody")
    monkeypatch.setattr(serving.pool, "copy_sinks", broken)
    serving.add_request(text(1, 70), max_new_tokens=1)
    assert "no room to copy to" in str(told(serving).error)


def test_a_nan_behind_a_draft_that_does_not_stand_harms_nobody() -> None:
    class Late(Breaks):
        def forward_ragged(self, ids: Any, batch: Any, rows: Any) -> Any:
            logits = self.inner.forward_ragged(ids, batch, rows)
            if len(rows) > 1:
                drafted = ids[rows][1:] != logits[:-1].argmax(-1)
                behind = drafted.cumsum(0) > 0
                logits[1:][behind] = torch.nan
            return logits

    given = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    prompt = text(9, 20) * 4
    serving = Engine(Late(small_model(), 2), cache_kind="q4", max_seq_len=256, lookup_tokens=4)
    (output,) = serving.generate_batch([prompt], **given)
    assert output.generated_tokens == alone("q4", tuple(prompt), tuple(sorted(given.items())))
    assert serving.metrics.drafted > serving.metrics.accepted


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_forgotten_prefixes_stay_forgotten_while_requests_go_on(
    steps: int, preemption: str
) -> None:
    """Whatever was written before, in half a page or on the host, is never found afterwards."""
    serving = engine(
        cache_salt="everybody", max_batch_tokens=24, preemption=preemption, num_pages=5, max_batch_size=3
    )  # fmt: skip
    given = {"temperature": 0.0, "ignore_eos": True}
    names = [
        serving.add_request(text(seed, 30), max_new_tokens=80, **given) for seed in range(1, 4)
    ]
    for _ in range(10 * steps + 1):
        serving.step()
    under_way = [name for name in names if serving.is_under_way(name)]
    serving.clear_prefixes()
    begun = {answer.request.request_id for answer in serving._outputs.scheduler.running}
    begun |= {a.request.request_id for a in serving._outputs.scheduler.waiting if a.swapped}
    outputs = {event.request_id: event.output for event in serving if event.output}
    for name in begun & set(under_way):
        output = outputs[name]
        again = [*output.prompt_ids, *output.generated_tokens, 5]
        (found,) = serving.generate_batch([again], max_new_tokens=1)
        rewritten = output.metrics.preemptions and preemption == "recompute"
        assert rewritten or found.metrics.prefix_hit_tokens == 0
    assert serving.problems() == []


def test_steps_under_inference_mode_and_outside_mix() -> None:
    serving = engine(repetition_penalty=1.3, temperature=0.0, ignore_eos=True)
    serving.add_request(PROMPT, max_new_tokens=4)
    with torch.inference_mode():
        serving.step()
    (output,) = [event.output for event in serving if event.output]
    assert output.error is None


@pytest.mark.parametrize("kind", ["q8", "q4", "nf4"])
def test_an_engine_made_under_inference_mode_answers(kind: str) -> None:
    with torch.inference_mode():
        serving = engine(cache_kind=kind, temperature=0.0, ignore_eos=True)
        outputs = [serving.generate_batch([PROMPT], max_new_tokens=4)[0]]
    outputs += serving.generate_batch([PROMPT], max_new_tokens=4)
    assert [output.error for output in outputs] == [None, None]
    assert outputs[0].answers == outputs[1].answers
