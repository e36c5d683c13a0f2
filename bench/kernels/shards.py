"""Runs a module on all cores: several processes, each taking every N-th piece."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
#: Processes at most: each has its own CUDA context.
MOST = 16
#: Exit status when nothing failed but time ran out, also of a process that stops by itself.
LATE = 3


@dataclass(frozen=True)
class Shard:
    """Shard ``index`` of ``count``."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parses "I/N", I from 0."""
        index, count = map(int, text.split("/"))
        if not 0 <= index < count:
            raise ValueError(f"shard {text!r}; I/N with 0 <= I < N is needed")
        return cls(index, count)

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """The shard's part of the work."""
        return items[self.index :: self.count]


def processes() -> int:
    """One per core, at most `MOST`."""
    return min(
        MOST,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def run(module: str, arguments: Sequence[str], flag: str, limit_s: float) -> tuple[int, int]:
    """``python -m module arguments flag I/N`` for all I at once, one thread each; (number failed, number late)."""
    count = processes()
    started = time.monotonic()
    command = [sys.executable, "-m", module, *arguments, flag]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    running = [
        subprocess.Popen([*command, f"{index}/{count}"], env=environment) for index in range(count)
    ]
    bad = late = 0
    for process in running:
        try:
            status = process.wait(max(0.0, started + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = LATE
        bad += status not in (0, LATE)
        late += status == LATE
    return bad, late


def main() -> int:
    """``python -m caramba_fast.bench.kernels.shards LIMIT_S FLAG MODULE [ARGUMENTS]``.

    MODULE is one of this package, or with a dot (serving.graphs) of a sibling. Returns 1 if a process failed, LATE if
    some only ran out of time.
    """
    limit, flag, module, *arguments = sys.argv[1:]
    package = (__package__ or "").rpartition(".")[0] if "." in module else __package__
    bad, late = run(f"{package}.{module}", arguments, flag, float(limit))
    print(f"{module}: {processes()} processes, {bad} failed, {late} not done in {limit} s")
    return 1 if bad else LATE if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
