"""bench/serving/graphs.py where there is no GPU: the padded step is compared, and what is wrong in it shows."""

from __future__ import annotations

from typing import Any

import pytest

from caramba_fast.bench.serving import graphs
from caramba_fast.cache import DecodeBatch


def test_padded_steps_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert graphs.main(["--device", "cpu", "--kinds", "q4"]) == 0
    assert "q4: ok: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "rows", "others_change"),
    [
        (4, lambda count: slice(count, None), True),  # rows without a sequence: another's ring
        (2, slice, False),  # no sequence sees its newest token
    ],
)
def test_steps_that_are_wrong_are_told(
    line: int, rows: Any, others_change: bool,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fill = DecodeBatch.fill

    def wrong(batch: DecodeBatch, tokens: Any, stretches: Any) -> None:
        fill(batch, tokens, stretches)
        batch._given[line, rows(len(tokens))] = 0

    monkeypatch.setattr(DecodeBatch, "fill", wrong)
    assert graphs.main(["--device", "cpu", "--kinds", "q4"]) == 1
    out = capsys.readouterr().out
    assert "q4: FAILED: " in out and (", 0 rows of others changed" not in out) == others_change


def test_without_time_it_says_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert graphs.main(["--device", "cpu", "--kinds", "q4", "--time-limit", "-1"]) == 1
    assert capsys.readouterr().out == "q4: no time: left out\n"
