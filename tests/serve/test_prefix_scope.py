"""Prefixes are shared within the scope a caller gave, and nowhere else, whatever the hashes say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Any

import pytest
from support.engines import alone, small_model, text
from support.interrupts import repeat

from caramba_fast.serve import Engine, RequestOutput, block_pool

PAGE = 32
GREEDY = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}


def engine(**options: Any) -> Engine:
    settings = {"cache_kind": "q8", "max_seq_len": 160, "page_size": PAGE, "num_pages": 200}
    return Engine(small_model(), **{**settings, **options})


def answered(serving: Engine, prompt: list[int], **given: Any) -> RequestOutput:
    serving.add_request(prompt, **{**GREEDY, **given})
    (output,) = [event.output for event in serving if event.output]
    return output


@pytest.mark.parametrize(
    ("victim", "guesser", "shared"),
    [
        ({}, {}, False),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
        ({}, {"cache_salt": "request 0"}, False),
        ({}, {"cache_salt": "0 request 0"}, False),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"cache_salt": "\ud800"}, {"cache_salt": "\ud800"}, True),  # any text, half a pair too
        ({"cache_salt": "\ud800"}, {"cache_salt": "\ud801"}, False),
    ],
)
def test_nobody_guesses_what_another_sent(
    victim: dict[str, str], guesser: dict[str, str], shared: bool
) -> None:
    """A PIN at the end of a page: who may not share finds no page of the other, with the right guess either."""
    serving, head, pin = engine(), text(1, PAGE - 2), [5, 17]
    answered(serving, [*head, *pin, 7], **victim)
    guesses = [[5, other] for other in range(12, 20)]
    hits = [
        answered(serving, [*head, *guess, 9], **guesser).metrics.prefix_hit_tokens
        for guess in guesses
    ]
    assert hits == [PAGE if shared and guess == pin else 0 for guess in guesses]


def test_a_batch_is_a_scope_of_its_own() -> None:
    serving = engine(max_batch_size=1)
    for _ in range(2):
        outputs = serving.generate_batch([text(1, 40)] * 3, **GREEDY)
        assert [o.metrics.prefix_hit_tokens for o in outputs] == [0, PAGE, PAGE]
    assert answered(serving, text(1, 40)).metrics.prefix_hit_tokens == 0
    assert serving.metrics.pages_kept == 0, "what nobody can ask for is not kept"


def test_the_engine_may_give_the_salt() -> None:
    serving = engine(cache_salt="everybody")
    hits = [answered(serving, text(1, 40)).metrics.prefix_hit_tokens for _ in range(2)]
    assert hits == [0, PAGE]
    own = answered(serving, text(1, 40), cache_salt="mine")
    assert own.metrics.prefix_hit_tokens == 0


@pytest.mark.parametrize("salt", ["", 5, b"a"])
def test_a_salt_is_text(salt: Any) -> None:
    with pytest.raises(TypeError, match="cache_salt is"):
        engine().add_request([1], cache_salt=salt)


def common(a: list[int], b: list[int]) -> int:
    """Tokens of whole pages two rows begin with."""
    same = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )
    return same // PAGE * PAGE


@pytest.mark.parametrize(
    "key_of",
    [None, lambda what: b"the same", lambda what: blake2b(what, digest_size=1).digest()[:1]],
    ids=["a hash", "all collide", "many collide"],
)
def test_only_equal_tokens_of_one_scope_are_shared(
    key_of: Callable[[bytes], bytes] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged hash gets nobody another's page: answers are those of a run alone, hits those of equal tokens."""
    if key_of is not None:
        monkeypatch.setattr(block_pool, "key_of", key_of)
    heads = [text(seed, PAGE) for seed in range(3)]

    def check(dice: Random) -> None:
        serving = engine(num_pages=dice.choice((6, 40)))
        before: list[tuple[str | None, list[int]]] = []
        for _ in range(12):
            salt = dice.choice((None, "a", "b"))
            prompt = [
                *dice.choice(heads),
                *dice.choice(heads),
                *dice.choice(heads)[: dice.choice((1, 32))],
            ]
            output = answered(serving, prompt, **({} if salt is None else {"cache_salt": salt}))
            hit = output.metrics.prefix_hit_tokens
            shared = [common(prompt, row) for other, row in before if other == salt is not None]
            assert hit <= max(shared, default=0)
            if key_of is None and len(serving._outputs.scheduler.blocks.pages.references) == 40:
                assert hit == min(max(shared, default=0), len(prompt) - 1)
            given = tuple(sorted(GREEDY.items()))
            assert output.generated_tokens == alone("q8", tuple(prompt), given)
            assert serving.problems() == []
            before.append((salt, [*prompt, *output.generated_tokens[:-1]]))

    repeat(check, seconds=1.0)


def test_sinks_stay_with_as_many_first_pages_as_there_is_room_for() -> None:
    """4 bits keep the first tokens in fp16: who finds a prefix has them, or reads it again."""
    serving = engine(cache_kind="q4", max_batch_size=1, num_pages=40)
    room = serving.pool.sink_rows - serving.pool.rings
    assert room == 1 + 40 // 16
    prompts = [text(seed, 40) for seed in range(room + 2)]
    given = tuple(sorted(GREEDY.items()))

    def hits(of: list[list[int]]) -> list[int]:
        found = []
        for prompt in of:
            output = answered(serving, prompt, cache_salt="a")
            assert output.generated_tokens == alone("q4", tuple(prompt), given)
            assert not serving.problems()
            found.append(output.metrics.prefix_hit_tokens)
        return found

    assert hits(prompts) == [0] * len(prompts)
    assert hits(prompts[-room:]) == [PAGE] * room
    assert hits(prompts[:1]) == [0], "the one wanted longest ago went"
    assert hits(prompts[:1]) == [PAGE], "and is there again once it was read"
    assert hits(prompts[-room + 1 :]) == [PAGE] * (room - 1)
    for prompt in prompts:  # which nobody else may find: their sinks make room first
        assert answered(serving, prompt).metrics.prefix_hit_tokens == 0
    assert hits(prompts[-room + 1 :]) == [PAGE] * (room - 1)


def test_more_sinks_than_a_page_has_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="sink_len=40; up to page_size=32 is allowed"):
        engine(cache_kind="q4", cache_sink_len=40)
    serving = engine(cache_kind="q4:plain,sink_len=6")
    prompt = text(3, 50)
    given = tuple(sorted(GREEDY.items()))
    for wanted in (0, PAGE):
        output = answered(serving, prompt, cache_salt="a")
        assert output.generated_tokens == alone("q4:plain,sink_len=6", tuple(prompt), given)
        assert output.metrics.prefix_hit_tokens == wanted


def test_long_prefixes_are_compared_once_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not each page with all that stands before it."""
    serving, prompt, walks = engine(max_seq_len=2048), text(1, 40 * PAGE + 1), []
    is_same = block_pool.Content.is_same

    def noted(mine: block_pool.Content, theirs: block_pool.Content) -> bool:
        walks.append(mine.parent is not theirs.parent)
        return is_same(mine, theirs)

    monkeypatch.setattr(block_pool.Content, "is_same", noted)
    answered(serving, prompt, cache_salt="a")
    assert answered(serving, prompt, cache_salt="a").metrics.prefix_hit_tokens == 40 * PAGE
    assert sum(walks) <= 1
