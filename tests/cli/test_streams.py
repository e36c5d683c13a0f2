"""What the command line does where its input or output is closed, or no text."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from caramba_fast import cli
from caramba_fast.cli.models import of_drafts


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("generate - <&-", 1, "caramba-fast: the prompt is empty"),
        ("chat <&-", 0, "demo, cache q8"),
        ("generate x --max-new-tokens 2 --no-stats >&-", 0, ""),
        ("generate x --max-new-tokens 2 --session x.session 2>&-", 0, ""),
    ],
)
def test_closed_streams_are_empty_ones(
    command: str, status: int, said: str, tmp_path: Path
) -> None:
    run = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m caramba_fast {command}"],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert run.returncode == status, run.stderr
    assert said in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("typer", "KeyboardInterrupt"),
        ("caramba_fast.cli.models", "KeyboardInterrupt"),
        ("caramba_fast.cli.models", "RecursionError"),
        ("numpy", "KeyboardInterrupt"),  # torch would clear what happens while it loads numpy
    ],
)
def test_ctrl_c_while_libraries_load_ends_without_a_word(place: str, error: str) -> None:
    """Some make another error of it."""
    work = f"""
        import sys
        from importlib.abc import MetaPathFinder
        import caramba_fast.cli as cli

        class Interrupt(MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == {place!r}:
                    try:
                        raise KeyboardInterrupt
                    except KeyboardInterrupt:
                        raise {error}

        cli.NEEDED = {{}}
        sys.meta_path.insert(0, Interrupt())
        sys.argv = ["caramba-fast", "generate", "x"]
        cli.main()
    """
    run = subprocess.run(
        [sys.executable, "-c", dedent(work)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 130, run.stderr
    assert run.stdout == "" and run.stderr.strip() in ("", "Aborted.")


@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
@pytest.mark.parametrize(("command", "status"), [("chat", 0), ("generate -", 1)])
def test_bytes_that_are_no_text_are_named_and_end_no_chat(
    command: str, status: int, locale: str
) -> None:
    """Python refuses them in some locales, and makes halves of surrogate pairs of them in others."""
    run = subprocess.run(
        [sys.executable, "-m", "caramba_fast", *command.split(), "--max-new-tokens", "2"],
        input=b"hi\nb\xff\n/stats\n", capture_output=True, check=False, timeout=300,
        env={**os.environ, "LC_ALL": locale, "PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    place = 1 if command == "chat" else 4
    said = f"is no Unicode that can be encoded: character {place} is '\\udcff'".encode()
    assert run.returncode == status and said in run.stderr, run.stderr
    assert command != "chat" or b"tokens held" in run.stderr


class Disk(io.BytesIO):
    """A file on a disk that is full after so many bytes."""

    room = 2**20

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def standard_output(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """That of a call in this process, whose other settings stay."""
    found = Disk()
    out = io.TextIOWrapper(found, encoding="ascii", write_through=True)
    for where, name, value in (
        (sys, "stdout", out), (cli, "QUIET", {}), (cli, "TALKATIVE", ()), (sys, "argv", ["caramba-fast"])
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)
    return found


@pytest.mark.parametrize("option", ["--version", "--help"])
@pytest.mark.parametrize("room", [0, 2**20])
def test_help_and_version_fit_or_one_line_says_that_they_do_not(
    option: str, room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = standard_output(monkeypatch)
    disk.room = room
    sys.argv.append(option)
    with pytest.raises(SystemExit) as end:
        cli.main()
    if room:
        assert end.value.code == 0 and b"caramba-fast" in disk.getvalue()
        sys.stdout.write("\u0394")  # what the encoding lacks is written as its number
        assert disk.getvalue().endswith(rb"\u0394")
    else:
        assert end.value.code == 1
        assert capsys.readouterr().err == "caramba-fast: No space left on device\n"


def test_ctrl_c_before_a_command_begins_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    standard_output(monkeypatch)
    monkeypatch.setattr("caramba_fast.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == cli.INTERRUPTED


@pytest.mark.parametrize("check", [True, False])
def test_a_full_disk_is_no_fault_of_the_manifest(
    check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.yml"
    path.write_text(
        "version: 1\nname: x\ntargets:\n- {type: experiment, name: t, model: demo, runs: "
        "[{id: r, mode: generate, prompts: [x], generate: {max_new_tokens: 1}}]}\n"
    )
    disk = standard_output(monkeypatch)
    disk.room = 0
    sys.argv += ["run", str(path), *(["--check"] if check else [])]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "caramba-fast: No space left on device\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("generate", "x", "--session", "/dev/zero"), "/dev/zero is no regular file"),
        (("plan", "--plan-path", "/dev/zero"), "/dev/zero is no regular file"),
        (("plan", "--plan-path", "/proc/x.json"), "cache_plan_path=/proc/x.json: cannot write it"),
        (
            ("bench", "model", "--cache", "nonsense"),
            "unknown cache kind 'nonsense'; known kinds are",
        ),
        (("bench", "model", "--context", "64"), "contexts is [64]; 128 or more is allowed"),
        (("bench", "model", "--batch", "0"), "batches is [0]; 1 or more is allowed"),
        (("generate", "x", "--max-new-tokens", "-1"), "max_new_tokens"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    command: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Devices have no end, and nothing below /proc can be locked."""
    standard_output(monkeypatch)
    sys.argv += command
    with pytest.raises(SystemExit) as end:
        cli.main()
    err = capsys.readouterr().err
    assert end.value.code == 1 and said in err and err.count("\n") == 1, err


def test_no_share_of_drafts_is_told_where_there_were_none() -> None:
    report = {"speculation": {"acceptance_rate": float("nan"), "tokens_per_pass": 1.0}}
    assert of_drafts(report) == ", no drafts, 1.00 tokens a pass"
