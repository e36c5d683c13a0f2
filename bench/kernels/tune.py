"""Which launch settings are fastest, by format, head size and query rows: measured, not guessed.

``python -m caramba_fast.bench.kernels.tune --out CSV`` tries tiles, warps and stages of the split-KV kernel on a cache
of 8 x 32768 tokens, checks that each computes the same, and times all of a point in the same rounds. One table
comes out: every setting with its time, the one used today (``default``) and the fastest (``chosen``; within 1%
of the default the default stays).
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from caramba_fast.bench.environment import environment
from caramba_fast.bench.kernels.comparators import Implementation
from caramba_fast.bench.kernels.oracle import relative_l2
from caramba_fast.bench.kernels.registry import Case
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.kernels.timing import interleaved, quantile
from caramba_fast.bench.kernels.workloads import workload
from caramba_fast.kernels import splits_launch
from caramba_fast.kernels.tiles_layout import Settings
from caramba_fast.ops import use_backend

TILES, WARPS, STAGES = (32, 64, 128), (2, 4, 8), (2, 3, 4)
#: A slower default is kept below this gain.
TIE = 0.01
ROUNDS = 11
#: Two settings add in different orders, in float16 operands.
SAME = 5e-3


@dataclass(frozen=True)
class Point:
    """What settings are chosen by."""

    kind: str
    dim: int
    rows: int

    def case(self, tiny: bool) -> Case:
        """A cache that has so many query rows a kv head."""
        heads, tokens = {16: (32, 1), 32: (32, 8), 64: (64, 8)}[self.rows]
        if tiny:
            return Case("decode_attention", (self.kind,), 1, heads // 8, 1, self.dim, 256, tokens)
        return Case("decode_attention", (self.kind,), 8, heads, 8, self.dim, 32768, tokens)


@dataclass(frozen=True)
class Row:
    """One setting at one point; the columns of the table."""

    kind: str
    dim: int
    query_rows: int
    rows: int
    tile: int
    num_warps: int
    num_stages: int
    median_us: float | None
    gb_per_s: float | None
    default: bool
    chosen: bool = False
    note: str = ""


def points(tiny: bool) -> list[Point]:
    """The most used first."""
    if tiny:
        return [Point("q4_0", 32, 16)]
    kinds = ("q4_0", "q8_0", "nf4", "fp16")
    shapes = ((128, 16), (128, 32), (64, 16), (128, 64), (256, 16))
    return [Point(kind, dim, rows) for dim, rows in shapes for kind in kinds]


def candidates(default: Settings, query_rows: int, tiny: bool) -> list[Settings]:
    """The default first; query rows in one program or in several."""
    rows = {max(16, default.rows // 2), default.rows, min(default.rows * 2, query_rows)}
    tried = [
        replace(default, rows=r, tile=tile, num_warps=warps, num_stages=stages)
        for r, tile, warps, stages in product(sorted(rows), TILES, WARPS, STAGES)
    ]
    return [default, *(x for x in (tried[:2] if tiny else tried) if x != default)]


@contextmanager
def forced(chosen: Settings | None, seen: list[Settings] | None = None) -> Iterator[None]:
    """Launches use ``chosen``, or what they would use anyway, which ``seen`` then holds."""
    original = splits_launch.settings

    def choose(*args: Any) -> Settings:
        found = chosen or original(*args)
        if seen is not None:
            seen.append(found)
        return found

    splits_launch.settings = choose
    try:
        yield
    finally:
        splits_launch.settings = original


def _attempt(call: Any, chosen: Settings, expected: Tensor) -> str:
    """Why a setting is out, or ""."""
    try:
        with forced(chosen):
            error = relative_l2(call(), expected.double())
    except (TritonError, RuntimeError) as reason:
        return f"does not run: {str(reason).splitlines()[0][:80]}"
    return "" if error <= SAME else f"wrong: relL2 {error:.1e} from the default's"


def tune(point: Point, device: torch.device, tiny: bool, shard: Shard | None = None) -> list[Row]:
    """All settings of a point; with ``shard`` only that part is compiled and nothing measured."""
    work = workload(point.case(tiny), device, fill=shard is None)
    entry = work.ours[0]
    seen: list[Settings] = []
    with forced(None, seen):
        expected = entry.calls[0]()
    listed = candidates(seen[0], point.rows, tiny)
    if shard is not None:
        for chosen in shard.of(listed):
            _attempt(entry.calls[0], chosen, expected)
        return []
    notes = {chosen: _attempt(entry.calls[0], chosen, expected) for chosen in listed}

    def under(chosen: Settings) -> Implementation:
        def call() -> Any:
            with forced(chosen):
                return entry.calls[0]()

        return replace(entry, name=str(chosen), calls=(call,))

    timed = {under(chosen): chosen for chosen in listed if not notes[chosen]}
    samples = interleaved(list(timed), device, 3 if tiny else ROUNDS)
    median = {timed[x]: quantile(list(taken.values()), 0.5) for x, taken in samples.items()}
    best = min(median, key=median.__getitem__)
    if listed[0] in median and median[listed[0]] <= median[best] * (1 + TIE):
        best = listed[0]
    return [
        Row(
            point.kind, point.dim, point.rows, x.rows, x.tile, x.num_warps, x.num_stages,
            median_us=round(median[x] * 1e6, 2) if x in median else None,
            gb_per_s=round(entry.moved / median[x] * 1e-9, 1) if x in median else None,
            default=x == listed[0], chosen=x == best, note=notes[x],
        )
        for x in listed
    ]  # fmt: skip


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="caramba_fast.bench.kernels.tune", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="CSV file; points it has are not measured again")
    parser.add_argument("--tiny", action="store_true", help="one small point, to try the command")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no point after this")  # fmt: skip
    parser.add_argument("--compile-only", type=Shard.parse, metavar="I/N",
                        help="compile every N-th setting, and end")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    started = time.monotonic()
    chosen = _arguments(argv)
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    about = environment(device)
    wanted = points(chosen.tiny)
    earlier = (
        [row for row in read(chosen.out) if row["source"] == about["source"]] if chosen.out else []
    )
    done = {(row["kind"], row["dim"], row["query_rows"]) for row in earlier}
    left = [p for p in wanted if (p.kind, str(p.dim), str(p.rows)) not in done]
    table: list[dict[str, Any]] = [dict(row) for row in earlier]
    with use_backend("triton"):
        for index, point in enumerate(left):
            if time.monotonic() - started > chosen.time_limit:
                print(f"tune: {len(left) - index} of {len(wanted)} points left out")
                break
            rows = tune(point, device, chosen.tiny, chosen.compile_only)
            table += [asdict(row) | about for row in rows]
            for row in rows:
                if row.default or row.chosen:
                    print(row, flush=True)
            if rows and chosen.out is not None:
                _write(chosen.out, table)
    return 0


def _write(path: Path, table: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    raise SystemExit(main())
