"""Every kernel variant compiles for every target without a GPU, spills nothing and fits."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from caramba_fast.bench import aot
from caramba_fast.bench.variants import VARIANTS

GOOD = aot.Row(
    triton="0",
    target="sm_90",
    op="quantize",
    kind="q4_0",
    dtype="fp16",
    block=32,
    fit="amax",
    options="",
    num_warps=4,
    registers=40,
    spills=0,
    shared_bytes=1024,
    instructions=100,
    instructions_per_value=3.0,
    loop_per_token=0.0,
)


def run_aot(*arguments: str, interpret: str | None = None) -> subprocess.CompletedProcess[str]:
    """aot in a process of its own: under pytest the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    command = [sys.executable, "-m", "caramba_fast.bench.aot", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("aot") / "aot.csv"
    done = run_aot("--out", str(out), "--check")
    assert done.returncode == 0, done.stderr
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_for_each_variant_and_target(table: list[dict[str, str]]) -> None:
    columns = ("target", "op", "kind", "dtype", "block", "fit", "options")
    keys = {tuple(row[name] for name in columns) for row in table}
    assert len(table) == len(keys) == len(VARIANTS) * len(aot.TARGETS)


def test_nothing_spills(table: list[dict[str, str]]) -> None:
    assert {row["spills"] for row in table} == {"0"}
    assert all(int(row["registers"]) > 0 for row in table)
    assert all(int(row["instructions"]) > 50 for row in table)


def test_check_accepts_a_good_row() -> None:
    assert aot.problems(GOOD) == []


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (replace(GOOD, spills=8), "spills"),
        (replace(GOOD, shared_bytes=227 * 1024 + 1), "shared memory"),
        (replace(GOOD, target="gfx942", shared_bytes=64 * 1024 + 1), "shared memory"),
    ],
)
def test_check_rejects_a_bad_row(row: aot.Row, word: str) -> None:
    (problem,) = aot.problems(row)
    assert word in problem
    assert row.target in problem


def test_main_fails_on_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(aot, "rows", lambda targets: iter([replace(GOOD, spills=8)]))
    assert aot.main(["--check"]) == 1
    assert aot.main([]) == 0


def test_rows_of_other_versions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "aot.csv"
    monkeypatch.setattr(aot.triton.knobs.runtime, "interpret", False)
    for version, registers in (("1", 30), ("2", 40), ("2", 50)):
        row = replace(GOOD, triton=version, registers=registers)
        monkeypatch.setattr(aot.triton, "__version__", version)
        monkeypatch.setattr(aot, "rows", lambda targets, row=row: iter([row]))
        aot.main(["--out", str(out), "--targets", "sm_90"])
    with out.open(newline="") as file:
        found = [(row["triton"], row["registers"]) for row in csv.DictReader(file)]
    assert found == [("1", "30"), ("2", "50")]


def test_interpreted_kernels_are_refused() -> None:
    done = run_aot("--targets", "sm_90", interpret="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
