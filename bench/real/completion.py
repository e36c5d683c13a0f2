"""Runs functions that a model completed against their tests.

What a model wrote is run in a process of its own: isolated from this package, with limits on time, memory and
processor, in an empty folder. That keeps mistakes in; it is no defence against a program that means harm, which a
small model asked for ``is_even`` does not write.
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
#: Starts of unindented code after the function, which end it.
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
#: Seconds and bytes one function may take.
SECONDS, BYTES = 10.0, 2**30
LIMITS = """import resource
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
resource.setrlimit(resource.RLIMIT_AS, ({bytes}, {bytes}))
"""


def prompts(
    tokenizer: TextTokenizer, problems: Sequence[Problem] = PROBLEMS
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each function's beginning, after the few-shot examples."""
    return tuple(tuple(tokenizer.encode(MODULE + p.prompt, special=False)) for p in problems)


def body(answer: str) -> str:
    """The part of an answer that belongs to the function: everything before the first of `STOP`."""
    return answer[: min((at for s in STOP if (at := answer.find(s)) >= 0), default=len(answer))]


def passes(problem: Problem, answer: str, seconds: float = SECONDS) -> bool:
    """Whether a function with this body does all that it should, within the limits.

    A word that the program cannot know is printed behind the last check, so that a program that ends early has not
    passed.

    Args:
        problem: the function.
        answer: what the model wrote behind the docstring.
        seconds: how long it may take.
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
    """Ends a process that was started as a group of its own, and whatever it started."""
    if process.poll() is None:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
