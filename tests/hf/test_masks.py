"""Masks that say a pattern in a few numbers, and what no mask means."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from caramba_fast.hf.attention import caramba_attention
from caramba_fast.hf.masks import PatternMask, pattern_of

QUERIES, KEYS = 5, 12
LEFTPAD = torch.tensor([0, 3], dtype=torch.int32)


def pattern_mask(function: Any) -> PatternMask:
    """Of the newest 5 of 12 tokens."""
    pattern = pattern_of(function)
    assert pattern is not None
    return PatternMask.of((2, 1, QUERIES, KEYS), torch.device("cpu"), pattern, LEFTPAD)


FUNCTIONS = [
    causal_mask_function,
    sliding_window_causal_mask_function(4),
    chunked_causal_mask_function(4, LEFTPAD),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_values_are_what_the_function_says(function: Any) -> None:
    mask = pattern_mask(function).dense()
    assert mask.shape == (2, 1, QUERIES, KEYS)
    for row, query, key in itertools.product(range(2), range(QUERIES), range(KEYS)):
        place = torch.tensor(KEYS - QUERIES + query)
        seen = bool(function(row, 0, place, torch.tensor(key))) and key >= LEFTPAD[row]
        assert bool(mask[row, 0, query, key]) == bool(seen)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kept", [slice(-1, None), slice(2, None), slice(0, None), slice(-9, None)])
def test_slices_that_keep_the_newest_queries_stay_patterns(function: Any, kept: slice) -> None:
    mask = pattern_mask(function)
    whole, found = mask.dense(), mask[:, :, kept, :]
    assert isinstance(found, PatternMask)
    assert found.shape == (2, 1, *whole[:, :, kept].shape[2:]) and found.pattern == mask.pattern
    assert torch.equal(found.dense(), whole[:, :, kept])
    again = found[:, :, -1:]
    assert isinstance(again, PatternMask) and torch.equal(again.dense(), whole[:, :, -1:])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "place",
    [
        (slice(None), slice(None), slice(0, 2)),
        (Ellipsis, slice(3, None)),
        (slice(None), 0),
        (Ellipsis, slice(0, None, 2)),
    ],
)
def test_other_slices_are_values(function: Any, place: Any) -> None:
    mask = pattern_mask(function)
    found = mask[place]
    assert not isinstance(found, PatternMask)
    assert torch.equal(found, mask.dense()[place])


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    module = nn.Module()
    module.is_causal = causal
    return caramba_attention(module, q, k, v, None, scaling=0.25)[0].transpose(1, 2)


@pytest.mark.parametrize("queries", [1, QUERIES, KEYS])
def test_no_mask_means_that_the_newest_query_sees_all(queries: int) -> None:
    q, k, v = torch.randn(3, 2, 4, KEYS, 16, generator=torch.Generator().manual_seed(0))
    whole = attended(q, k, v, causal=True)
    found = attended(q[:, :, -queries:], k, v, causal=True)
    torch.testing.assert_close(found, whole[:, :, -queries:])
    seen = torch.softmax(q[:, :, -queries:] @ k.transpose(-1, -2) * 0.25, dim=-1) @ v
    torch.testing.assert_close(attended(q[:, :, -queries:], k, v, causal=False), seen)
