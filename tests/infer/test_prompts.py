"""Prompts of every shape become rows of real tokens."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caramba_fast.infer.sequence import Prompts, read_prompts

PAD, VOCABULARY = 0, 50
CPU = torch.device("cpu")


def read(ids: Any, mask: Any = None, pad: int | None = PAD) -> Prompts:
    return read_prompts(ids, mask, pad, VOCABULARY)


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2, 3), [[1, 2, 3]]),
        ([[1, 2, 3]], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (((1, 2), [3]), [[1, 2], [3]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int16), [[1, 2], [3, 4]]),
        ([torch.tensor([1, 2]), torch.tensor([3])], [[1, 2], [3]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({"input_ids": [[1, 2, 3]]}, [[1, 2, 3]]),
        (UserDict(input_ids=torch.tensor([[1, 2]])), [[1, 2]]),
    ],
)
def test_every_shape_is_read(ids: Any, rows: list[list[int]]) -> None:
    prompts = read(ids)
    assert prompts.rows == rows
    assert prompts.lens == [len(row) for row in rows]
    assert prompts.width == max(prompts.lens)


def test_the_mask_of_a_tokenizers_output_counts_unless_another_is_given() -> None:
    found = {
        "input_ids": torch.tensor([[7, 1, 2], [3, 4, 5]]),
        "attention_mask": [[0, 1, 1], [1] * 3],
    }
    assert read(found).rows == [[1, 2], [3, 4, 5]]
    assert read(found, [[1, 1, 1], [1, 1, 0]]).rows == [[7, 1, 2], [3, 4]]


def test_the_callers_lists_are_not_shared() -> None:
    row = [1, 2]
    prompts = read([row, [3]])
    prompts.rows[0].append(9)
    assert row == [1, 2]


def test_padding_is_stripped_at_both_ends_of_a_batch_and_kept_inside() -> None:
    prompts = read(torch.tensor([[0, 0, 1, 0, 2], [3, 0, 0, 0, 0]]))
    assert prompts.rows == [[1, 0, 2], [3]]
    assert prompts.width == 5


@pytest.mark.parametrize(("ids", "pad"), [([[0, 1, 0]], PAD), ([[0, 1], [2, 0]], None)])
def test_nothing_is_stripped_of_a_single_row_or_without_a_padding_id(
    ids: list[list[int]], pad: int | None
) -> None:
    assert read(ids, pad=pad).rows == ids


def test_a_mask_decides_even_where_tokens_equal_the_padding_id() -> None:
    prompts = read([[0, 0, 1], [0, 2, 0]], [[0, 1, 1], [1, 1, 1]])
    assert prompts.rows == [[0, 1], [0, 2, 0]]


@pytest.mark.parametrize(
    "mask",
    [
        [[0, 1, 1], [1, 1, 0]],
        torch.tensor([[0, 1, 1], [1, 1, 0]]),
        torch.tensor([[False, True, True], [True, True, False]]),
        torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
        np.array([[0, 1, 1], [1, 1, 0]]),
    ],
    ids=["lists", "integers", "booleans", "floats", "numpy"],
)
def test_masks_of_every_type(mask: Any) -> None:
    assert read(torch.tensor([[1, 2, 3], [4, 5, 6]]), mask).rows == [[2, 3], [4, 5]]


def test_a_mask_holds_for_a_single_row_too() -> None:
    assert read([[0, 1, 2]], [[0, 1, 1]]).rows == [[1, 2]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1], [1, 1, 1]], "row 0 has a gap"),
        ([[1, 1, 1], [0, 0, 0]], "prompt 1 is empty"),
        ([[1, 1, 1]], "shape"),
        ([[1, 1], [1, 1]], "shape"),
        ([1, 1, 1], "shape"),
        ([1, 1], "shape"),
        (torch.ones(2, 1, 3), "shape"),
        ([[1, 1, 1], [1, 1]], "."),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read([[1, 2, 3], [4, 5, 6]], mask)


def test_booleans_are_no_token_ids() -> None:
    with pytest.raises(TypeError, match="token ids"):
        read([[True, False]])


def test_an_empty_mask_row_is_not_hidden_by_padding_of_another() -> None:
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        read(torch.tensor([[0, 0], [1, 2]]))


@given(
    st.lists(
        st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=8), min_size=2, max_size=5
    ),
    st.booleans(),
    st.integers(0, 3),
)
def test_padding_comes_off_as_it_was_put_on(
    rows: list[list[int]], in_front: bool, extra: int
) -> None:
    width = max(map(len, rows)) + extra
    padded = []
    for row in rows:
        fill = [PAD] * (width - len(row))
        padded.append(fill + row if in_front else row + fill)
    prompts = read(torch.tensor(padded))
    assert prompts.rows == rows
    assert prompts.width == width
    front = prompts.padded_front(7, CPU)
    assert front.shape == (len(rows), width)
    assert front.dtype == torch.int64
    for line, row in zip(front.tolist(), rows, strict=True):
        assert line == [7] * (width - len(row)) + row
