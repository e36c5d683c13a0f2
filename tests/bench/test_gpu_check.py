"""bench/gpu_check.sh where there is no GPU: arguments are checked, and every stage runs interpreted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from caramba_fast.bench.kernels import shards

RUN = shards.run

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu_check.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def gpu_check(
    tmp_path: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = (
        os.environ
        | variables
        | {
            "PYTHON": sys.executable,
            "CUDA_VISIBLE_DEVICES": "",
            "CARAMBA_FAST_WORK": str(tmp_path / "work"),
        }
    )
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stages", [(), ("parity", "bench")])
def test_without_a_gpu_there_is_nothing_to_check(tmp_path: Path, stages: tuple[str, ...]) -> None:
    done = gpu_check(tmp_path, str(tmp_path / "out"), *stages)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device: nothing to check" in done.stdout
    assert (
        " ".join(stages or ("build", "parity", "sanitize", "bench", "model", "tune")) in done.stdout
    )
    assert not (tmp_path / "out").exists()


def test_a_dry_run_goes_through_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = gpu_check(tmp_path, "--dry-run", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    logs = [f"{stage}.log" for stage in ("bench", "build", "model", "parity", "sanitize", "tune")]
    assert left == sorted([*logs, "bench.csv", "bench.json", "tiny-decode.csv", "tune.csv"])
    again = gpu_check(tmp_path, "--dry-run", str(tmp_path / "again"), "tune")
    assert "tune: done before" in again.stdout and (tmp_path / "again" / "tune.csv").exists()


@pytest.mark.parametrize("arguments", [("out", "polish"), ("--fast", "out"), ()])
def test_wrong_arguments(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = gpu_check(tmp_path, *arguments)
    assert done.returncode == 2
    assert "usage" in done.stderr


def modules_run() -> list[str]:
    """The modules of caramba_fast.bench that the script runs, and the one that makes the page of what it leaves."""
    text = SCRIPT.read_text()
    named = re.findall(
        r"^ +module (?!shards)(\w+) |caramba_fast\.bench\.kernels\.(\w+)|--compile-only (\w+)",
        text,
        re.MULTILINE,
    )
    named += re.findall(r"--shard (\w+)()()", text)
    names = {"shards", *("".join(found) for found in named)}
    return [*(f"kernels.{name}" for name in sorted(names)), "pages.report"]


def test_the_modules_that_are_run_are_found() -> None:
    found = [f"kernels.{name}" for name in ("check", "host_time", "run", "shards", "tune")]
    assert modules_run() == [*found, "pages.report"]


@pytest.mark.parametrize("name", [*modules_run(), "kernels.parity"])
def test_what_is_run_can_be_imported_without_pydantic(name: str) -> None:
    """A machine that is lent may have torch and Triton alone."""
    block = "import sys; sys.modules['pydantic'] = sys.modules['pydantic_core'] = None"
    command = [sys.executable, "-c", f"{block}; import caramba_fast.bench.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_without_wheels_stops_the_build(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--dry-run", str(tmp_path / "out"), "build", WHEELS=str(tmp_path))
    assert done.returncode == 1
    assert f"WHEELS is '{tmp_path}', where no wheels are" in done.stdout


@pytest.mark.parametrize(
    ("program", "status"), [("raise SystemExit(2)", 1), ("import time; time.sleep(60)", 3)]
)
def test_a_failure_is_told_from_too_little_time(
    program: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(shards, "__package__", "")
    monkeypatch.setattr(sys, "argv", ["shards", "3", "--shard", "worker"])
    monkeypatch.setattr(shards, "run", lambda module, *rest: RUN(module.removeprefix("."), *rest))
    assert shards.main() == status
    assert "|| true" not in SCRIPT.read_text().replace('head -1)" || true', "")
