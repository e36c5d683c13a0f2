"""What the command line does where its input or output is closed, or no text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

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


def test_no_share_of_drafts_is_told_where_there_were_none() -> None:
    report = {"speculation": {"acceptance_rate": float("nan"), "tokens_per_pass": 1.0}}
    assert of_drafts(report) == ", no drafts, 1.00 tokens a pass"
