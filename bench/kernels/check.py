"""Runs the parity grids: ``python -m caramba_fast.bench.kernels.check [--device cuda] [--require triton]``.

Prints a line for each disagreement with the reference as soon as it is found. Exit status: 1 if there is one or a
required backend does not run; `shards.LATE` if there is none but time ran out. ``--shard I/N`` takes every N-th
setting, so that N processes compile at once; with the I/N of a printed line it reruns that setting alone.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from caramba_fast.bench.kernels import parity, parity_attention
from caramba_fast.bench.kernels.registry import tiny
from caramba_fast.bench.kernels.shards import LATE, Shard
from caramba_fast.bench.kernels.workloads import workload
from caramba_fast.ops import use_backend
from caramba_fast.ops.registry import BackendError

BACKENDS = ("reference", "cpp", "triton")
#: A setting is reported as hanging if it has not ended this many seconds after the time limit.
GRACE_S = 10.0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.kernels.check", description=__doc__
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--require", nargs="*", default=[], help="backends that have to run")
    parser.add_argument("--quick", action="store_true", help="a few settings")
    parser.add_argument("--small", action="store_true",
                        help="each op once with the first backend, for a memory checker")  # fmt: skip
    parser.add_argument("--shard", type=Shard.parse, default=Shard(), metavar="I/N")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no setting after this")  # fmt: skip
    return parser.parse_args(argv)


@dataclass
class Progress:
    """Counts settings and disagreements, and prints each at once, so that a killed process has lost nothing.

    ``done`` counts settings that were begun, of ``count``; ``at`` is the current one.
    """

    backend: str
    count: int
    done: int = 0
    at: str = ""
    found: int = 0
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Prints a line at once."""
        seconds = time.monotonic() - self.began
        print(f"{self.backend} {self.done} of {self.count}, {seconds:.0f} s: {text}", flush=True)

    def disagreement(self, text: str) -> None:
        """Counts and prints a disagreement."""
        self.found += 1
        self.say(f"disagreement {self.found}: {text}")

    def left_out(self, reason: str) -> None:
        """Reports that the current setting and the later ones are not run."""
        left = self.count - self.done + 1
        self.say(f"{self.found} disagreements, {left} settings left out: {reason}")

    def end(self) -> None:
        """Prints the totals."""
        print(f"{self.backend:<10} {self.count} settings, {self.found} disagreements", flush=True)

    @contextmanager
    def watched(self, limit_s: float) -> Iterator[None]:
        """A thread reports the current setting as hanging after ``limit_s``: an endless kernel never returns."""
        watch = threading.Timer(
            min(limit_s, threading.TIMEOUT_MAX), lambda: self.say(f"hangs in {self.at}")
        )
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()


Piece = tuple[Any, Callable[[str, torch.device, list[Any]], Iterator[str]]]


def grid(quick: bool) -> list[Piece]:
    """Every setting, with the function that finds its disagreements."""
    return [
        *((x, parity.failures) for x in parity.settings(quick)),
        *((x, parity_attention.attention_failures) for x in parity_attention.settings(quick)),
    ]


def is_lost(device: torch.device) -> bool:
    """Whether the device no longer answers, as after an illegal address."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def disagreements(
    backend: str, device: torch.device, quick: bool, shard: Shard, limit_s: float
) -> tuple[int, bool]:
    """(Number of disagreements, each printed; whether all settings of the shard were run)."""
    whole = grid(quick)
    mine = list(shard.of(list(enumerate(whole))))
    progress, stop_at = Progress(backend, len(mine)), time.monotonic() + limit_s
    with progress.watched(limit_s + GRACE_S):
        for number, (setting, find) in mine:
            progress.done, progress.at, before = progress.done + 1, str(setting), progress.found
            if time.monotonic() > stop_at:
                progress.left_out("time is over")
                return progress.found, False
            torch.manual_seed(number)
            for line in find(backend, device, [setting]):
                progress.disagreement(f"{line} (--shard {number}/{len(whole)})")
            if progress.found > before and is_lost(device):
                progress.left_out("the device answers nothing any more")
                return progress.found, False
    progress.end()
    return progress.found, True


def small(backend: str, device: torch.device, shard: Shard) -> tuple[int, bool]:
    """As `disagreements`, with each op that has a kernel run once on small shapes."""
    mine = shard.of(tiny())
    progress = Progress(backend, len(mine))
    with use_backend(backend):
        for case in mine:
            progress.done += 1
            try:
                errors = workload(case, device, timed=False).errors
                results = {kind: check() for kind, check in errors.items()}
            except BackendError as reason:  # no kernel for this op
                print(f"{backend:<10} {case.name}: not run: {reason}")
                continue
            except Exception as error:  # any failure is this case's result
                results, wrong = {}, [parity.described(error)]
            else:
                wrong = [
                    f"{kind}: {e:.2g} > {most:.2g}"
                    for kind, (e, most) in results.items()
                    if not e <= most  # NaN is wrong
                ]
            for line in wrong:
                progress.disagreement(f"{case.name} {line}")
    progress.end()
    return progress.found, True


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a backend differs from the reference or a required one cannot run, LATE if time ran out."""
    chosen = _arguments(argv)
    device = torch.device(chosen.device)
    began, bad, late = time.monotonic(), False, False
    for backend in chosen.backends:
        reason = parity.backend_error(backend, device)
        if reason is not None:
            print(f"{backend:<10} not run: {reason}")
            bad |= backend in chosen.require
            continue
        torch.manual_seed(0)
        if chosen.small:
            found, whole = small(backend, device, chosen.shard)
        else:
            left = chosen.time_limit - (time.monotonic() - began)
            found, whole = disagreements(backend, device, chosen.quick, chosen.shard, left)
        bad, late = bad or found > 0, late or not whole
    return 1 if bad else LATE if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
