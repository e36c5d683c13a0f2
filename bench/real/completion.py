"""Runs functions that a model completed against their tests.

The model's code runs in its own process: isolated from this package, with limits on time, memory and processor, in an
empty folder. That contains mistakes; it is no defence against malicious code, which a small model asked for
``is_even`` does not write.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from caramba_fast.bench.real.functions import MODULE, PROBLEMS, Problem
from caramba_fast.infer.tokenizer import TextTokenizer

NEW_TOKENS = 160
#: Starts of unindented code, which end a function.
STOP = (
    "\ndef ",
    "\nclass ",
    "\nif ",
    "\nprint",
    "\nassert",
    "\n#",
    "\n@",
    "\n```",
    "\nimport ",
    "\nfrom ",
)
#: Limits of seconds and bytes for one function.
SECONDS, BYTES = 10.0, 2**30
LIMITS = """import resource
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
resource.setrlimit(resource.RLIMIT_AS, ({bytes}, {bytes}))
"""


def prompts(
    tokenizer: TextTokenizer, problems: Sequence[Problem] = PROBLEMS
) -> tuple[tuple[int, ...], ...]:
    """Token ids of the few-shot examples followed by each function's beginning."""
    return tuple(tuple(tokenizer.encode(MODULE + p.prompt, special=False)) for p in problems)


def body(answer: str) -> str:
    """The part of an answer that belongs to the function: everything before the first of `STOP`."""
    return answer[: min((at for s in STOP if (at := answer.find(s)) >= 0), default=len(answer))]


def passes(problem: Problem, answer: str, seconds: float = SECONDS) -> bool:
    """Whether a function with this body passes its checks within the limits.

    A secret word is printed after the last check, so that a program that exits early does not pass. ``answer`` is what
    the model wrote after the docstring.
    """
    word = secrets.token_hex(8)
    program = "\n".join(
        [
            LIMITS.format(seconds=round(seconds) + 1, bytes=BYTES) if os.name == "posix" else "",
            f"{problem.prompt}{body(answer)}",
            *(f"assert {check}" for check in problem.checks),
            f"print({word!r})",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "attempt.py"
        file.write_text(program, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(file)], cwd=folder, env={}, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return process.returncode == 0 and output.strip().endswith(word)


def _end(process: subprocess.Popen[str]) -> None:
    """Kills a process that is a group leader, with its whole group."""
    if process.poll() is None:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
