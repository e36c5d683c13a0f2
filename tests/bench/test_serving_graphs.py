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
        (4, lambda count: slice(count, None), True),  # rows without a sequence: a real ring
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
        batch._given[line, rows(len(tokens))] = graphs.ROWS - 1 if others_change else 0

    monkeypatch.setattr(DecodeBatch, "fill", wrong)
    assert graphs.main(["--device", "cpu", "--kinds", "q4"]) == 1
    out = capsys.readouterr().out
    assert "q4: FAILED: " in out and (", 0 rows of others changed" not in out) == others_change


def test_without_time_it_says_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert graphs.main(["--device", "cpu", "--kinds", "q4", "--time-limit", "-1"]) == 1
    assert capsys.readouterr().out == "q4: no time: left out\n"


def test_a_shard_takes_its_kinds_and_one_that_fails_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compared(kind: str, _: str) -> Any:
        asked.append(kind)
        raise KeyError("no kernel image")

    monkeypatch.setattr(graphs, "compared", compared)
    assert graphs.main(["--device", "cpu", "--shard", "1/3"]) == 1
    assert asked == [graphs.KINDS[1]]
    assert "fp16: FAILED: KeyError at" in capsys.readouterr().out
    assert graphs.main(["--device", "cpu"]) == 1 and asked[1:] == [*graphs.KINDS]
    assert graphs.main(["--device", "cpu", "--shard", "5/6"]) == 0  # nothing is left for it
