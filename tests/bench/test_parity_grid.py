"""The grid that compares backends where pytest may be missing: every setting is a valid call, and none stops others."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba_fast.bench.kernels import check, parity, parity_attention, shards, workloads
from caramba_fast.bench.kernels.parity_attention import Setting
from caramba_fast.bench.kernels.registry import LAYOUTS, tiny
from caramba_fast.formats import CHANNEL_KINDS, FORMATS
from caramba_fast.ops import append, attention_call, registry

CPU = torch.device("cpu")


def test_every_setting_is_a_call_that_the_ops_accept() -> None:
    """Checked as the ops check it, and not run."""
    for setting in parity_attention.settings(False):
        views = parity_attention._poisoned(setting)
        place, new, queries = parity_attention._given(setting)
        lengths = place.pop("lengths")
        op = append.decoupled_append_op if setting.decoupled else append.append_op
        append.plan_append(op, views, new, lengths, place)
        options = {} if setting.decoupled else parity_attention.OPTIONS[setting.option]
        options = {**place, **options, "residual_len": setting.tail}
        attention_call.plan_attention(
            registry._ops[setting.op], views, queries, lengths, parity_attention.KV_HEADS, options
        )


def test_the_grid_has_every_format_and_keys_by_channel_in_every_way() -> None:
    listed = parity_attention.settings(False)
    assert {name for x in listed for name in x.formats.values()} == {*FORMATS}
    by_channel = {
        (x.option, x.paged, x.tail, x.rotated)
        for x in listed
        if x.formats.get("k") in CHANNEL_KINDS
    }
    assert len(by_channel) == len(parity_attention.OPTIONS) * 2 * 2 * 2
    assert {x.tokens for x in listed if x.kind in LAYOUTS} == {1, 3, 5, 20, 33, 100}
    assert any(x.decoupled and x.kind in LAYOUTS for x in listed)


CHANNEL = [
    Setting("q4"), Setting("q8", tokens=33), Setting("q4", tokens=1, decoupled=True),
    Setting("q4", "window", paged=True, tail=8), Setting("q8", "balanced", paged=True, tail=8, rotated=True),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter
@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("setting", CHANNEL, ids=str)
def test_keys_by_channel_agree(backend: str, setting: Setting) -> None:
    if setting.why_not(setting.op, backend, CPU) is not None:
        pytest.skip(str(setting.why_not(setting.op, backend, CPU)))
    assert list(parity_attention.attention_failures(backend, CPU, [setting])) == []


def test_wrong_bytes_and_wrong_results_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    append_to, attend, turns = parity_attention._append, parity_attention._attend, [0, 0]

    def appended(views: Any, *rest: Any) -> None:
        append_to(views, *rest)
        turns[0] += 1
        views["v"].codes[1, 0, 140, 0] += (
            turns[0] - 1
        )  # the second time it is the backend under test

    def attended(*args: Any) -> Any:
        out, lse = attend(*args)
        turns[1] += 1
        return out * (1 + 0.1 * (turns[1] - 1)), lse + turns[1]

    monkeypatch.setattr(parity_attention, "_append", appended)
    monkeypatch.setattr(parity_attention, "_attend", attended)
    found = list(parity_attention.attention_failures("reference", CPU, [Setting("q8_0")]))
    assert "1 of 65536 elements of v differ" in found[0] and "relL2 0.1" in found[1]
    assert "lse differs by 1" in found[2] and len(found) == 3


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of three settings, the first of which raises what no backend is expected to raise."""
    listed = [Setting(kind) for kind in ("q8_0", "fp16", "q4")]
    right = parity_attention.failures

    def failures(backend: str, device: torch.device, setting: Setting) -> Any:
        if setting.kind == "q8_0":
            raise MemoryError("no room for\n" + "x" * 2000)
        return right(backend, device, setting)

    monkeypatch.setattr(parity_attention, "failures", failures)
    monkeypatch.setattr(parity_attention, "settings", lambda _: listed)
    monkeypatch.setattr(parity, "settings", lambda _: [])


@pytest.mark.usefixtures("three")
def test_a_setting_that_fails_is_told_and_the_others_are_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.main(["--backends", "reference"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("reference 1 of 3, 0 s: disagreement 1: reference Setting(kind='q8_0'")
    assert "MemoryError at test_parity_grid.py:" in first and "no room for xxx" in first
    assert first.endswith("(--shard 0/3)") and len(first) < 900
    assert last == "reference  3 settings, 1 disagreements"
    assert check.main(["--backends", "reference", "--shard", "2/3"]) == 0
    assert capsys.readouterr().out == "reference  1 settings, 0 disagreements\n"


@pytest.mark.usefixtures("three")
def test_without_time_a_shard_says_how_far_it_came(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check.main(["--backends", "reference", "--time-limit", "-1"]) == shards.LATE
    assert "1 of 3, 0 s: 0 disagreements, 3 settings left out: time is over" in (
        capsys.readouterr().out
    )
    monkeypatch.setattr(check, "is_lost", lambda _: True)
    assert check.main(["--backends", "reference"]) == 1
    assert "3 settings left out: the device answers nothing" in capsys.readouterr().out


def test_what_hangs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    progress = check.Progress("triton", 7, done=3, at="Setting(kind='nf4')")
    with progress.watched(0.01):
        time.sleep(0.5)
    assert capsys.readouterr().out == "triton 3 of 7, 0 s: hangs in Setting(kind='nf4')\n"
    with progress.watched(float("inf")):
        pass


def test_every_op_is_called_once_for_a_memory_checker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workloads, "copies", lambda *_: 3)
    for case in tiny():
        whole, once = (workloads.workload(case, CPU, timed=timed) for timed in (True, False))
        assert {len(entry.calls) for entry in once.ours} == {1} and not once.peers, case.name
        assert once.errors.keys() == whole.errors.keys()
    made: list[Any] = []
    monkeypatch.setattr(
        check, "workload", lambda *a, **o: made.append(o) or workloads.workload(*a, **o)
    )
    assert check.main(["--small", "--backends", "reference"]) == 0
    assert made == [{"timed": False}] * len(tiny())
    assert capsys.readouterr().out == f"reference  {len(tiny())} settings, 0 disagreements\n"


def test_an_op_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def workload(case: Any, *_: Any, **__: Any) -> Any:
        if case.op == "quantize":
            raise RuntimeError("an illegal memory access was encountered")
        return workloads.workload(case, CPU, timed=False)

    monkeypatch.setattr(check, "workload", workload)
    assert check.main(["--small", "--backends", "reference"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError at" in said and "an illegal memory access" in said
    assert "9 settings, 1 disagreements" in said


WORKER = """
import os, sys, time
from caramba_fast.bench.kernels.shards import LATE
print(os.environ["OMP_NUM_THREADS"])
time.sleep({sleep})
sys.exit({status})
"""


@pytest.mark.parametrize(
    ("status", "sleep", "expected"),
    [("0", 0, (0, 0)), ("LATE", 0, (0, 2)), ("1", 0, (2, 0)), ("0", 60, (0, 2))],
)
def test_a_shard_without_time_is_late_and_did_not_fail(
    status: str,
    sleep: int,
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "worker.py").write_text(WORKER.format(status=status, sleep=sleep))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(shards, "processes", lambda: 2)
    assert shards.run("worker", [], "--shard", 0.2 if sleep else 60) == expected


def test_each_shard_has_one_thread(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER.format(status="0", sleep=0))
    code = (
        "from caramba_fast.bench.kernels import shards; shards.processes = lambda: 1; "
        "shards.run('worker', [], '--shard', 60)"
    )
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
