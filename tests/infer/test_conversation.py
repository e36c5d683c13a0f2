"""Turns of a conversation: what continues, what is taken back, and what a consumer left half way leaves."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generators import (
    MORE,
    REST,
    VOCABULARY,
    A,
    B,
    C,
    an_eos_for,
    greedy,
    new_model,
    new_tokens,
    next_logits,
    uncached,
)
from torch import Tensor

from caramba_fast.models import Transformer


@pytest.fixture(scope="module")
def model(device: torch.device) -> Transformer:
    return new_model(device)


def test_a_second_call_continues_the_first(model: Transformer) -> None:
    generator = greedy(model)
    first = generator.generate([A])[0].tolist()
    second = generator.generate([MORE])[0].tolist()
    assert second == MORE + uncached(model, first + MORE)
    third = generator.generate([REST])[0].tolist()
    assert third == REST + uncached(model, first + second + REST)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 8, 11])
def test_rollback_with_a_pending_token(model: Transformer, n: int) -> None:
    generator = greedy(model)
    history = generator.generate([A])[0].tolist()
    generator.rollback(n)
    history = history[: len(history) - n]
    out = generator.generate([MORE])[0].tolist()
    assert out == MORE + uncached(model, history + MORE)


@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_rollback_without_a_pending_token(model: Transformer, n: int) -> None:
    generator = greedy(model)
    generator.prefill([A])
    generator.rollback(n)
    out = generator.generate([MORE])[0].tolist()
    assert out == MORE + uncached(model, A[: len(A) - n] + MORE)


@pytest.mark.parametrize("counts", [[4, 0], torch.tensor([4, 0])], ids=["list", "tensor"])
def test_rollback_of_single_rows(model: Transformer, counts: Sequence[int] | Tensor) -> None:
    generator = greedy(model)
    rows = [A + uncached(model, A), B + uncached(model, B)]
    generator.generate([A, B])
    generator.rollback(counts)
    rows[0] = rows[0][:-4]
    out = generator.generate([MORE, REST])
    assert new_tokens(out, 6) == [uncached(model, rows[0] + MORE), uncached(model, rows[1] + REST)]


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        (12, ValueError),
        (-1, ValueError),
        ([1], ValueError),
        ([0, 12], ValueError),
        ("12", TypeError),
        ([1.5, 0.0], TypeError),
        (torch.tensor([1.0, 0.0]), TypeError),
        (True, TypeError),
    ],
    ids=[
        "too many",
        "negative",
        "rows",
        "too many of a row",
        "text",
        "floats",
        "float tensor",
        "bool",
    ],
)
def test_a_rollback_that_cannot_be_changes_nothing(
    model: Transformer, counts: Any, error: type[Exception]
) -> None:
    generator = greedy(model)
    generator.generate([A, A])
    with pytest.raises(error):
        generator.rollback(counts)
    out = generator.generate([MORE, MORE])
    assert new_tokens(out, 6) == [uncached(model, A + uncached(model, A) + MORE)] * 2


def test_rollback_before_any_prompt_is_refused(model: Transformer) -> None:
    with pytest.raises(RuntimeError, match="rollback"):
        greedy(model).rollback(1)


def test_reset_forgets_the_conversation_and_the_batch_size(model: Transformer) -> None:
    generator = greedy(model)
    generator.generate([A, B])
    generator.reset()
    assert generator.generate([C]).tolist() == [C + uncached(model, C)]


def test_prefill_and_decode_step_give_the_logits_of_a_whole_forward(model: Transformer) -> None:
    generator = greedy(model)
    torch.testing.assert_close(generator.prefill([A])[0], next_logits(model, A), atol=1e-3, rtol=0)
    history = list(A)
    for token in (4, 51, 0):
        history.append(token)
        logits = generator.decode_step([token])
        assert logits.shape == (1, VOCABULARY)
        torch.testing.assert_close(logits[0], next_logits(model, history), atol=1e-3, rtol=0)
    logits = generator.prefill(torch.tensor([MORE]))
    torch.testing.assert_close(logits[0], next_logits(model, history + MORE), atol=1e-3, rtol=0)


def test_decode_step_feeds_the_pending_token_first(model: Transformer) -> None:
    generator = greedy(model)
    history = generator.generate([A])[0].tolist()
    logits = generator.decode_step([8])
    torch.testing.assert_close(logits[0], next_logits(model, [*history, 8]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize("how", ["break", "close", "keep"])
def test_a_consumer_that_stops_early_leaves_a_whole_conversation(
    model: Transformer, taken: int, how: str
) -> None:
    generator = greedy(model)
    steps = generator.generate_iter([A])
    seen = [next(steps) for _ in range(taken)]
    if how == "close":
        steps.close()
    elif how == "break":
        del steps
    history = A + seen if taken else []
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


@pytest.mark.parametrize("how", ["break", "keep", "drop later"])
def test_stopping_after_one_row_ended_keeps_every_row_whole(model: Transformer, how: str) -> None:
    eos = an_eos_for(model, A, [B], 12)
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos)
    steps = generator.generate_iter([A, B])
    ended = uncached(model, A, 12).index(eos)
    for _ in range(ended + 4):
        next(steps)
    rows = [A + uncached(model, A, ended + 1), B + uncached(model, B, ended + 4)]
    if how == "break":
        del steps
    logits = generator.prefill([MORE, REST])
    if how == "drop later":
        del steps
    rows = [rows[0] + MORE, rows[1] + REST]
    for row, out in zip(rows, logits, strict=True):
        torch.testing.assert_close(out, next_logits(model, row), atol=1e-3, rtol=0)
    assert generator.cache is not None
    assert generator.cache.row_lengths == [len(row) for row in rows]


@pytest.mark.parametrize("starts", [[A], [A, B]], ids=["same rows", "other rows"])
def test_reset_ends_a_run_that_is_still_held(model: Transformer, starts: list[list[int]]) -> None:
    generator = greedy(model)
    steps = generator.generate_iter(starts)
    next(steps)
    generator.reset()
    history = generator.generate([C])[0].tolist()
    with pytest.raises((RuntimeError, StopIteration)):
        next(steps)
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


def test_a_run_that_was_overtaken_does_not_touch_the_conversation(model: Transformer) -> None:
    generator = greedy(model)
    steps = generator.generate_iter([A])
    history = [*A, next(steps)]
    history += generator.generate([MORE])[0].tolist()
    with pytest.raises((RuntimeError, StopIteration)):
        next(steps)
    assert generator.generate([REST]).tolist() == [REST + uncached(model, history + REST)]


def test_a_rollback_while_a_run_is_held_is_kept_or_refused(model: Transformer) -> None:
    generator = greedy(model)
    steps = generator.generate_iter([A])
    seen = [next(steps), next(steps), next(steps)]
    try:
        generator.rollback(2)
    except RuntimeError:
        return
    history = A + seen[:1]
    try:
        token = next(steps)
    except (RuntimeError, StopIteration):
        pass
    else:
        assert [token] == uncached(model, history, 1)
        history.append(token)
    del steps
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "generate": lambda generator, _: generator.generate([MORE]),
    "generate_iter": lambda generator, _: next(generator.generate_iter([MORE])),
    "prefill": lambda generator, _: generator.prefill([MORE]),
    "decode_step": lambda generator, _: generator.decode_step([1]),
    "rollback": lambda generator, _: generator.rollback(1),
    "reset": lambda generator, _: generator.reset(),
    "save": lambda generator, folder: generator.save(folder / "new.session"),
    "resume": lambda generator, folder: generator.resume(folder / "a.session"),
}


def refused(call: Callable[[Any, Path], Any], generator: Any, folder: Path, elsewhere: bool) -> str:
    """Why a call is refused, here or in a thread of its own."""
    said: list[str] = []

    def work() -> None:
        with pytest.raises(RuntimeError) as error:
            call(generator, folder)
        said.append(str(error.value))

    if elsewhere:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    return said[0]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["nested", "another thread"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_while_another_runs_is_refused(
    model: Transformer, name: str, elsewhere: bool, tmp_path: Path
) -> None:
    generator = greedy(model)
    generator.prefill([A])
    generator.save(tmp_path / "a.session")
    said: list[str] = []

    def within(ids: Tensor, scores: Tensor) -> Tensor:
        said.append(refused(CALLS[name], generator, tmp_path, elsewhere))
        return scores

    given = generator.generate([B], logits_processor=within)
    assert given.tolist() == [B + uncached(model, A + B)]
    assert all("one at a time" in words for words in said) and said
    history = A + given[0].tolist()
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


def test_of_calls_that_begin_at_once_one_runs(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=512)
    generator.prefill([A])
    said: set[str] = set()
    interval = sys.getswitchinterval()
    counts = [0] * 4

    def work(index: int) -> None:
        for _ in range(30):
            try:
                generator.decode_step([1])
                counts[index] += 1
            except RuntimeError as error:
                said.add(str(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(counts))]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert generator.tokens[0] == A + [1] * sum(counts) and sum(counts)
    assert all("one at a time" in words for words in said)


@pytest.mark.parametrize("name", CALLS)
def test_an_iteration_goes_on_unharmed_by_another_thread(
    model: Transformer, name: str, tmp_path: Path
) -> None:
    generator = greedy(model)
    generator.prefill([A])
    generator.save(tmp_path / "a.session")
    steps = generator.generate_iter([B])
    seen = []
    for token in steps:
        seen.append(token)
        assert "generate_iter of another thread" in refused(CALLS[name], generator, tmp_path, True)
    assert seen == uncached(model, A + B)
    CALLS[name](generator, tmp_path)


@pytest.mark.parametrize("prompt", [[[VOCABULARY]], [[]], [A, B], "no tokenizer"])
def test_an_iteration_goes_on_behind_a_prompt_that_is_refused(
    model: Transformer, prompt: Any
) -> None:
    generator = greedy(model)
    steps = generator.generate_iter([A])
    seen = [next(steps)]
    for call in (generator.generate, generator.generate_iter, generator.prefill):
        with pytest.raises((ValueError, TypeError)):
            call(prompt)
    assert [*seen, *steps] == uncached(model, A)


def test_an_iteration_of_a_thread_that_has_ended_may_be_overtaken(model: Transformer) -> None:
    generator, held = greedy(model), list[Any]()

    def begin() -> None:
        held.append(generator.generate_iter([A]))
        held.append(next(held[0]))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    history = [*A, held[1]]
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


def test_an_iteration_has_the_seed_it_was_made_with(model: Transformer) -> None:
    generator = greedy(model, temperature=1.0)
    wanted = list(generator.generate_iter([A], seed=5))
    generator.reset()
    steps = generator.generate_iter([A], seed=5)
    generator.generate_iter([B])  # never begun
    assert list(steps) == wanted


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_calls_keeps_the_history(model: Transformer, seed: int) -> None:
    """Random turns of two rows, against lists of tokens and whole forward passes."""
    draw = random.Random(seed)
    generator = greedy(model, max_new_tokens=3, max_seq_len=512, eos_token_id=[1, 2, 3, 4, 5, 6])
    rows: list[list[int]] = [[], []]

    def words() -> list[list[int]]:
        return [[draw.randrange(7, 60) for _ in range(draw.randint(1, 9))] for _ in rows]

    def add(new: list[list[int]]) -> None:
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)

    for turn in range(14):
        action = draw.choice(["generate", "iterate", "prefill", "step", "rollback"])
        if not turn or action == "prefill":
            new = words()
            generator.prefill(new)
            add(new)
        elif action == "step":
            new = words()
            generator.decode_step([row[0] for row in new])
            add([row[:1] for row in new])
        elif action == "rollback":
            counts = [draw.randint(0, min(len(row), 7)) for row in rows]
            generator.rollback(counts)
            rows = [row[: len(row) - n] for row, n in zip(rows, counts, strict=True)]
        else:
            new = words()
            steps = generator.generate_iter(new)
            add(new)
            alive = [True, True]
            for _ in range(3 if action == "generate" else draw.randint(1, 2)):
                out = next(steps, None)
                if out is None:
                    break
                for b, token in enumerate(out.tolist()):
                    if alive[b]:
                        rows[b].append(token)
                        alive[b] = token not in generator.eos_ids
            del steps
        probe = words()
        logits = generator.prefill(probe)
        add(probe)
        for row, out in zip(rows, logits, strict=True):
            torch.testing.assert_close(out, next_logits(model, row), atol=2e-3, rtol=0)
