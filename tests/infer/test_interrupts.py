"""Ctrl-C at any bytecode of a generation: the conversation is what the documentation says, and goes on.

Positions are drawn at random, a few seconds for each way of generating; `interrupts` says how to draw more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.interrupts import PACKAGE, interrupted_at, pick, places_of, repeat
from torch import Tensor

from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.infer.saved import read_session
from caramba_fast.models import ModelConfig, Transformer

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.3,
)  # fmt: skip
FIRST, SECOND, THIRD = (
    [[3, 14, 15, 9, 26, 14, 15], [5, 35, 8]],
    [[27, 18, 3, 14], [28]],
    [[7], [9, 14, 15]],
)
#: Longer than the others' first turn, so that rows of both are not mixed up.
OTHERS = [list(range(30, 47)), list(range(11, 22))]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 4}
#: Tails that a run's tokens exceed, edits that keep books of a row, rows that end at different steps.
KEPT = {
    "cache_kind": "q8:plain,residual_len=8,tail_slack=4", "max_seq_len": 128, "pad_token_id": 60,
    "max_new_tokens": 5, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "stop": (9, 30, 44),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "beams": {"temperature": 0.0, "num_beams": 3},
    "beams, several": {"temperature": 0.0, "num_beams": 3, "num_return_sequences": 2},
    "lookup": {"temperature": 0.0, "spec_k": 3},
    "lookup, sampled": {**SAMPLED, "spec_k": 3},
    "draft": {"temperature": 0.0, "spec_k": 3},
    "draft, sampled": {**SAMPLED, "spec_k": 3},
}


@cache
def model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(CONFIG).eval()


def new_generator(way: str) -> Generator:
    settings = {**KEPT, **WAYS[way]}
    if "spec_k" not in settings:
        return Generator(model(1), **settings)
    return SpeculativeGenerator(model(1), model(2) if "draft" in way else None, **settings)


def state(generator: Generator) -> Any:
    """What a conversation is to a user: tokens, and how many of them are cached."""
    cached = generator.cache
    return generator.tokens, None if cached is None else cached.row_lengths


def rows_of(prompts: list[list[int]], way: str, turn: int) -> list[list[int]]:
    """The prompts of a turn: once answers have multiplied the rows, each goes on by itself."""
    return [p for p in prompts for _ in range(2)] if way.endswith("several") and turn else prompts


def turn(generator: Generator, way: str, index: int) -> list[list[int]]:
    out = generator.generate(rows_of((FIRST, SECOND, THIRD)[index], way, index))
    assert isinstance(out, Tensor)
    return out.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_generate_is_done_or_has_not_begun(way: str) -> None:
    """Interrupted, it leaves everything as it was: asked again, it gives what it would have given."""
    undisturbed = new_generator(way)
    wanted = [turn(undisturbed, way, index) for index in range(3)]
    made = [new_generator(way) for _ in range(2)]
    turn(made[1], way, 0)
    places = [
        places_of(
            lambda g=g, i=i: turn(g, way, i),
        )
        for i, g in enumerate(made)
    ]

    def check(dice: Random) -> None:
        index = dice.randrange(2)  # the first turn, which makes the cache, or one behind it
        generator = new_generator(way)
        for earlier in range(index):
            turn(generator, way, earlier)
        before = state(generator)
        done: list[Any] = []
        position = pick(dice, places[index])
        interrupted_at(position, lambda: done.append(turn(generator, way, index)))
        if done:
            assert done[0] == wanted[index]
        else:
            assert state(generator) == before
            assert turn(generator, way, index) == wanted[index]
        for later in range(index + 1, 3):
            assert turn(generator, way, later) == wanted[later]

    repeat(check, 1.5)


def columns(generator: Generator, prompts: list[list[int]], out: list[list[int]]) -> None:
    out.extend(torch.as_tensor(column).tolist() for column in generator.generate_iter(prompts))


@pytest.mark.parametrize("way", [way for way in WAYS if "beams" not in way])
def test_a_stream_leaves_what_it_has_yielded(way: str) -> None:
    undisturbed: list[list[int]] = []
    generator = new_generator(way)
    columns(generator, FIRST, undisturbed)
    ended = generator.tokens
    places = places_of(lambda: columns(new_generator(way), FIRST, []))

    def check(dice: Random) -> None:
        generator, seen = new_generator(way), list[list[int]]()
        interrupted_at(pick(dice, places), lambda: columns(generator, FIRST, seen))
        assert seen == undisturbed[: len(seen)]
        # In the hand-over of a column the interrupt may come before the consumer has it.
        allowed = [
            [row[: len(prompt) + n] for row, prompt in zip(ended, FIRST, strict=True)]
            for n in (len(seen), len(seen) + 1)
        ]
        if not seen:
            allowed.append([])
        held = generator.tokens
        assert held in allowed, (held, len(seen))
        fresh = new_generator(way)
        if held:
            assert all(
                n <= len(row) for n, row in zip(generator.cache.row_lengths, held, strict=True)
            )
            fresh.prefill(held)
        again = {"seed": 9} if "sampled" in way else {}
        ask = SECOND if held else FIRST
        wanted = fresh.generate(ask, **again).tolist()
        assert generator.generate(ask, **again).tolist() == wanted

    repeat(check, 1.5)


@pytest.mark.parametrize("way", ["greedy", "lookup", "draft"])
def test_rollback_and_single_steps(way: str) -> None:
    """decode_step and prefill are done or have not begun, too."""
    calls: dict[str, Callable[[Generator], Any]] = {
        "prefill": lambda g: g.prefill(SECOND),
        "decode_step": lambda g: g.decode_step([3, 4]),
    }
    places = {}
    for name, call in calls.items():
        generator = new_generator(way)
        generator.generate(FIRST)
        places[name] = places_of(lambda call=call, g=generator: call(g))

    def check(dice: Random) -> None:
        name = dice.choice(sorted(calls))
        generator = new_generator(way)
        generator.generate(FIRST)
        twin = copy.deepcopy(generator.tokens)
        before = state(generator)
        done: list[Any] = []
        interrupted_at(pick(dice, places[name]), lambda: done.append(calls[name](generator)))
        if not done:
            assert generator.tokens == twin and state(generator)[0] == before[0]
            calls[name](generator)
        undisturbed = new_generator(way)
        undisturbed.generate(FIRST)
        calls[name](undisturbed)
        assert state(generator) == state(undisturbed)
        assert generator.generate(THIRD).tolist() == undisturbed.generate(THIRD).tolist()

    repeat(check, 1.0)


@pytest.mark.parametrize("way", ["sampled", "lookup", "draft", "draft, sampled"])
@pytest.mark.parametrize(("what", "files"), [("rollback", "infer/"), ("resume", "infer/saved.py")])
def test_a_conversation_is_changed_as_a_whole(
    what: str, files: str, way: str, tmp_path: Path
) -> None:
    """Rows, cache, draft and random numbers are those from before, or, behind the last of them, the new ones."""

    def begun() -> Generator:
        generator = new_generator(way)
        turn(generator, way, 0)
        return generator

    def change(generator: Generator) -> None:
        generator.rollback([3, 2]) if what == "rollback" else generator.resume(other)

    saved = new_generator(way)
    for prompts in (OTHERS, SECOND):
        saved.generate(prompts)
    saved.save(tmp_path / "other")
    other = read_session(tmp_path / "other")
    wanted = []
    for changed in (False, True):
        generator = begun()
        if changed:
            change(generator)
        wanted.append((generator.tokens, turn(generator, way, 1)))
    undisturbed = begun()
    places = places_of(lambda: change(undisturbed), PACKAGE + files)

    def check(dice: Random) -> None:
        generator = begun()
        interrupted_at(pick(dice, places), lambda: change(generator), PACKAGE + files)
        assert (generator.tokens, turn(generator, way, 1)) in wanted

    repeat(check, 1.0)


# -- Hugging Face's generate ---------------------------------------------------------------


@pytest.fixture(scope="module")
def accelerated() -> Iterator[tuple[Any, str]]:
    pytest.importorskip("transformers")
    from support.twins import twins

    from caramba_fast.hf import accelerate, restore

    theirs = copy.deepcopy(twins()[0])
    before = theirs.config._attn_implementation
    accelerate(theirs, "q8")
    yield theirs, before
    restore(theirs)
    assert theirs.config._attn_implementation == before


HF_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 2},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
}


@pytest.mark.parametrize("way", HF_WAYS)
def test_a_models_own_generate(way: str, accelerated: tuple[Any, str]) -> None:
    """The model is still accelerated, its config as before, and it gives the right tokens again."""
    theirs, _ = accelerated
    ids = torch.tensor([[3, 14, 15, 9, 26, 14, 15]])

    def run() -> Any:
        return theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, pad_token_id=60,
            **HF_WAYS[way],
        ).tolist()  # fmt: skip

    wanted, named = run(), theirs.config._attn_implementation
    places = places_of(run)
    assert places, "our code serves it"

    def check(dice: Random) -> None:
        done: list[Any] = []
        interrupted_at(pick(dice, places), lambda: done.append(run()))
        assert not done or done[0] == wanted
        assert theirs.config._attn_implementation == named
        served: list[Any] = []
        assert len(places_of(lambda: served.append(run()))) > len(places) / 2, "still accelerated"
        assert served[0] == wanted

    repeat(check, 1.5)
