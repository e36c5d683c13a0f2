"""Files the package writes: whole or not at all, and never in place of something else."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.plans import any_plan
from typer.testing import CliRunner

from caramba_fast import writing
from caramba_fast.cli.app import app
from caramba_fast.manifest import ManifestError, prepare
from caramba_fast.manifest.load import read_manifest
from caramba_fast.manifest.schema import write_json
from caramba_fast.models import demo_path
from caramba_fast.policy.plan_file import PlanFile, PlanFileError
from caramba_fast.quality import CacheQuality, QualityReport
from caramba_fast.quality.report import is_report, is_table
from caramba_fast.quality.store import ScoreStore
from caramba_fast.writing import check_replaceable, replacing

PRECIOUS = b"nobody may replace this " * 40


def quality_report() -> QualityReport:
    return QualityReport([], [], {"name": "x"})


#: Everything that writes a file through the package, by what it writes.
WRITERS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: _written(path, b"new"),
    "plan": lambda path: PlanFile(path).put(any_plan("a")),
    "run report": lambda path: write_json(path, {"target": 1}),
    "quality report": lambda path: quality_report().to_json(path),
    "quality table": lambda path: quality_report().to_csv(path),
}


def _written(path: Path, content: bytes) -> None:
    with replacing(path) as stream:
        stream.write(content)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file every writer may replace: empty ones belong to nobody."""
    path = tmp_path / "kept"
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize("writer", WRITERS)
def test_permissions_and_links_stay(writer: str, old: Path, tmp_path: Path) -> None:
    old.chmod(0o600)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "name"
    link.symlink_to("../kept")
    if writer == "plan":
        old.write_text('{"schema_version": 1, "plans": {}}')
    WRITERS[writer](link)
    assert link.is_symlink() and old.stat().st_size > 1 and not old.is_symlink()
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


@pytest.mark.parametrize("writer", WRITERS)
def test_a_new_file_follows_the_umask(writer: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        WRITERS[writer](tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_and_loses_nothing(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on a file's size stands for the disk: a real OSError from a real write."""
    path = tmp_path / "kept"
    content = b'{"schema_version": 1, "plans": {}}' if writer == "plan" else PRECIOUS
    path.write_bytes(content)
    limits, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(
            (OSError, PlanFileError), match=r"cannot write.*kept|kept: cannot write"
        ):
            WRITERS[writer](path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    assert path.read_bytes() == content
    assert {p.name for p in tmp_path.iterdir()} <= {"kept", "kept.lock"}


def test_the_error_says_what_the_system_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*new: No space left.*untouched") as caught:
        _written(tmp_path / "new", b"1")
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("pipe", "no regular file"), (".", "a folder"), ("none/x", "No such file")):
        with pytest.raises(OSError, match=why):
            _written(tmp_path / name, b"1")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_an_interrupt_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(PRECIOUS)
    with pytest.raises(KeyboardInterrupt), replacing(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == PRECIOUS and len(list(tmp_path.iterdir())) == 1


HOLDER = """
import sys, time
from caramba_fast.writing import replacing
with replacing(sys.argv[1]) as stream:
    print("holds", flush=True)
    time.sleep(60)
"""


def test_only_what_dead_writers_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    running = [
        subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for process in running:
            assert process.stdout is not None and process.stdout.readline() == b"holds\n"
        partials = sorted(tmp_path.glob(".kept.*.part"))
        assert len(partials) == 2
        running[0].kill()
        running[0].wait()
        (tmp_path / ".kept.notes.of mine.part").write_bytes(b"x")
        (tmp_path / ".other.1-ab.part").write_bytes(b"x")
        _written(path, b"too early")
        assert len(list(tmp_path.glob(".kept.*-*.part"))) == 2, "they are not old yet"
        old = time.time() - 2 * writing.STALE
        for file in tmp_path.glob(".*"):
            os.utime(file, (old, old))
        _written(path, b"new")
        left = {p.name for p in tmp_path.iterdir()}
        alive = {p.name for p in partials if f".{running[1].pid}-" in p.name}
        assert left == {"kept", ".kept.notes.of mine.part", ".other.1-ab.part"} | alive
        assert len(alive) == 1
    finally:
        for process in running:
            process.kill()
            process.wait()


# -- what is in the way ------------------------------------------------------------------


def foreign(path: Path) -> bytes:
    """A model's weights, whatever the name."""
    save_file({"model.weight": torch.arange(64.0)}, str(path), metadata={"format": "pt"})
    return path.read_bytes()


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in arguments])


MANIFEST = "targets: [{name: t, runs: [{id: a, output: out.json, prompts: [x]}]}]"
#: Every command that writes a file, with the name it gets (or gives it).
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plan --plot": ("a.png", ("plan", "--plot", "{out}")),
    "plan --plan-path": ("plans.json", ("plan", "--plan-path", "{out}")),
    "run": ("out.json", ("run", "{folder}/manifest.yml")),
    "quality, table": ("quality.csv", ("quality", "--out", "{folder}")),
    "quality, report": ("quality.json", ("quality", "--out", "{folder}")),
    "quality, picture": ("quality.png", ("quality", "--out", "{folder}")),
    "bench ops": ("ops.csv", ("bench", "ops", "--quick", "--out", "{out}")),
    "bench ops, details": ("ops.json", ("bench", "ops", "--quick", "--out", "{folder}/ops.csv")),
    "bench model": ("m.csv", ("bench", "model", "--quick", "--out", "{out}")),
    "bench generation": ("generation.csv", ("bench", "generation", "--out", "{folder}")),
    "bench generation, details": ("overhead.json", ("bench", "generation", "--out", "{folder}")),
    "bench speculation": ("s.csv", ("bench", "speculation", "--out={out}")),
    "bench serve": ("e.csv", ("bench", "serve", "--out", "{out}")),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_replaces_a_file_of_another_kind(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, words = COMMANDS[command]
    content = foreign(tmp_path / name)
    (tmp_path / "manifest.yml").write_text(MANIFEST)
    result = invoke(*(w.format(out=tmp_path / name, folder=tmp_path) for w in words))
    assert result.exit_code == 1, result.output
    said = " ".join(result.stderr.split())
    assert name in said and ("not replaced" in said or "stays as it is" in said), said
    assert (tmp_path / name).read_bytes() == content
    assert not list(tmp_path.glob("*damaged*"))


def test_a_plan_file_is_never_made_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes((demo_path() / "config.json").read_bytes())
    before = path.read_bytes()
    with pytest.raises(PlanFileError, match="another file"):
        PlanFile(path).put(any_plan("a"))
    assert path.read_bytes() == before and not list(tmp_path.glob("*damaged*"))


def test_what_we_wrote_is_replaced(tmp_path: Path) -> None:
    row = dict.fromkeys(CacheQuality.__dataclass_fields__, 0)
    report = QualityReport([CacheQuality(**{**row, "kind": "q8", "ci": {}})], [], {})
    report.to_json(tmp_path / "q.json")
    report.to_csv(tmp_path / "q.csv")
    assert is_report(tmp_path / "q.json") and is_table(tmp_path / "q.csv")
    assert not is_report(tmp_path / "q.csv") and not is_table(tmp_path / "q.json")
    check_replaceable(tmp_path / "q.csv", "table", is_table)


def test_a_store_of_scores_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "of something else"}')
    with pytest.raises(ValueError, match="another measurement"):
        ScoreStore(tmp_path, {"model": "x"})


OUTSIDE = (
    "../out.json",
    "{folder}/../out.json",
    "/tmp/out.json",
    "link/out.json",
    "a/../../out.json",
)


@pytest.mark.parametrize("key", ["output", "cache_plan_path"])
@pytest.mark.parametrize("path", OUTSIDE)
def test_a_manifest_writes_into_its_folder_alone(key: str, path: str, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    given = path.format(folder=folder)
    run: dict[str, Any] = {"id": "a", "prompts": ["x"]}
    if key == "output":
        run["output"] = given
    else:
        run["generate"] = {"cache_kind": "auto", "cache_budget_mb": 9, "cache_plan_path": given}
    text = json.dumps({"targets": [{"name": "t", "runs": [run]}]})
    with pytest.raises(ManifestError, match=rf"{key}=.*outside the manifest's folder"):
        prepare(read_manifest(text), folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_an_interrupt_at_any_instruction_leaves_no_temporary_file(tmp_path: Path) -> None:
    """Not even one between the creation of the file and its first use."""

    def interrupted(at: int) -> bool:
        left = at

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            left -= event == "opcode"
            if event == "opcode" and left == 0:
                raise KeyboardInterrupt
            return local

        def enter(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_code.co_name != "replacing":
                return None
            frame.f_trace_opcodes = True
            return local

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            with replacing(tmp_path / "x") as stream:
                stream.write(b"new")
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    at = 1
    while interrupted(at):
        left = {file.name for file in tmp_path.iterdir()}
        assert left <= {"x"}, at
        assert "x" not in left or (tmp_path / "x").read_bytes() == b"new"
        at += 1
    assert at > 50
