"""A forward pass, or a draw, that fails half way leaves a conversation that goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.generators import (
    MORE,
    REST,
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

from caramba_fast.infer import Generator
from caramba_fast.models import Transformer


@pytest.fixture(scope="module")
def model(device: torch.device) -> Transformer:
    return new_model(device)


class BrokenLayerError(Exception):
    """What a failing layer raises."""


@pytest.fixture
def break_at(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], None]]:
    """Makes the second layer fail at its n-th call from now."""
    layer = model.model.layers[1]
    whole = layer.forward
    left = [-1]

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        left[0] -= 1
        if left[0] == -1:
            raise BrokenLayerError
        return whole(*args, **kwargs)

    def arm(call: int) -> None:
        left[0] = call

    monkeypatch.setattr(layer, "forward", forward)
    left[0] = -2
    yield arm


def lengths_of(generator: Generator) -> list[list[int]]:
    assert generator.cache is not None
    return [list(layer.lengths.host) for layer in generator.cache]


@pytest.mark.parametrize("rows", [[MORE], [MORE, REST]], ids=["alone", "ragged"])
def test_a_prompt_that_fails_leaves_the_conversation(
    model: Transformer, break_at: Callable[[int], None], rows: list[list[int]]
) -> None:
    generator = greedy(model)
    starts = [A, B][: len(rows)]
    generator.generate(starts)
    before = lengths_of(generator)
    break_at(0)
    with pytest.raises(BrokenLayerError):
        generator.generate(rows)
    assert lengths_of(generator) == before
    expected = [
        uncached(model, start + uncached(model, start) + row)
        for start, row in zip(starts, rows, strict=True)
    ]
    assert new_tokens(generator.generate(rows), 6) == expected


def test_a_prompt_in_pieces_that_fails_leaves_the_fp16_tail(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    """What was overwritten there cannot be had from the codes again."""
    settings: dict[str, Any] = dict(cache_kind="q4:residual_len=8", prefill_chunk=40)
    whole, broken = greedy(model, **settings), greedy(model, **settings)
    for generator in (whole, broken):
        generator.prefill([A * 4])
    break_at(1)
    with pytest.raises(BrokenLayerError):
        broken.prefill([C * 10])
    assert torch.equal(broken.decode_step([5]), whole.decode_step([5]))


def test_a_first_prompt_that_fails_leaves_no_conversation(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    generator = greedy(model)
    break_at(0)
    with pytest.raises(BrokenLayerError):
        generator.generate([A, B])
    assert generator.generate([C]).tolist() == [C + uncached(model, C)]


def test_decode_step_that_fails_leaves_the_conversation(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    generator = greedy(model)
    generator.prefill([A])
    break_at(0)
    with pytest.raises(BrokenLayerError):
        generator.decode_step([8])
    logits = generator.decode_step([8])
    torch.testing.assert_close(logits[0], next_logits(model, [*A, 8]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_step_that_fails_keeps_what_was_yielded(
    model: Transformer, break_at: Callable[[int], None], step: int
) -> None:
    generator = greedy(model)
    break_at(step)
    seen: list[int] = []
    with pytest.raises(BrokenLayerError):
        seen.extend(generator.generate_iter([A]))
    seen = uncached(model, A, step)
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, A + seen + MORE)]


def test_a_step_that_fails_after_a_row_ended_keeps_both_rows(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    eos = an_eos_for(model, A, [B], 12)
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos)
    ended = uncached(model, A, 12).index(eos)
    break_at(ended + 2)
    with pytest.raises(BrokenLayerError):
        list(generator.generate_iter([A, B]))
    rows = [A + uncached(model, A, ended + 1) + MORE, B + uncached(model, B, ended + 2) + REST]
    for row, out in zip(rows, generator.prefill([MORE, REST]), strict=True):
        torch.testing.assert_close(out, next_logits(model, row), atol=1e-3, rtol=0)


def test_generate_that_fails_after_some_steps_leaves_the_conversation(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    """Nothing was returned, so the same call can be made again."""
    generator = greedy(model)
    history = generator.generate([A])[0].tolist()
    before = lengths_of(generator)
    break_at(3)
    with pytest.raises(BrokenLayerError):
        generator.generate([MORE])
    assert lengths_of(generator) == before
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


@pytest.mark.parametrize("step", [1, 3])
def test_sampling_that_fails_does_not_feed_a_token_twice(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """NaN logits make torch.multinomial raise after the forward pass has grown the cache."""
    generator = Generator(model, cache_kind="fp32", max_new_tokens=8, top_k=1)
    whole, calls = model.lm_head.forward, [0]

    def damaged(x: Tensor) -> Tensor:
        calls[0] += 1
        return whole(x) * (torch.nan if calls[0] == step + 1 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", damaged)
        steps = generator.generate_iter([A])
        seen = [next(steps) for _ in range(step)]
        with pytest.raises(ValueError):
            next(steps)
    logits = generator.prefill([MORE])
    torch.testing.assert_close(logits[0], next_logits(model, A + seen + MORE), atol=1e-3, rtol=0)


@torch.no_grad()
def test_a_rollback_without_memory_leaves_no_layers_of_two_lengths(model, monkeypatch) -> None:
    """The ring of a deep rollback is refilled from codes, which the second layer cannot."""
    generator = Generator(model, cache="q4", cache_residual_len=8, max_seq_len=512)
    expected, forward = generator.prefill([A * 12]), model.forward

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not enough memory")

    def fails_late(*given: Any, **options: Any) -> Any:
        forward(*given, **options)
        raise RuntimeError("failed late")

    for step in (generator.rollback, lambda _: generator.prefill([B * 12])):
        with monkeypatch.context() as patched:
            if step == generator.rollback:
                generator.prefill([B * 12])
            else:
                patched.setattr(model, "forward", fails_late)
            patched.setattr(generator.cache[1], "refill", fails)
            with pytest.raises(RuntimeError, match="not enough memory"):
                step(len(B) * 12)
        assert [part.pos for part in generator.cache] == [0] * len(generator.cache)
        assert generator.tokens[0][: len(A) * 12] == A * 12
        generator.rollback(len(generator.tokens[0]) - len(A) * 12 + 1)
        torch.testing.assert_close(generator.prefill([A[-1:]]), expected)
