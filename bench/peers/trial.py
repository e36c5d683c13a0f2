"""Tries a system on a small problem in a process that may crash: ``python -m …peers.trial TITLE SIZES``."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import astuple, replace

import torch

from caramba_fast.bench.kernels.timing import threads
from caramba_fast.bench.peers.problem import Problem, Shape
from caramba_fast.bench.peers.session import System

#: Most tokens of the small problem; time limit.
MOST_TOKENS, LIMIT_S = 256, 300.0


def outcome(system: System, shape: Shape) -> str:
    """Why the system fails a step of this shape, or ""."""
    return _tried(system.title, replace(shape, kv=min(shape.kv, MOST_TOKENS)))


@functools.lru_cache(maxsize=256)
def _tried(title: str, shape: Shape) -> str:
    command = [sys.executable, "-m", __name__, title, *map(str, astuple(shape))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end of a trial in a process of its own after {LIMIT_S:g} s"
    if done.returncode < 0:
        return f"ends its process by signal {-done.returncode} in a trial"
    said = done.stderr.strip().splitlines()
    return (
        "" if done.returncode == 0 else f"fails in a trial: {said[-1] if said else 'no word'}"[:160]
    )


def main(argv: list[str] | None = None) -> int:
    """Fills a cache, takes steps, and fills it again."""
    # Not at the top: the parent's systems need this module.
    from caramba_fast.bench.peers.systems import systems  # noqa: PLC0415

    title, *sizes = sys.argv[1:] if argv is None else argv
    shape = Shape(*map(int, sizes))
    system = next(system for system in systems() if system.title == title)
    with threads(shape.threads), torch.no_grad():
        session = system.build(Problem(shape))
        session.step()
        session.step()
        session.rest()
        session.rewind()
        session.step()
        session.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
