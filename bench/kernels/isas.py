"""Decode attention by instruction set: one process each, timed in turn, beside fp16 with the same set.

`python -m caramba_fast.bench.kernels.isas [--sets avx2 avx512] [--before LIBRARY] [--out FILE.csv]` writes a row for
each shape, set and kinds of keys and values: microseconds a call on one thread (the shortest of a few, median over
rounds), and how many times faster than fp16 in the same rounds. ``--before`` names another build of the extension to
measure as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from caramba_fast.bench.out import write_table

#: (query heads, kv heads, values of a head), tokens cached, query tokens.
SHAPES = tuple(product(((32, 8, 128), (14, 2, 64)), (512, 4096, 32768), (1, 8)))
#: Kinds of keys and values; the first is the baseline.
KINDS = (
    "fp16/fp16", "q8_0/q8_0", "q4_0/q4_0", "nf4/nf4", "q8_channel/q8_0", "q4_channel/q4_0",
)  # fmt: skip
COLUMNS = ("heads", "kv_heads", "dim", "kv", "tokens", "build", "isa", "kinds", "us", "times_fp16")
ROUNDS, SAMPLE_S = 9, 4e-3


def serve() -> None:
    """Reads lines (shape, kinds) until the end of input and answers each with seconds a call."""
    import torch  # noqa: PLC0415

    from caramba_fast.bench.kernels.registry import BLOCK  # noqa: PLC0415
    from caramba_fast.bench.kernels.workloads import stored  # noqa: PLC0415
    from caramba_fast.formats import resolve  # noqa: PLC0415
    from caramba_fast.ops import KVView, decode_attention  # noqa: PLC0415
    from caramba_fast.ops.view import Lanes  # noqa: PLC0415

    torch.set_num_threads(1)
    made: tuple[object, dict[str, tuple[KVView, KVView]], object] = (None, {}, None)

    def view(kind: str, x: torch.Tensor, lanes: Lanes) -> KVView:
        form = resolve(kind)
        if not form.by_channel:
            return stored(x, kind, lanes)
        width = lanes.heads_per_lane * x.shape[3]
        lead = (1, lanes.count, x.shape[2])
        codes = torch.randint(0, 256, (*lead, form.code_width(width)), dtype=torch.uint8)
        lead = (1, lanes.count, x.shape[2] // BLOCK)
        steps = torch.full((*lead, width), 6 / (2**form.bits - 1))
        return KVView(codes, torch.cat((steps, steps * 0 - 3), -1).half(), kind)

    def fresh(shape: Sequence[int]) -> tuple[object, dict[str, tuple[KVView, KVView]], object]:
        torch.manual_seed(0)
        heads, kv_heads, dim, kv, tokens = shape
        lanes = Lanes.of(kv_heads, dim, dim)
        k, v = (torch.randn(1, kv_heads, kv, dim) for _ in range(2))
        views = {}
        for kinds in KINDS:
            key, value = kinds.split("/")
            pair = view(key, k, lanes), view(value, v, lanes)
            if resolve(key).by_channel:  # needs a ring for groups that are not full
                tail = torch.zeros(1, lanes.count, 2 * BLOCK, lanes.heads_per_lane * dim).half()
                pair = replace(pair[0], tail=tail), replace(pair[1], tail=tail)
            views[kinds] = pair
        return shape, views, (2 * torch.randn(1, heads, tokens, dim)).half()

    for line in sys.stdin:
        shape, kinds = json.loads(line)
        if made[0] != shape:
            made = fresh(shape)
        q, lengths = made[2], torch.tensor([shape[3]], dtype=torch.int32)
        k, v = made[1][kinds]
        taken: list[float] = []
        while len(taken) < 3 or sum(taken) < SAMPLE_S:
            started = time.perf_counter()
            decode_attention(q, k, v, lengths, n_kv_heads=shape[1])
            taken.append(time.perf_counter() - started)
        print(min(taken), flush=True)


class Worker:
    """A process with one build and one instruction set."""

    def __init__(self, build: str, isa: str) -> None:
        self.build, self.isa = build, isa
        environment = os.environ | {"CARAMBA_FAST_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
        if build != "now":
            environment["CARAMBA_FAST_EXTENSION"] = build
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--serve"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def seconds(self, shape: Sequence[int], kinds: str) -> float:
        """Seconds a call, the shortest of a few."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([shape, kinds]), file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline() or math.nan)


def measure(
    workers: Sequence[Worker], shape: Sequence[int], rounds: int
) -> list[dict[str, object]]:
    """Rows of one shape."""
    entries = [(worker, kinds) for worker in workers for kinds in KINDS]
    for entry in entries:  # builds the caches
        entry[0].seconds(shape, entry[1])
    taken = [{entry: entry[0].seconds(shape, entry[1]) for entry in entries} for _ in range(rounds)]
    rows = []
    for worker, kinds in entries:
        ratios = [turn[worker, KINDS[0]] / turn[worker, kinds] for turn in taken]
        us = 1e6 * statistics.median(turn[worker, kinds] for turn in taken)
        found = (*shape, "now" if worker.build == "now" else "before", worker.isa, kinds)
        figures = (f"{us:.1f}", f"{statistics.median(ratios):.2f}")
        rows.append(dict(zip(COLUMNS, (*found, *figures), strict=True)))
    return rows


def main() -> None:
    """Measures the sets and shapes of the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--sets", nargs="+", default=["avx2", "avx512"])
    parser.add_argument("--before")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shapes", type=int, nargs="*", help="places in SHAPES")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    builds = [*([arguments.before] if arguments.before else []), "now"]
    workers = [Worker(build, isa) for isa in arguments.sets for build in builds]
    shapes = [(*heads, kv, tokens) for heads, kv, tokens in SHAPES]
    # An older build may lack a set.
    workers = [one for one in workers if not math.isnan(one.seconds(shapes[0], KINDS[0]))]
    rows = []
    for place in arguments.shapes or range(len(SHAPES)):
        found = measure(workers, shapes[place], arguments.rounds)
        rows += found
        for row in found:
            print(*row.values(), flush=True)
    if arguments.out:
        write_table(arguments.out, COLUMNS, rows)


if __name__ == "__main__":
    main()
