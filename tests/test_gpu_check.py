"""bench/gpu_check.sh where there is no GPU: arguments are checked, and every stage runs interpreted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpu_check.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def gpu_check(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "CARAMBA_FAST_WORK": str(tmp_path / "work"),
    }
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stages", [(), ("parity", "bench")])
def test_without_a_gpu_there_is_nothing_to_check(tmp_path: Path, stages: tuple[str, ...]) -> None:
    done = gpu_check(tmp_path, str(tmp_path / "out"), *stages)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device: nothing to check" in done.stdout
    assert " ".join(stages or ("build", "parity", "sanitize", "tune", "bench")) in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_dry_run_goes_through_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = gpu_check(tmp_path, "--dry-run", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    logs = [f"{stage}.log" for stage in ("bench", "build", "parity", "sanitize", "tune")]
    assert left == sorted([*logs, "bench.csv", "bench.json", "tune.csv"])
    again = gpu_check(tmp_path, "--dry-run", str(tmp_path / "again"), "tune")
    assert "tune: done before" in again.stdout and (tmp_path / "again" / "tune.csv").exists()


@pytest.mark.parametrize("arguments", [("out", "polish"), ("--fast", "out"), ()])
def test_wrong_arguments(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = gpu_check(tmp_path, *arguments)
    assert done.returncode == 2
    assert "usage" in done.stderr
