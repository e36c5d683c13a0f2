"""Runs of a grid on a GPU: kernels are compiled ahead, and one that fails costs no more than its own figures."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba_fast.bench.kernels import measure, run, workloads
from caramba_fast.bench.kernels.comparators import Implementation
from caramba_fast.bench.kernels.registry import Case, cases
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.table import read

CPU = torch.device("cpu")
SMALL = Case("decode_attention", ("q8_0", "q4_0"), 2, 4, 2, 64, 128, tokens=3, dtype="fp32")


def test_what_is_compiled_ahead_takes_little_memory() -> None:
    for case in cases("full", "cuda"):
        small = run.smallest(case)
        for kind in case.kinds:
            held = small.batch * small.kv * small.token_bytes(kind)
            assert held < 2**28, (case.name, kind)
    assert len({run.smallest(case) for case in cases("core", "cuda")}) < 25


def test_it_is_all_that_a_grid_looks_for() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "support.ahead"],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [[part.strip() for part in line.split("|")] for line in done.stdout.splitlines()]
    assert len(lines) >= 30 and all(int(count) >= 3 for _, count, _ in lines)
    assert [(case, missing) for case, _, missing in lines if missing] == []


def test_a_kernel_that_does_not_compile_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def workload(case: Case, device: torch.device, **options: Any) -> Any:
        made.append((case.name, case.kinds))
        if case.kinds == ("q8_0",):
            raise MemoryError("ptxas fatal")
        return workloads.workload(case, device, **options)

    monkeypatch.setattr(run, "workload", workload)
    monkeypatch.setattr(run, "serving", lambda *_: "triton")
    monkeypatch.setattr(run, "cases", lambda *_: [SMALL, replace(SMALL, batch=5)])
    assert run.main(["--grid", "tiny", "--compile-only", "0/1"]) == 0
    name = run.smallest(SMALL).name
    assert made == [(name, ("q8_0",)), (name, ("q4_0",))]  # of both batches once
    assert f"compile {name} q8_0: MemoryError at" in capsys.readouterr().out
    made.clear()
    run.compile_kernels([SMALL], CPU, Shard(1, 2))
    assert made == [(name, ("q4_0",))]


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 0, "left out: no memory"),
        (RuntimeError("an illegal access"), 1, "failed: RuntimeError at test_run.py"),
        (KeyError("out of resources"), 1, "failed: KeyError at test_run.py"),
    ],
)
def test_a_case_that_fails_does_not_stop_the_others(
    error: Exception, status: int, note: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = measure.workload

    def workload(case: Case, device: torch.device) -> Any:
        if case.batch == 2:
            raise error
        return right(case, device)

    monkeypatch.setattr(measure, "workload", workload)
    monkeypatch.setattr(run, "cases", lambda *_: [SMALL, replace(SMALL, batch=1)])
    path = tmp_path / "a.csv"
    assert run.main(["--grid", "tiny", "--out", str(path)]) == status
    first, *others = read(path)
    assert first["note"].startswith(note) and first["case"] == SMALL.name
    assert any(row["implementation"] == "caramba" and row["median_us"] for row in others)


def test_a_format_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = measure.workload

    def failing() -> Any:
        raise KeyError("no kernel image")

    def workload(case: Case, device: torch.device) -> Any:
        found = right(case, device)
        found.errors["q8_0"] = failing
        return found

    monkeypatch.setattr(measure, "workload", workload)
    monkeypatch.setattr(run, "cases", lambda *_: [SMALL])
    assert run.main(["--grid", "tiny", "--out", str(tmp_path / "a.csv")]) == 1
    rows = {
        row["kind"]: row for row in read(tmp_path / "a.csv") if row["implementation"] == "caramba"
    }
    assert "no kernel image" in rows["q8_0"]["note"] and not rows["q8_0"]["median_us"]
    assert not rows["q4_0"]["note"] and float(rows["q4_0"]["median_us"]) > 0
    assert "failed: KeyError" in capsys.readouterr().err


def test_a_peer_that_does_not_run_is_absent() -> None:
    def failing() -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    peers = [Implementation("sdpa flash", (failing,), 1), Implementation("sdpa", (lambda: 0,), 1)]
    work = workloads.Workload(peers=peers)
    measure._keep_those_that_run(work)
    assert [peer.name for peer in work.peers] == ["sdpa"]
    assert work.absent["sdpa flash"].startswith("does not run here: RuntimeError at test_run.py")
