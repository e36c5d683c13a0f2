"""The engine's contract: what it takes, refuses, tells, and does when something goes wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.engines import VOCABULARY, alone, small_model, text
from torch import nn

from caramba_fast.cache import PagePool, RaggedBatch, Stretch
from caramba_fast.config import cache_configs
from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import demo_tokenizer, load_demo
from caramba_fast.ops import use_backend
from caramba_fast.serve import Engine, EngineConfig, EngineFullError, RequestStatus

PROMPT = text(1, 70)


def engine(**options: Any) -> Engine:
    return Engine(small_model(), **{"cache_kind": "q4", "max_seq_len": 256, **options})


# -- answers --------------------------------------------------------------------------------


def test_events_add_up_to_the_output() -> None:
    serving = engine()
    name = serving.add_request(PROMPT, max_new_tokens=9, temperature=0.0, request_id="mine")
    events = list(serving)
    assert name == "mine"
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    output = events[-1].output
    assert output is not None
    assert output.status is RequestStatus.FINISHED
    assert output.prompt_ids == PROMPT
    assert [token for event in events for token in event.tokens] == output.generated_tokens
    given = (("max_new_tokens", 9), ("temperature", 0.0))
    assert output.generated_tokens == alone("q4", tuple(PROMPT), given)
    assert not serving.has_unfinished


def test_answers_of_one_request_share_its_prompt() -> None:
    serving = engine(max_batch_size=4)
    given = {"max_new_tokens": 12, "temperature": 1.0, "seed": 11}
    serving.add_request(PROMPT[:64], num_return_sequences=3, **given)
    for _ in range(3):
        serving.step()
    assert serving.metrics.pages_held <= 1 + 3, "a prompt of one page, and a page for each answer"
    (output,) = [event.output for event in serving if event.output]
    assert output.answers == [
        alone("q4", tuple(PROMPT[:64]), tuple(sorted({**given, "seed": 11 + i}.items())))
        for i in range(3)
    ]


def test_a_prefix_is_read_once() -> None:
    serving = engine(cache_salt="everybody")
    first, second = PROMPT[:64] + text(5, 9), PROMPT[:64] + text(6, 9)
    outputs = [serving.generate_batch([p], max_new_tokens=4)[0] for p in (first, second, first)]
    assert [output.metrics.prefix_hit_tokens for output in outputs] == [0, 64, 64]
    assert serving.metrics.prefix_hit_rate == pytest.approx(128 / (3 * 73))
    serving.clear_prefixes()
    assert serving.generate_batch([first], max_new_tokens=1)[0].metrics.prefix_hit_tokens == 0


def test_a_prompt_of_whole_known_pages_copies_the_last_one() -> None:
    """Its last token is read again for its logits, and must not be written where others read."""
    serving = engine(cache_salt="everybody")
    given = {"max_new_tokens": 6, "temperature": 0.0}
    outputs = [serving.generate_batch([text(1, 128)], **given)[0] for _ in range(2)]
    assert outputs[1].metrics.prefix_hit_tokens == 127
    assert outputs[0].generated_tokens == outputs[1].generated_tokens


def test_lookup_gives_the_same_tokens_in_fewer_steps() -> None:
    tokenizer = demo_tokenizer()
    prompt = "def read(path):\n    return open(path).read()\n\n\n" * 4
    found = []
    for lookup in (0, 6):
        serving = Engine(load_demo("gqa"), lookup_tokens=lookup, tokenizer=tokenizer)
        output = serving.generate_batch([prompt], max_new_tokens=40, temperature=0.0)[0]
        found.append((output.generated_tokens, serving.metrics))
    assert found[0][0] == found[1][0]
    assert found[1][1].accepted > 10
    assert found[1][1].steps == found[0][1].steps - found[1][1].accepted


def test_text_goes_in_and_comes_out() -> None:
    serving = Engine(load_demo("gqa"), cache_kind="q8", max_seq_len=256, tokenizer=demo_tokenizer())
    serving.add_request("def add(a, b):\n", max_new_tokens=24, temperature=0.0, stop=["\n"])
    events = list(serving)
    output = events[-1].output
    assert output is not None
    assert output.finish_reasons == ["stop"]
    assert output.texts[0].endswith("\n")
    assert "".join(event.text for event in events) == output.texts[0]


def test_decoupled_attention_is_served() -> None:
    model = load_demo("dba")
    config = GenerateConfig(
        cache_kind="fp32", prefill="stored", max_seq_len=256, max_new_tokens=8, temperature=0.0
    )
    prompt = torch.randint(model.vocab_size, (90,)).tolist()
    wanted: Any = Generator(model, config).generate(torch.tensor([prompt]))
    serving = Engine(model, cache_kind="fp32", max_seq_len=256, max_batch_tokens=40)
    (output,) = serving.generate_batch([prompt], max_new_tokens=8, temperature=0.0)
    assert output.generated_tokens == wanted[0, 90:].tolist()


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    serving = engine(max_batch_tokens=16, max_batch_size=4)
    serving.add_request(text(2, 5), max_new_tokens=30, ignore_eos=True, request_id="short")
    serving.step()
    serving.add_request(text(3, 150), max_new_tokens=2, request_id="long")
    told = [event.request_id for _ in range(8) for event in serving.step()]
    assert told.count("short") == 8, "a token every step"
    assert "long" not in told, "its prompt takes ten steps of 15 tokens"


def test_the_oldest_comes_first() -> None:
    serving = engine(max_batch_size=2)
    names = [serving.add_request(text(i, 20), max_new_tokens=3) for i in range(6)]
    ended = [event.request_id for event in serving if event.output]
    assert sorted(ended[:2]) == sorted(names[:2])
    assert sorted(ended[-2:]) == sorted(names[-2:])


# -- ends -----------------------------------------------------------------------------------


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


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "given", "said"),
    [
        ([], {}, "one or more token ids"),
        ([1.5, 2.0], {}, "float32"),
        ([[1, 2], [3, 4]], {}, r"\(2, 2\)"),
        ([1, VOCABULARY], {}, f"0 to {VOCABULARY - 1}"),
        ([1] * 250, {"max_new_tokens": 10}, "max_seq_len allows 256"),
        ([1], {"num_beams": 2}, "num_beams is 2; an engine allows 1"),
        ([1], {"num_return_sequences": 99, "temperature": 1.0}, "1 to max_batch_size"),
        ([1], {"cache_kind": "q8"}, "cache_kind belongs to the engine"),
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


def test_a_batch_beside_other_requests_keeps_their_events() -> None:
    serving = engine()
    other = serving.add_request(PROMPT, max_new_tokens=3, ignore_eos=True)
    serving.generate_batch([[1, 2]], max_new_tokens=10, ignore_eos=True)
    assert not serving.has_unfinished
    events = list(serving)
    assert [event.request_id for event in events] == [other] * 3
    assert events[-1].output is not None
    assert list(serving) == []


def test_a_batch_with_a_bad_prompt_answers_none() -> None:
    serving = engine()
    with pytest.raises(ValueError, match="one or more token ids"):
        serving.generate_batch([[1, 2], []])
    assert not serving.has_unfinished


def test_whoever_stops_iterating_misses_nothing() -> None:
    serving = engine()
    names = [serving.add_request([1, 2 + i], max_new_tokens=1) for i in range(3)]
    seen = []
    for event in serving:
        seen.append(event.request_id)
        break
    seen += [event.request_id for event in serving]
    assert sorted(seen) == sorted(names)


def test_a_batch_is_no_text_and_settings_are_no_dict() -> None:
    with pytest.raises(TypeError, match="prompts is text"):
        engine(tokenizer=demo_tokenizer()).generate_batch("hello")
    with pytest.raises(TypeError, match="config is a dict"):
        engine().add_request([1], {"max_new_tokens": 3})  # type: ignore[arg-type]


def test_a_paused_request_keeps_its_place_while_there_is_room() -> None:
    serving = engine(max_batch_size=3, num_pages=20)
    slow = serving.add_request(text(1, 100), max_new_tokens=20, ignore_eos=True)
    serving.step()
    serving.pause(slow)
    serving.add_request(text(2, 100), max_new_tokens=20, ignore_eos=True)
    for _ in range(5):
        serving.step()
    assert serving.metrics.preemptions == 0


def test_a_paused_request_waits_and_gives_way() -> None:
    serving = engine(num_pages=2, max_batch_size=2)
    slow = serving.add_request(text(1, 100), max_new_tokens=20, ignore_eos=True, temperature=0.0)
    serving.step()
    serving.pause(slow)
    assert serving.step() == []
    with pytest.raises(RuntimeError, match="every request is paused"):
        list(serving)
    quick = serving.add_request(text(2, 100), max_new_tokens=20, ignore_eos=True)
    ended = [event.request_id for _ in range(25) for event in serving.step() if event.output]
    assert ended == [quick], "the older one is paused: its pages are needed"
    serving.resume(slow)
    (output,) = [event.output for event in serving if event.output]
    given = (("ignore_eos", True), ("max_new_tokens", 20), ("temperature", 0.0))
    assert output.generated_tokens == alone("q4", tuple(text(1, 100)), given)


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


def test_memory_is_what_was_asked_for() -> None:
    wanted = 200_000
    serving = engine(cache_bytes=wanted)
    assert serving.pool.nbytes <= wanted < serving.pool.nbytes + serving.pool.page_bytes
    assert serving.report["cache_bytes"] == serving.pool.nbytes
    sixteen, four = (
        Engine(small_model(), cache_kind=kind, cache_bytes=wanted).report["cache_tokens"]
        for kind in ("fp16", "q4")
    )
    assert four >= 3.5 * sixteen


# -- the ragged batch ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "q8", "q4", "nf4", "q8/q4"])
def test_a_ragged_batch_says_what_rows_of_their_own_say(kind: str) -> None:
    model = small_model()
    configs = cache_configs(kind, residual_len=0)
    pool = PagePool(model.cache_layout, 64, 12, 256, **configs)
    together = PagePool(model.cache_layout, 64, 12, 256, **configs)
    tables, prompts = [[3, 7], [0], [5, 1, 9]], [text(1, 90), text(2, 1), text(3, 140)]
    rows = {}
    for table, prompt in zip(tables, prompts, strict=True):
        batch = RaggedBatch([Stretch(0, len(prompt), table)], pool)
        rows[len(prompt)] = model.forward_ragged(
            torch.tensor(prompt), batch, torch.tensor([len(prompt) - 1])
        )
    order = sorted(zip(prompts, tables, strict=True), key=lambda pair: len(pair[0]) > 1)
    batch = RaggedBatch([Stretch(0, len(p), t) for p, t in order], together)
    ids = torch.tensor([token for p, _ in order for token in p])
    ends = torch.tensor([len(p) for p, _ in order]).cumsum(0) - 1
    found = model.forward_ragged(ids, batch, ends)
    for logits, (prompt, _) in zip(found, order, strict=True):
        torch.testing.assert_close(logits, rows[len(prompt)][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("cpp", "fp32"),
        ("cpp", "q8"),
        ("cpp", "q4:residual_len=0"),
        ("triton", "q8/q4:residual_len=0"),
    ],
)
def test_every_backend_takes_a_ragged_batch(backend: str, kind: str) -> None:
    """Single tokens, and stretches longer than one piece of queries, over pages in any order."""
    stretches = [
        Stretch(70, 1, [4, 2]), Stretch(0, 1, [6]), Stretch(3, 40, [0]), Stretch(60, 7, [5, 3])
    ]  # fmt: skip
    layout = small_model().cache_layout[:1]
    found = {}
    for name in ("reference", backend):
        torch.manual_seed(0)
        pool = PagePool(layout, 64, 8, 256, **cache_configs(kind))
        batches = [
            [Stretch(0, s.start, s.pages) for s in stretches if s.start > 1],
            stretches,
        ]
        with use_backend(name):
            for rows in batches:
                batch = RaggedBatch(rows, pool)
                k, v, q = (torch.randn(batch.tokens, heads, 32) for heads in (2, 2, 4))
                batch[0].append_tokens(k, v)
                found[name] = batch[0].attend_tokens(q, window_size=(50, 0))
    assert found[backend].shape == (49, 4, 32)
    error = (found[backend] - found["reference"]).norm() / found["reference"].norm()
    assert error < (1e-5 if kind == "fp32" else 5e-3)


@pytest.mark.parametrize(
    ("stretches", "said"),
    [
        ([], "one token or more"),
        ([Stretch(0, 0, [1])], "1 or more"),
        ([Stretch(60, 5, [1])], "60 and 1 pages of 64"),
        ([Stretch(0, 4, [1]), Stretch(0, 1, [2])], "behind a longer stretch"),
    ],
)
def test_ragged_batches_that_make_no_sense_are_refused(stretches: list[Stretch], said: str) -> None:
    pool = PagePool(small_model().cache_layout, 64, 4, 256)
    with pytest.raises(ValueError, match=said):
        RaggedBatch(stretches, pool)


def test_pages_cannot_have_tails() -> None:
    with pytest.raises(ValueError, match="residual_len=32"):
        PagePool(small_model().cache_layout, 64, 4, 256, **cache_configs("q4"))


def test_engine_settings_are_explained() -> None:
    assert EngineConfig.__doc__ is not None
    for name in EngineConfig.model_fields:
        assert name in EngineConfig.__doc__, name
