"""Rows of a batch get what they would get alone, however they are padded and whenever they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.generators import (
    MORE,
    PAD,
    REST,
    A,
    B,
    C,
    an_eos_for,
    front,
    greedy,
    new_model,
    new_tokens,
    next_logits,
    uncached,
)

from caramba_fast.models import Transformer


@pytest.fixture(scope="module")
def model(device: torch.device) -> Transformer:
    return new_model(device)


def back(rows: list[list[int]], fill: int = PAD) -> list[list[int]]:
    width = max(map(len, rows))
    return [row + [fill] * (width - len(row)) for row in rows]


def flags(rows: list[list[int]], pad: Callable[..., list[list[int]]]) -> list[list[int]]:
    return pad([[1] * len(row) for row in rows], 0)


ROWS = [A, B, C]
BATCHES: dict[str, tuple[Any, Any]] = {
    "ragged lists": (ROWS, None),
    "ragged tensors": ([torch.tensor(row) for row in ROWS], None),
    "padded in front": (torch.tensor(front(ROWS)), None),
    "padded behind": (torch.tensor(back(ROWS)), None),
    "mask in front": (torch.tensor(front(ROWS, 33)), torch.tensor(flags(ROWS, front))),
    "mask behind": (torch.tensor(back(ROWS, 33)), flags(ROWS, back)),
    "boolean mask": (torch.tensor(front(ROWS, 33)), torch.tensor(flags(ROWS, front)) > 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_equals_each_row_alone(model: Transformer, name: str) -> None:
    ids, mask = BATCHES[name]
    out = greedy(model, pad_token_id=PAD).generate(ids, mask)
    expected = [row + uncached(model, row) for row in ROWS]
    assert out.tolist() == front(expected)


def test_padding_on_both_sides_moves_to_the_front(model: Transformer) -> None:
    ids = torch.tensor([[PAD, *B, PAD, PAD], [PAD, PAD, PAD, *REST, PAD]])
    out = greedy(model, pad_token_id=PAD).generate(ids)
    assert out[0].tolist() == [PAD] * 3 + B + uncached(model, B)
    assert out[1].tolist() == [PAD] * 4 + REST + uncached(model, REST)


def test_a_mask_makes_the_padding_id_a_token_like_others(model: Transformer) -> None:
    row = [PAD, 5, PAD]
    ids, mask = torch.tensor([[*row, 0, 0], A]), [[1, 1, 1, 0, 0], [1] * 5]
    out = greedy(model, pad_token_id=PAD).generate(ids, mask)
    assert new_tokens(out, 6) == [uncached(model, row), uncached(model, A)]


def test_a_single_row_keeps_its_padding_ids(model: Transformer) -> None:
    row = [PAD, 5, PAD]
    out = greedy(model, pad_token_id=PAD).generate([row])
    assert out.tolist() == [row + uncached(model, row)]


def test_a_batch_continues_with_rows_of_other_lengths(model: Transformer) -> None:
    generator = greedy(model, pad_token_id=PAD)
    generator.generate([A, B])
    rows = [A + uncached(model, A), B + uncached(model, B)]
    out = generator.generate([REST, C])
    expected = [uncached(model, rows[0] + REST), uncached(model, rows[1] + C)]
    assert out.tolist() == front([REST + expected[0], C + expected[1]])


@pytest.mark.parametrize("pad", [None, PAD])
def test_a_row_that_ends_early_is_filled_up_and_disturbs_no_other(
    model: Transformer, pad: int | None
) -> None:
    eos = an_eos_for(model, A, [B], 12)
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos, pad_token_id=pad)
    out = generator.generate([A, B])
    path = uncached(model, A, 12)
    said = path[: path.index(eos) + 1]
    fill = eos if pad is None else pad
    assert new_tokens(out, 12) == [said + [fill] * (12 - len(said)), uncached(model, B, 12)]
    rows = [A + said, B + uncached(model, B, 12)]
    logits = generator.prefill([MORE, REST])
    for row, new, row_logits in zip(rows, (MORE, REST), logits, strict=True):
        torch.testing.assert_close(row_logits, next_logits(model, row + new), atol=1e-3, rtol=0)


def test_the_run_stops_when_every_row_ended(model: Transformer) -> None:
    path = uncached(model, A, 12)
    eos = path[4]
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos)
    out = generator.generate([A, A])
    assert new_tokens(out, path.index(eos) + 1) == [path[: path.index(eos) + 1]] * 2
    assert out.shape[1] == len(A) + path.index(eos) + 1
