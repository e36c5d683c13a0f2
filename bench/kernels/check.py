"""Runs the parity grids: ``python -m caramba_fast.bench.kernels.check [--device cuda] [--require triton]``.

Prints one line for each disagreement with the reference and ends with status 1 if there is one, or if a required
backend does not run. ``--shard I/N`` takes every N-th setting, so that N processes compile at once.
"""

from __future__ import annotations

import argparse
import sys

import torch

from caramba_fast.bench.kernels import parity, parity_attention
from caramba_fast.bench.kernels.registry import tiny
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.workloads import workload
from caramba_fast.ops import use_backend
from caramba_fast.ops.registry import BackendError

BACKENDS = ("reference", "cpp", "triton")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="caramba_fast.bench.kernels.check", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--require", nargs="*", default=[], help="backends that have to run")
    parser.add_argument("--quick", action="store_true", help="a few settings")
    parser.add_argument("--small", action="store_true",
                        help="each op once with the first backend, for a memory checker")  # fmt: skip
    parser.add_argument("--shard", type=Shard.parse, default=Shard(), metavar="I/N")
    return parser.parse_args(argv)


def small(backend: str, device: torch.device) -> list[str]:
    """Every op that has a kernel, once, on small shapes; what is wrong."""
    found = []
    with use_backend(backend):
        for case in tiny():
            try:
                errors = workload(case, device).errors
                results = {kind: check() for kind, check in errors.items()}
            except (
                BackendError
            ) as reason:  # no kernel for this op; what a kernel refuses is an error
                print(f"{backend:<10} {case.name}: not run: {reason}")
                continue
            found += [
                f"{case.name} {kind}: {e:.2g} > {most:.2g}"
                for kind, (e, most) in results.items()
                if not e <= most  # NaN is wrong
            ]
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line; returns 1 if a backend differs from the reference."""
    chosen = _arguments(argv)
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    status = 0
    for backend in chosen.backends:
        reason = parity.backend_error(backend, device)
        if reason is not None:
            print(f"{backend:<10} not run: {reason}")
            status |= backend in chosen.require
            continue
        if chosen.small:
            count, found = len(tiny()), small(backend, device)
        else:
            bits = chosen.shard.of(parity.settings(chosen.quick))
            attention = list(chosen.shard.of(parity_attention.settings(chosen.quick)))
            count = len(bits) + len(attention)
            found = list(parity.failures(backend, device, bits))
            found += parity_attention.attention_failures(backend, device, attention)
        print(f"{backend:<10} {count} settings, {len(found)} disagreements", *found, sep="\n  ")
        sys.stdout.flush()
        status |= bool(found)
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
