"""Plain ``model.generate()`` with our cache: the stock cache's tokens, and packed reads only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.hf_matrix import (
    BEGIN,
    DEQUANTIZED,
    END,
    FEATURES,
    PACKED,
    PACKED_MARK,
    PAGE,
    SAME_AS,
    STOCK_CANNOT,
    STOCK_MARK,
    WRONG_MARK,
    exists,
    outcome,
    served,
    tiny,
)
from transformers import PreTrainedModel


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_MODELS: dict[str, PreTrainedModel] = {}
_EXPECTED: dict[tuple[str, str], Any] = {}


def stock(family: str, feature: str) -> tuple[PreTrainedModel, Any]:
    """The model, and what it gives with transformers' own cache."""
    if not exists(family):
        pytest.skip("not in this transformers")
    if served(family) == "refused":
        pytest.skip("it brings a cache of its own in this transformers")
    if feature in STOCK_CANNOT.get(family, ()):
        pytest.skip("not with the stock cache either")
    if family not in _MODELS:
        _MODELS[family] = tiny(family)
    key = (family, feature)
    if key not in _EXPECTED:
        with torch.no_grad():
            try:
                _EXPECTED[key] = FEATURES[feature](_MODELS[family])
            except ValueError as error:
                if feature not in SAME_AS:
                    raise
                _EXPECTED[key] = error
    if not isinstance(_EXPECTED[key], ValueError):
        return _MODELS[family], _EXPECTED[key]
    if "without a cache" in str(
        _EXPECTED[key]
    ):  # a slip of transformers 5.0: it never sees a cache there
        pytest.skip(f"not in this transformers: {_EXPECTED[key]}")
    return stock(family, SAME_AS[feature])


def check(family: str, feature: str, monkeypatch: Any) -> None:
    model, expected = stock(family, feature)
    found = outcome(model, feature, expected, monkeypatch)
    assert found.same
    if served(family) == "packed":
        assert found.dequantizations == 0
        assert not found.warned
    else:
        assert found.dequantizations > 0
        assert 1 <= len(found.warned) <= 2  # once a model: an assistant is another
        assert all(type(model).__name__ in said for said in found.warned)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", PACKED.values())
def test_the_same_tokens_from_packed_reads(family: str, feature: str, monkeypatch: Any) -> None:
    check(family, feature, monkeypatch)


@pytest.mark.parametrize(
    "feature", ["greedy", "left padding", "beams", "prompt lookup", "two turns"]
)
@pytest.mark.parametrize("family", DEQUANTIZED.values())
def test_the_same_tokens_where_the_model_wants_tensors(
    family: str, feature: str, monkeypatch: Any
) -> None:
    check(family, feature, monkeypatch)


@pytest.mark.parametrize("cache", ["q4", "nf4/q8"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_quantized_kinds_run_packed(
    family: str, feature: str, cache: str, monkeypatch: Any
) -> None:
    model, expected = stock(family, feature)
    found = outcome(model, feature, expected, monkeypatch, cache)
    assert found.dequantizations == 0 and not found.warned


def test_the_page_shows_the_matrix() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(BEGIN) : text.index(END)].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line[:1] == "|"]
    assert rows[0] == ["", *FEATURES], "python tests/support/hf_matrix.py"
    assert [row[0] for row in rows[2:]] == [*PACKED, *DEQUANTIZED], (
        "python tests/support/hf_matrix.py"
    )
    assert not any(WRONG_MARK in row for row in rows)
    for row in rows[2 : 2 + len(PACKED)]:
        assert set(row[1:]) <= {PACKED_MARK, STOCK_MARK}
