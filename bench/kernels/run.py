"""Measures a grid of `registry` on one device: each case is predicted, verified, then timed.

``python -m caramba_fast.bench.kernels.run [--device cpu|cuda] [--grid NAME] [--out CSV]`` prints a table and writes one
CSV row per case, format and implementation, with details of the machine beside it as JSON. The share is of the
bandwidth a probe measures in the same rounds. A result further from float64 than its format allows is not timed and
makes the exit status 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch

from caramba_fast.bench.environment import details, environment
from caramba_fast.bench.kernels.measure import measure, serving
from caramba_fast.bench.kernels.parity import described
from caramba_fast.bench.kernels.predict import H200, Machine
from caramba_fast.bench.kernels.registry import GRIDS, Case, cases
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.table import COMMAND, Row, Table
from caramba_fast.bench.kernels.timing import ROUNDS, interleaved, probe
from caramba_fast.bench.kernels.workloads import workload
from caramba_fast.bench.out import BESIDE, add_out, check_out
from caramba_fast.bench.pages.report import summary
from caramba_fast.ops.registry import BACKENDS, use_backend

#: Rounds of the quick grid, and of the tiny one, of which nothing is read but that it ran.
QUICK_ROUNDS, TINY_ROUNDS = 7, 1
#: Tokens of a case that is compiled ahead; several processes share the memory.
MOST_TO_COMPILE = 4096


def machine_of(device: torch.device) -> Machine:
    """The limits of this machine: known for an H200, else the bandwidth a probe measures now."""
    if device.type == "cuda" and "H200" in torch.cuda.get_device_name(device):
        return H200
    reader = probe("decode_attention", device)
    taken = interleaved([reader], device, rounds=5)[reader]
    bandwidth = reader.moved / statistics.median(taken.values())
    if device.type == "cpu":
        return Machine(bandwidth)
    about = torch.cuda.get_device_properties(device)
    clock = 1e3 * getattr(about, "clock_rate", 0)
    target = "sm_80" if about.major < 9 else "sm_90" if about.major == 9 else "sm_100"
    return Machine(bandwidth, 4 * about.multi_processor_count * (clock or 1.5e9), target)


def smallest(case: Case) -> Case:
    """A case with the same kernels that takes little memory: kernels do not depend on batch and length."""
    return replace(case, batch=1, kv=min(case.kv, MOST_TO_COMPILE), short=0, goal="")


def compile_kernels(listed: list[Case], device: torch.device, shard: Shard) -> None:
    """Calls every kernel of this shard's cases once, on uninitialised memory, to fill Triton's cache.

    Failures are printed, and appear again when the case is measured.
    """
    pairs = dict.fromkeys(
        replace(smallest(case), kinds=(kind,))
        for case in listed
        for kind in case.kinds
        if serving(case.op, device.type) == "triton"
    )
    for case in shard.of(list(pairs)):
        try:
            for entry in workload(case, device, fill=False).ours:
                entry.calls[0]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
        except Exception as error:  # the other cases are compiled
            print(f"compile {case.name} {case.kinds[0]}: {described(error)}", flush=True)


def measured(
    listed: list[Case], device: torch.device, table: Table, rounds: int, stop_at: float
) -> tuple[list[Row], int]:
    """(rows, number of cases left out because ``stop_at`` had passed)."""
    machine = machine_of(device)
    found: list[Row] = []
    for index, case in enumerate(listed):
        if time.monotonic() > stop_at:
            return found, len(listed) - index
        try:
            rows = measure(case, device, machine, rounds)
        except torch.OutOfMemoryError:
            rows = [{"case": case.name, "op": case.op, "note": "left out: no memory"}]
        except Exception as error:  # shows in the exit status; the other cases are measured
            note = f"failed: {described(error)}"
            rows = [{"case": case.name, "op": case.op, "note": note}]
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found += rows
        table.add([{**row, **table.environment} for row in rows])
        print("\n".join(summary(rows, title=True)), flush=True)
    return found, 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.kernels.run", description=__doc__
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--grid", choices=GRIDS, help="by default cpu, or core on cuda")
    parser.add_argument("--quick", action="store_true", help="the same as --grid quick")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: torch's choice")
    add_out(parser, f"CSV file to write{BESIDE}")
    parser.add_argument("--resume", action="store_true", help="keep the cases the CSV already has")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no case after this")  # fmt: skip
    parser.add_argument("--compile-only", type=Shard.parse, metavar="I/N",
                        help="compile the kernels of every N-th case and format, and end")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    started = time.monotonic()
    chosen = _arguments(argv)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("run: torch finds no CUDA device", file=sys.stderr)
        return 2
    check_out([chosen.out], force=chosen.force, command=COMMAND)
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    torch.set_num_threads(chosen.threads or torch.get_num_threads())
    grid = (
        "quick" if chosen.quick else chosen.grid or ("core" if chosen.device == "cuda" else "cpu")
    )
    rounds = {"quick": QUICK_ROUNDS, "tiny": TINY_ROUNDS}.get(grid, ROUNDS)
    listed = cases(grid, chosen.device)
    if chosen.compile_only:
        compile_kernels(listed, device, chosen.compile_only)
        return 0
    about = environment(device)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value))
    table = Table(chosen.out, about)
    done = table.start({**details(device), "grid": grid}, chosen.resume)
    left = [case for case in listed if case.name not in done]
    if done:
        print(f"{len(listed) - len(left)} of {len(listed)} cases were measured before")
    with use_backend(chosen.backend), torch.no_grad():
        rows, out = measured(left, device, table, rounds, started + chosen.time_limit)
    if out:
        print(f"run: {out} of {len(listed)} cases left out: {chosen.time_limit:g} s are over")
    bad = [row for row in rows if str(row.get("note", "")).startswith(("wrong", "failed"))]
    for row in bad:
        print(f"run: {row['case']} {row.get('kind', '')}: {row['note']}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
