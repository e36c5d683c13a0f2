"""The order of service: fair by tokens, nobody waits for ever, and little is done twice."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.engines import alone, small_model, text
from support.interrupts import repeat

from caramba_fast.serve import Engine

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def engine(**options: Any) -> Engine:
    settings = {"cache_kind": "q4", "max_seq_len": 512, "page_size": 64, "num_pages": 64}
    return Engine(small_model(), **{**settings, **options})


def steps_to(serving: Engine, name: str, outputs: dict[str, Any]) -> int:
    """Steps until a request has its whole output."""
    for step in range(1, 2000):
        outputs.update({e.request_id: e.output for e in serving.step() if e.output})
        if name in outputs:
            return step
    raise AssertionError(f"{name} is not answered")


def test_a_request_with_many_answers_does_not_hold_one_with_a_token() -> None:
    """4 x 200 tokens take every place; who wants one of them does not wait for all 200."""
    serving, outputs = engine(max_batch_size=4), dict[str, Any]()
    given = {"max_new_tokens": 200, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    big = serving.add_request(text(1, 20), num_return_sequences=4, **given)
    for _ in range(5):
        serving.step()
    for seed in range(3):
        small = serving.add_request(text(seed, 5), max_new_tokens=1, **GREEDY)
        assert steps_to(serving, small, outputs) <= 2
    steps_to(serving, big, outputs)
    for index, tokens in enumerate(outputs[big].answers):
        settings = tuple(sorted({**given, "seed": 3 + index}.items()))
        assert tokens == alone("q4", tuple(text(1, 20)), settings)


@pytest.mark.parametrize(("preemption", "most"), [("recompute", 150), ("swap", 17)])
def test_a_long_answer_gives_way_after_its_turn(preemption: str, most: int) -> None:
    serving = engine(max_batch_size=1, fair_tokens=16, preemption=preemption)
    outputs: dict[str, Any] = {}
    long = serving.add_request(text(1, 10), max_new_tokens=300, **GREEDY)
    serving.step()
    waited = []
    for seed in range(4):
        short = serving.add_request(text(seed, 5), max_new_tokens=1, **GREEDY)
        waited.append(steps_to(serving, short, outputs))
    assert waited[0] <= 17
    assert waited[-1] <= most, "a turn is at most as long as what was read again for it"
    assert serving.is_under_way(long)
    steps_to(serving, long, outputs)
    given = tuple(sorted({**GREEDY, "max_new_tokens": 300}.items()))
    assert outputs[long].generated_tokens == alone("q4", tuple(text(1, 10)), given)


def test_a_short_prompt_is_read_beside_a_long_one() -> None:
    serving = engine(max_batch_tokens=16, max_batch_size=4)
    long = serving.add_request(text(1, 400), max_new_tokens=2, **GREEDY)
    serving.step()
    short = serving.add_request(text(2, 8), max_new_tokens=1, **GREEDY)
    outputs: dict[str, Any] = {}
    assert steps_to(serving, short, outputs) <= 2
    assert steps_to(serving, long, outputs) <= 400 // 16 + 3


def test_a_constant_stream_of_others_starves_nobody() -> None:
    """New requests come faster than they are served; the long one ends all the same."""
    serving, outputs = engine(max_batch_size=2, fair_tokens=8), dict[str, Any]()
    long = serving.add_request(text(1, 10), max_new_tokens=30, **GREEDY)
    for step in range(3000):
        if len(serving.under_way) < 12:
            serving.add_request(text(step % 7, 6), max_new_tokens=5, **GREEDY)
        outputs.update({e.request_id: e.output for e in serving.step() if e.output})
        if long in outputs:
            break
    assert long in outputs
    assert len(outputs) > 8, "and so do the others meanwhile"


def test_any_load_is_answered_right_and_little_is_read_twice() -> None:
    def check(dice: Random) -> None:
        serving = engine(
            max_batch_size=dice.randint(1, 4), fair_tokens=dice.choice((1, 4, 32)),
            preemption=dice.choice(("recompute", "swap")), max_batch_tokens=dice.choice((16, 64)),
            prefix_caching=dice.random() < 0.5, num_pages=dice.choice((4, 64)), max_seq_len=200,
        )  # fmt: skip
        asked, outputs = {}, dict[str, Any]()
        for number in range(dice.randint(2, 8)):
            given = {**GREEDY, "max_new_tokens": dice.choice((1, 5, 90))}
            prompt = text(number, dice.choice((3, 30, 100)))
            asked[serving.add_request(prompt, **given)] = (prompt, given)
            for _ in range(dice.choice((0, 3, 20))):
                outputs.update({e.request_id: e.output for e in serving.step() if e.output})
                assert serving.problems() == []
        outputs.update({e.request_id: e.output for e in serving if e.output})
        for name, (prompt, given) in asked.items():
            settings = tuple(sorted(given.items()))
            assert outputs[name].generated_tokens == alone("q4", tuple(prompt), settings)
        needed = sum(len(o.prompt_ids) + len(o.generated_tokens) for o in outputs.values())
        assert serving.problems() == []
        if serving.settings.num_pages == 64:  # pages never run out
            assert serving.metrics.step_tokens <= 2 * needed

    repeat(check, seconds=2.0)
