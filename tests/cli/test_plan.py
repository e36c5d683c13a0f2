"""``caramba-fast plan``: the table, the picture, JSON, kept plans, and errors in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from caramba_fast.cli.app import app
from caramba_fast.policy import CachePlan, CandidateRow
from caramba_fast.policy import measure as gates_module
from caramba_fast.policy.plan import plain_table

SMALL = (
    "--max-seq-len", 256, "--prompt-len", 16, "--decode-steps", 2, "--bench-prompt-len", 8,
    "--bench-steps", 1,
)  # fmt: skip
FEW = ("--candidate", "fp16", "--candidate", "q8", "--candidate", "q4:plain")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gates_module, "FEWEST_WINDOWS", 8)
    monkeypatch.setattr(gates_module, "MOST_WINDOWS", 8)
    monkeypatch.setattr("caramba_fast.policy.measure.NEEDLES", 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def invoke(*arguments: object, columns: int = 140) -> Any:
    words = ["plan", *map(str, arguments)]
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, words)


def test_the_table_has_every_candidate_and_why_it_fell(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    result = invoke("demo", *SMALL, *FEW, "--budget-mb", 0.4, "--plot", picture)
    assert result.exit_code == 0, result.output
    for word in ("fp16", "q8 ", "q4:plain", "over the budget of 0.4 MiB", "ΔNLL", "needles"):
        assert word in result.stdout
    assert "chosen: " in result.stdout and f"Written: {picture}" in result.stdout
    assert picture.stat().st_size > 5000


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from support.gguf_files import write_demo

    write_demo(tmp_path / "demo.gguf")
    result = invoke(tmp_path / "demo.gguf", *SMALL, *FEW, "--json")
    assert result.exit_code == 0, result.output
    assert [row["status"] for row in json.loads(result.stdout)["rows"]].count("chosen") == 1


def test_a_narrow_terminal_gets_the_verdicts_below(tmp_path: Path) -> None:
    result = invoke("demo:dba", *SMALL, *FEW, columns=80)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith(" fp16: "))]
    assert max(map(len, table)) <= 80  # the verdicts below are not wrapped
    assert any(line.startswith(" fp16: ") for line in lines)


def test_a_second_run_says_that_it_measured_nothing(tmp_path: Path) -> None:
    options = (*SMALL, *FEW, "--plan-path", tmp_path / "plans.json", "--max-mean-kl", 5)
    first, second = invoke("demo", *options), invoke("demo", *options)
    assert first.exit_code == second.exit_code == 0, second.output
    assert "A kept plan" in second.stdout and "A kept plan" not in first.stdout
    told = invoke("demo", *options, "--json")
    plan = CachePlan.model_validate(json.loads(told.stdout))
    stored = json.loads((tmp_path / "plans.json").read_text())["plans"]
    assert [CachePlan.model_validate(found) for found in stored.values()] == [plan]


def test_nothing_that_fits_is_the_table_and_one_line() -> None:
    result = invoke("demo", *SMALL, *FEW, "--budget-mb", 0.01)
    assert result.exit_code == 1 and result.stdout.count("over the budget") == 3
    assert len(result.stderr.splitlines()) == 1
    assert "cache_budget_mb=0.01: no candidate fits" in result.stderr


WRONG: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "model": (("nowhere",), ("'nowhere'", "demo:gqa")),
    "budget": (("demo", "--budget-mb", 0), ("cache_budget_mb=0.0", "greater than 0")),
    "gate": (("demo", "--min-needle", 2), ("cache_quality_min_needle=2.0", "less than or equal")),
    "candidate": (("demo", "--candidate", "q3"), ("q3", "nf4")),
    "streams": (("demo", "--candidate", "q4/q8/q4"), ("decoupled",)),
    "plot": (("demo", "--plot", "a.jpg"), ("a.jpg", ".png and .svg")),
    "text": (("demo", "--text", "nowhere.txt"), ("nowhere.txt is not a file",)),
    "probe": (("demo", "--probe-sec", 5), ("cache_plan_path",)),
    "prefill": (("demo", "--prefill", "never"), ("'never'", "exact")),
    "length": (("demo", "--max-seq-len", 0), ("max_seq_len is 0",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(name: str) -> None:
    options, parts = WRONG[name]
    result = invoke(*options)
    assert result.exit_code == 1, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("caramba-fast: "), result.stderr
    for part in parts:
        assert part in lines[0]


def test_the_plain_table_leaves_out_what_nothing_was_measured_for() -> None:
    row = CandidateRow(
        spec="q8_0", nbytes=2**20, bytes_per_token=8.0, status="budget", reason="big"
    )
    assert plain_table([row]).splitlines() == [
        "cache  MiB   bytes/token  verdict", "q8     1.00  8            big",
    ]  # fmt: skip
    full = row.model_copy(update={"delta_nll": 0.01, "ci": {"delta_nll": (0.0, 0.02)}})
    assert "+0.0100±0.0100" in plain_table([full])


def test_a_demo_that_would_draw_nothing_says_so_before_it_measures(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    command = ["demo", "--no-long-context", "--plot", str(picture)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert result.exit_code == 1 and "it goes with --long-context" in result.output
    assert not picture.exists()
