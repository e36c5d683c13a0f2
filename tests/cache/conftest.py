"""The setups every cache contract runs with."""

from __future__ import annotations

import pytest
from support.cache_contract import SETUPS, Setup


@pytest.fixture(params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture
def plain() -> Setup:
    return Setup("q8_0")
