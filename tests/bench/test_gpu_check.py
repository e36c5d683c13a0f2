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
        r"\bmodule (?!shards|left)(\w+) |--(?:compile-only|shard) ([a-z]\w*)(?![\w.])", text
    )
    names = {f"kernels.{''.join(found)}" for found in named}
    names |= set(re.findall(r"caramba_fast\.bench\.(\w+\.\w+)", text))
    names |= set(re.findall(r"--(?:compile-only|shard) (\w+\.\w+)", text))
    return [*sorted(names), "kernels.shards", "pages.report"]


#: What needs pydantic, and is left out without.
WITH_PYDANTIC = {"real.decode", "serving.graphs"}


def test_the_modules_that_are_run_are_found() -> None:
    found = [f"kernels.{name}" for name in ("check", "host_time", "run", "tune")]
    found += ["real.decode", "serving.graphs", "kernels.shards", "pages.report"]
    assert modules_run() == found


#: Imports each module in a fork of a process that has torch; prints the names of those that fail.
EACH_ALONE = """
import os, sys, traceback
sys.modules["pydantic"] = sys.modules["pydantic_core"] = None
import torch
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            __import__(f"caramba_fast.bench.{name}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print(name)
"""


def test_what_is_run_can_be_imported_without_pydantic() -> None:
    """A machine that is lent may have torch and Triton alone; what needs pydantic shows that it is missing here."""
    alone = [name for name in modules_run() if name not in WITH_PYDANTIC]
    command = [sys.executable, "-c", EACH_ALONE, *alone, "kernels.parity", *sorted(WITH_PYDANTIC)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(WITH_PYDANTIC), done.stderr


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


# -- as on a GPU: every command is noted, and ends as the test says -------------------------------

STAND_IN = """#!{python}
import os, sys
from pathlib import Path

given = " ".join(sys.argv[1:])
if "device_count" in given:
    print(1)
elif "setuptools.__version__" in given:
    print(os.environ.get("SETUPTOOLS", "80.9.0"))
elif given.startswith("-c import ") and ";" not in given:
    sys.exit(any(f"import {{name}}" in given or f", {{name}}" in given
                 for name in os.environ.get("MISSING", "").split()))
with Path(os.environ["NOTES"]).open("a") as notes:
    print(os.environ.get("CARAMBA_FAST_BUILD_CPP", "-"), given, file=notes)
for rule in os.environ.get("ENDS", "").split(";"):
    words, _, status = rule.rpartition("=")
    if words and words in given:
        print("Race reported between Write access and Read access" if status == "9" else "so it ends")
        sys.exit(int(status))
"""
SANITIZER = """#!/bin/bash
args=("$@")
for i in "${!args[@]}"; do [[ "${args[$i]}" != --error-exitcode ]] || exec "${args[@]:$((i + 2))}" "$@"; done
"""


class Gpu:
    """Runs the script where each command is a stand-in that notes itself."""

    def __init__(self, folder: Path) -> None:
        self.out, self.notes = folder / "out", folder / "notes"
        self.folder = folder / "bin"
        self.folder.mkdir()
        self._write("python", STAND_IN.format(python=sys.executable))
        self._write("compute-sanitizer", SANITIZER)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, *stages: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.notes.write_text("")
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}", "PYTHON": str(self.folder / "python"),
            "NOTES": str(self.notes), "CARAMBA_FAST_WORK": str(self.folder.parent / "work"), **variables,
        }  # fmt: skip
        command = ["bash", str(SCRIPT), "--force", str(self.out), *stages]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def noted(self, *words: str) -> list[str]:
        """Commands that were run, those with all of ``words``."""
        lines = self.notes.read_text().splitlines()
        return [line for line in lines if all(word in line for word in words)]


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def test_all_stages_as_on_a_gpu(gpu: Gpu) -> None:
    done = gpu.run()
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("build", "parity", "sanitize", "bench", "model", "tune"):
        assert f"{stage}: done" in done.stdout, done.stdout
    (pip,) = gpu.noted("pip install")
    assert pip.startswith("0 -m pip install --no-build-isolation --no-deps -e .")
    (check,) = gpu.noted("--shard check")
    assert (
        "shards 348 --shard check --device cuda --backends triton --require triton --time-limit 288"
        in check
    )
    assert len(gpu.noted("shards", "--shard serving.graphs --device cuda")) == 1
    assert len(gpu.noted("shards", "--shard host_time")) == 1
    assert len(gpu.noted("host_time --out", "host_time.json")) == 1
    (tests,) = gpu.noted("-m pytest")
    assert "-n 8 --device cuda -k quantize or merge" in tests
    tools = [line.split("--tool ")[1].split()[0] for line in gpu.noted("--small", "--tool")]
    assert tools == ["memcheck", "initcheck", "synccheck", "racecheck"]
    assert all("--backends triton --device cuda" in line for line in gpu.noted("--small"))
    assert len(gpu.noted("kernels.run", "--grid core")) == 1 and not gpu.noted("--grid full")
    assert len(gpu.noted("real.decode --out", "--device cuda", "--contexts 4096 32768 131072")) == 2
    assert (
        len(gpu.noted("shards", "--compile-only real.decode", "--contexts 4096 32768 131072")) == 2
    )


def test_what_the_environment_says(gpu: Gpu) -> None:
    done = gpu.run(
        "build", "bench", "model", GRIDS="quick full", MODELS="tiny", CONTEXTS="64 128", LIMIT_S="300",
        CARAMBA_FAST_BUILD_CPP="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert gpu.noted("pip install")[0].startswith("1 ")
    assert [x.split("--grid ")[1].split()[0] for x in gpu.noted("kernels.run")] == ["quick", "full"]
    assert all("--time-limit 25" in x for x in gpu.noted("kernels.run"))
    (model,) = gpu.noted("real.decode --out")
    assert "tiny --device cuda --quick --contexts 64 128" in model
    wrong = gpu.run("bench", LIMIT_S="8 minutes")
    assert wrong.returncode == 2 and "LIMIT_S is '8 minutes'" in wrong.stderr


def test_a_part_that_fails_does_not_stop_the_others(gpu: Gpu) -> None:
    done = gpu.run("parity", "bench", ENDS="--shard check=1;host_time --out=1;--compile-only=1")
    assert done.returncode == 1
    assert "parity: grid: FAILED with status 1" in done.stdout
    assert "parity: host time: FAILED with status 1" in done.stdout
    assert "parity: failed with status 1" in done.stdout
    assert len(gpu.noted("serving.graphs")) == 1 and len(gpu.noted("-m pytest")) == 1
    assert "not all kernels were compiled ahead" in done.stdout and "bench: done" in done.stdout
    again = gpu.run("build", "parity", ENDS="pip install=1")
    assert again.returncode == 1 and not gpu.noted("--shard check")


def test_too_little_time_is_no_failure(gpu: Gpu) -> None:
    done = gpu.run("parity", ENDS="--shard check=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parity: grid: left out: there was no time for all of it" in done.stdout
    assert "parity: not finished in its time; call again to go on" in done.stdout
    assert not (gpu.folder.parent / "work" / "parity.done").exists()
    done = gpu.run("model", ENDS="real.decode=124", MODELS="tiny")
    assert done.returncode == 0 and "model: tiny: left out: there was no time" in done.stdout
    done = gpu.run("parity", ENDS="pytest=3")  # its number for an error of its own
    assert done.returncode == 1 and "parity: tests: FAILED with status 1" in done.stdout


def test_without_pydantic_what_needs_it_is_said(gpu: Gpu) -> None:
    done = gpu.run("build", "parity", "model", MISSING="pydantic")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "build: there is no pydantic" in done.stdout
    assert "graphs and the tests under tests/ were not run" in done.stdout
    assert "model: transformers or pydantic is not installed" in done.stdout
    assert gpu.noted("--shard check")
    assert not gpu.noted("host_time") and not gpu.noted("-m pytest") and not gpu.noted("decode")
    done = gpu.run("parity", MISSING="xdist")
    assert "-n 8" not in gpu.noted("-m pytest")[0]


def test_setuptools_that_are_too_old_are_named(gpu: Gpu) -> None:
    done = gpu.run("build", SETUPTOOLS="75.8.0")
    assert done.returncode == 1 and not gpu.noted("pip install")
    assert "setuptools is 75.8.0 and pyproject.toml needs 77 or later" in done.stdout


def test_every_tool_of_the_sanitizer_runs_and_races_are_kept_apart(gpu: Gpu) -> None:
    done = gpu.run("sanitize", ENDS="--tool memcheck=9;--tool racecheck=9")
    assert done.returncode == 1
    assert "sanitize: memcheck: FAILED with status 9" in done.stdout
    assert "racecheck found 1 races" in done.stdout and "triton-lang/triton#7264" in done.stdout
    assert "Race reported" in (gpu.out / "racecheck.log").read_text()
    assert len(gpu.noted("--tool")) == 4
    done = gpu.run("sanitize", ENDS="--tool racecheck=9")
    assert done.returncode == 0 and "sanitize: done" in done.stdout
    done = gpu.run("sanitize", ENDS="--tool racecheck=1;torch.zeros=1")
    assert "does not work on this machine" in done.stdout and not gpu.noted("--tool racecheck")
