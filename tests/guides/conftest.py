"""Fixtures of the guides' tests."""

from __future__ import annotations

import pytest

from caramba_fast.models import demo_path, load_demo


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_path())


@pytest.fixture(scope="module")
def model():
    return load_demo()
