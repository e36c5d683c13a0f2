"""Sixty-four clients for seconds, some of whom leave, and a server that is told to stop under them."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
pytest.importorskip("httpx")
if sys.platform != "linux":
    pytest.skip("memory is read from /proc", allow_module_level=True)

from support.http_soak import soak


def test_nothing_is_lost_and_nothing_is_left_behind():
    report = soak(5)
    assert report.problems(5) == []
    assert report.of_every_sort()
    assert set(report.ends) <= {"answered", "left", "told to come again", "stopped"}
