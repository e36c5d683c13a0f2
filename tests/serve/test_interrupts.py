"""Ctrl-C at any bytecode of an engine: the run that goes on is the run that would have been.

Every output is told once, its tokens are those of an undisturbed run, and all pages come back.
``CARAMBA_FAST_STRESS_SECONDS`` makes it longer, ``CARAMBA_FAST_STRESS_SEED`` does one round again.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from support.engines import small_model, text
from support.interrupts import PACKAGE, Interrupter, interrupted_at, pick, places_of, repeat

from caramba_fast.serve import AsyncEngine, Engine, EngineStoppedError, Event

SERVE = PACKAGE + "serve/"
BASE = text(1, 100)
GREEDY = dict(max_new_tokens=6, temperature=0.0)
Action = tuple[str, Any]


class Letters:
    """A tokenizer: a letter for each token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - 48 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(48 + token) for token in ids)


def engine(settings: dict[str, Any]) -> Engine:
    return Engine(
        small_model(), cache_kind="q4", max_seq_len=160, page_size=32, ignore_eos=True,
        tokenizer=Letters(), cache_salt="everybody", **settings,
    )  # fmt: skip


class Run:
    """What a caller does and sees, across interrupts: each action until it has returned.

    Attributes:
        told: of every answer, the tokens and text of its events.
        ended: of every request, what its output says.
    """

    def __init__(self, serving: Engine, actions: dict[int, list[Action]], iterates: bool) -> None:
        self.engine, self.iterates = serving, iterates
        self.actions = {step: list(what) for step, what in actions.items()}
        self.steps = 0
        self.names: dict[int, str] = {}
        self.told: dict[tuple[str, int], tuple[list[int], str]] = {}
        self.ended: dict[str, Any] = {}

    def __call__(self) -> None:
        """Goes on to the end."""
        while any(self.actions.values()) or self.engine.has_unfinished:
            waiting = self.actions.get(self.steps, [])
            while waiting:
                self.act(*waiting[0])
                waiting.pop(0)
            if self.iterates and not any(self.actions.values()):
                for event in self.engine:
                    self.hear(event)
                continue
            for event in self.engine.step():
                self.hear(event)
            self.steps += 1
        for event in self.engine:  # what the last step before an interrupt brought
            self.hear(event)

    def act(self, what: str, given: Any) -> None:
        if what == "add":
            number, prompt, settings = given
            self.names[number] = self.engine.add_request(prompt, **settings)
        elif self.engine.is_under_way(self.names[given]):
            getattr(self.engine, what)(self.names[given])

    def hear(self, event: Event) -> None:
        assert event.request_id not in self.ended, "told behind its end"
        tokens, said = self.told.get((event.request_id, event.answer), ([], ""))
        self.told[event.request_id, event.answer] = [*tokens, *event.tokens], said + event.text
        if event.output is not None:
            output = event.output
            self.ended[event.request_id] = (
                output.answers, output.texts, output.finish_reasons, output.error
            )  # fmt: skip

    @property
    def seen(self) -> Any:
        """All of it, by the number of the request: names may differ."""
        numbers = {name: number for number, name in self.names.items()}
        told = {(numbers[name], answer): said for (name, answer), said in self.told.items()}
        return told, {numbers[name]: ended for name, ended in self.ended.items()}

    def check(self) -> None:
        assert self.engine.problems() == []
        assert self.engine.metrics.pages_held == 0
        assert self.engine.metrics.swapped_bytes == 0
        assert self.engine.under_way == []
        assert set(self.ended) == set(self.names.values())
        for name, (answers, texts, _, _) in self.ended.items():
            for index, (tokens, said) in enumerate(zip(answers, texts, strict=True)):
                assert self.told.get((name, index), ([], "")) == (tokens, said)


def assert_same(run: Run, whole: Run, actions: dict[int, list[Action]]) -> None:
    """The same was told and answered. What was cancelled may have been further, or not as far: who had to give its
    pages away in a step that was interrupted waits in the next one, in which others get on."""
    listed = [action for at in actions.values() for action in at]
    cancelled = {number for what, number in listed if what == "cancel"}
    for mine, theirs in zip(run.seen, whole.seen, strict=True):
        kept = [
            {key: told for key, told in side.items() if _number(key) not in cancelled}
            for side in (mine, theirs)
        ]
        assert kept[0] == kept[1]
    for number in cancelled & whole.seen[1].keys():
        pair = zip(run.seen[1][number][0], whole.seen[1][number][0], strict=False)
        for a, b in pair:
            assert a[: len(b)] == b[: len(a)]


def _number(key: Any) -> int:
    return key[0] if isinstance(key, tuple) else key


def scenario(dice: Random) -> tuple[dict[str, Any], dict[int, list[Action]], bool]:
    """An engine's settings, what is done before which step, and whether the rest is iterated over."""
    settings = dict(
        num_pages=dice.choice((5, 6, 24)), max_batch_size=dice.choice((2, 3, 4)),
        max_batch_tokens=dice.choice((24, 64)), lookup_tokens=dice.choice((0, 0, 3)),
        fair_tokens=dice.choice((2, 256)),
        preemption=dice.choice(("recompute", "swap")), prefix_caching=dice.random() < 0.7,
    )  # fmt: skip
    actions: dict[int, list[Action]] = {}
    for number in range(dice.randint(1, 5)):
        given: dict[str, Any] = dict(max_new_tokens=dice.choice((1, 4, 30)), temperature=0.0)
        if dice.random() < 0.6:
            given |= dict(temperature=0.8, seed=dice.randrange(99))
            given |= dict(num_return_sequences=dice.choice((1, 1, 2)))
        if dice.random() < 0.3:
            given |= dict(repetition_penalty=1.3, no_repeat_ngram_size=3)
        prompt = BASE[: dice.choice((5, 32, 64, 70))] + text(number, dice.choice((0, 7)))
        prompt = Letters().decode(prompt) if dice.random() < 0.3 else prompt
        if dice.random() < 0.5:
            given["request_id"] = f"mine {number}"
        begins = dice.choice((0, 0, dice.randrange(8)))
        actions.setdefault(begins, []).append(("add", (number, prompt, given)))
        ends = begins + 1 + dice.randrange(12)
        for chance, what, step in ((0.3, "cancel", ends), (0.2, "pause", begins)):
            if dice.random() < chance:
                actions.setdefault(step, []).append((what, number))
                if what == "pause":
                    actions.setdefault(ends, []).append(("resume", number))
    return settings, actions, dice.random() < 0.5


def disturbed(call: Callable[[], None], positions: list[int], files: str) -> list[str]:
    """Runs it to its end, interrupted at positions counted from the last interrupt on; where."""
    where = []
    for position in positions:
        at = Interrupter(position, files)
        try:
            with at:
                call()
        except KeyboardInterrupt:
            where.append(str(at.where))
        else:
            assert at.where is None, f"swallowed at {at.where}"
            return where
    call()
    return where


def round_of(dice: Random) -> None:
    settings, actions, iterates = scenario(dice)
    files = dice.choice((PACKAGE, SERVE))
    whole = Run(engine(settings), actions, iterates)
    places = places_of(whole, files)
    whole.check()
    for _ in range(6):
        run = Run(engine(settings), actions, iterates)
        positions = [pick(dice, places) for _ in range(dice.choice((1, 1, 3)))]
        print("interrupted at", disturbed(run, positions, files))
        run.check()
        assert_same(run, whole, actions)


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been() -> None:
    repeat(round_of, seconds=6.0)


def test_a_second_interrupt_while_the_first_is_undone() -> None:
    """Whoever is impatient presses Ctrl-C again: what is left half undone is undone with the next call."""

    def check(dice: Random) -> None:
        settings, actions, iterates = scenario(dice)
        whole = Run(engine(settings), actions, iterates)
        places = places_of(whole, SERVE)
        run = Run(engine(settings), actions, iterates)
        undo, once = run.engine._undo.put_back, [dice.randrange(400)]

        def put_back(books: Any) -> None:
            if once and interrupted_at(once.pop(), lambda: undo(books), SERVE):
                raise KeyboardInterrupt
            undo(books)

        run.engine._undo.put_back = put_back  # type: ignore[method-assign]
        print("interrupted at", disturbed(run, [pick(dice, places)], SERVE))
        run.check()
        assert_same(run, whole, actions)

    repeat(check, seconds=2.0)


def test_a_batch_that_is_interrupted_takes_its_requests_with_it() -> None:
    def check(dice: Random) -> None:
        settings, _, _ = scenario(dice)
        prompts = [BASE[: dice.choice((5, 40))] for _ in range(3)]
        given = dict(max_new_tokens=6, temperature=0.9, seed=dice.randrange(9))
        beside = (0, BASE[:40], dict(max_new_tokens=20, seed=3))

        def begun() -> Run:
            run = Run(engine(settings), {}, dice.random() < 0.5)
            run.act("add", beside)
            return run

        wanted = [output.answers for output in engine(settings).generate_batch(prompts, **given)]
        undisturbed = begun()
        places = places_of(lambda: undisturbed.engine.generate_batch(prompts, **given), SERVE)
        undisturbed()
        for _ in range(4):
            run = begun()
            batch = partial(run.engine.generate_batch, prompts, **given)
            assert interrupted_at(pick(dice, places), batch, SERVE)
            assert run.engine.under_way in ([], [run.names[0]])
            assert [output.answers for output in batch()] == wanted
            run()
            run.check()
            assert run.seen[1] == undisturbed.seen[1]

    repeat(check, seconds=2.0)


def test_an_answer_that_ended_in_an_interrupted_step_has_its_ring_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers that begin in the same step, of several to one prompt, get other rings."""
    for seed in range(4):
        wanted = engine({}).generate_batch([text(seed, 12)], **{**GREEDY, "max_new_tokens": 3})
        serving = engine(dict(max_batch_size=4))
        serving.add_request(text(seed, 12), **{**GREEDY, "max_new_tokens": 3})
        outputs = [event.output for _ in range(2) for event in serving.step()]
        serving.add_request(text(9, 20), max_new_tokens=2, seed=1, num_return_sequences=2)
        fork = serving._outputs.scheduler.fork

        def interrupted(*sequences: Any, fork: Any = fork) -> None:
            fork(*sequences)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(serving._outputs.scheduler, "fork", interrupted)
            serving.step()
        outputs += [event.output for event in serving]
        ended = [output for output in outputs if output and len(output.answers) == 1]
        assert [output.answers for output in ended] == [output.answers for output in wanted]


def test_pages_that_cannot_be_moved_are_given_to_nobody_in_a_step_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request they belong to fails; if it came back without them, it would go on with what others wrote."""
    settings = dict(num_pages=4, max_batch_size=2, preemption="swap")
    given: dict[str, Any] = dict(max_new_tokens=90, temperature=0.0)
    serving, happened = engine(settings), list[str]()
    read, forward = serving.pool.read, serving.model.forward_ragged

    def fails(pages: Any) -> Any:
        if not happened:
            happened.append("failed")
            raise MemoryError("no room to move to")
        return read(pages)

    def interrupted(*args: Any) -> Any:
        found = forward(*args)
        if happened == ["failed"]:
            happened.append("interrupted")
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(serving.pool, "read", fails)
    monkeypatch.setattr(serving.model, "forward_ragged", interrupted)
    names = [serving.add_request(text(seed, 30), **given) for seed in (1, 2)]
    outputs: dict[str, Any] = {}
    while serving.has_unfinished:
        with suppress(KeyboardInterrupt):
            outputs.update({e.request_id: e.output for e in serving.step() if e.output})
        assert serving.problems() == []
    assert happened == ["failed", "interrupted"]
    assert outputs[names[0]].error is None
    for seed, name in zip((1, 2), names, strict=True):
        [alone] = engine({}).generate_batch([text(seed, 30)], **given)
        assert outputs[name].error or outputs[name].answers == alone.answers


class Panic(BaseException):
    """As pyo3's PanicException."""


@pytest.mark.parametrize("error", [Panic, KeyboardInterrupt])
def test_a_tokenizer_that_raises_what_is_no_exception(error: type[BaseException]) -> None:
    """A panic fails its request; an interrupt while it works is an interrupt."""
    calls, fails = 0, 0

    class Fragile(Letters):
        def decode(self, ids: list[int], **options: Any) -> str:
            nonlocal calls
            calls += bool(ids)
            if ids and calls == fails:
                raise error("no")
            return super().decode(ids, **options)

    wanted = [engine({}).generate_batch([BASE[:n]], **GREEDY)[0].answers for n in (9, 8)]
    for call in (*range(1, 40, 4), 1000):
        calls, fails = 0, call
        serving = engine({})
        serving.tokenizer.tokenizer = Fragile()
        names = [serving.add_request(BASE[:n], **GREEDY) for n in (9, 8)]
        outputs: dict[str, Any] = {}
        interrupts = 0
        while serving.has_unfinished:
            try:
                outputs.update({e.request_id: e.output for e in serving.step() if e.output})
            except KeyboardInterrupt:
                interrupts += 1
        reached = calls >= call
        assert interrupts == (reached and error is KeyboardInterrupt)
        failed = [outputs[name].error for name in names if outputs[name].error]
        assert len(failed) == (reached and error is Panic)
        assert all("Panic: no" in said for said in failed)
        for name, answers in zip(names, wanted, strict=True):
            assert outputs[name].error or outputs[name].answers == answers
        assert serving.problems() == []
        assert serving.metrics.pages_held == 0
    assert not reached, "the last run was undisturbed"


def test_calls_in_the_middle_of_a_step_are_refused() -> None:
    """A step is not undone because something it calls asks for another."""
    serving = engine({})
    refused = []

    class Meddler(Letters):
        def decode(self, ids: list[int], **options: Any) -> str:
            if ids and not refused:
                with pytest.raises(RuntimeError, match="a step is under way") as found:
                    serving.step()
                refused.append(found)
            return super().decode(ids, **options)

    serving.tokenizer.tokenizer = Meddler()
    (output,) = serving.generate_batch([BASE[:9]], **GREEDY)
    assert refused
    assert output.answers == engine({}).generate_batch([BASE[:9]], **GREEDY)[0].answers


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_asynchronous_engine_that_is_interrupted_can_be_begun_again() -> None:
    """In the loop or in its thread: readers are told or cancelled, the engine is empty, and serves again."""

    def check(dice: Random) -> None:
        settings, _, _ = scenario(dice)
        settings |= dict(max_waiting=dice.randint(1, 3))
        prompts = [BASE[:n] for n in (5, 40, 33, 7)]
        threads, ended = dice.random() < 0.5, list[Any]()

        async def serve(inner: Engine) -> None:
            async with AsyncEngine(inner, stream_buffer=dice.choice((1, 64))) as server:
                jobs = (server.generate(prompt, **GREEDY) for prompt in prompts)
                ended.extend(await asyncio.gather(*jobs, return_exceptions=True))

        def run(inner: Engine) -> None:
            asyncio.run(asyncio.wait_for(serve(inner), 30))

        batch = engine(settings).generate_batch(prompts, **GREEDY)
        wanted = [output.answers for output in batch]
        with Interrupter(None, SERVE, threads=threads) as seen:
            run(engine(settings))
        for _ in range(3):
            inner = engine(settings)
            ended.clear()
            at = Interrupter(pick(dice, seen.places), SERVE, threads=threads)
            with suppress(KeyboardInterrupt, EngineStoppedError), at:
                run(inner)
            print("interrupted at", at.where)
            for output, tokens in zip(ended, wanted, strict=False):
                # RuntimeError: of asyncio, whose generator was interrupted as it was closed
                if isinstance(output, RuntimeError):
                    said = str(output)
                    assert (
                        isinstance(output, EngineStoppedError) or "asynchronous generator" in said
                    )
                else:
                    assert output.answers == tokens
            ended.clear()
            run(inner)
            assert [output.answers for output in ended] == wanted
            assert inner.under_way == []
            assert inner.problems() == []
            assert inner.metrics.pages_held == 0

    try:
        repeat(check, seconds=3.0)
    finally:
        # A task whose exception nobody took reports it when it is collected. Python 3.11 formats the traceback with the
        # help of ast.parse; if that is within another ast.parse, the other one raises SystemError.
        gc.collect()
