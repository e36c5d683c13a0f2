"""Measures the fastest launch settings by format, head size and query rows.

``python -m caramba_fast.bench.kernels.tune --out CSV`` tries tiles, warps and stages of the split-KV kernel on a cache
of 8 x 32768 tokens, checks that all results agree, and times the trials of a point in the same rounds. With the fastest
it tries numbers of splits, and numbers of programs per SM under a balanced schedule. The table has every trial with its
time, the current settings (``default``) and the fastest (``chosen``; within 1% of the default the default stays). The
times of the splits give the cost of a program and of merging (`fitted`). ``CARAMBA_FAST_TUNED=CSV`` makes launches on
the same GPU use the chosen settings (`kernels.tuned`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from caramba_fast.bench.environment import environment
from caramba_fast.bench.kernels import workloads
from caramba_fast.bench.kernels.comparators import Implementation
from caramba_fast.bench.kernels.oracle import relative_l2
from caramba_fast.bench.kernels.parity import described
from caramba_fast.bench.kernels.registry import LAYOUTS, Case
from caramba_fast.bench.kernels.run import smallest
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.kernels.timing import interleaved, quantile
from caramba_fast.bench.kernels.workloads import workload
from caramba_fast.bench.out import write_table
from caramba_fast.kernels import splits_launch
from caramba_fast.kernels.splits import Overheads, Room, load
from caramba_fast.kernels.tiles_layout import Settings
from caramba_fast.kernels.tuned import Tuned
from caramba_fast.ops import use_backend

TILES, WARPS, STAGES = (32, 64, 128), (1, 2, 4, 8), (2, 3, 4)
SPLITS, RESIDENT = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128), (1, 2, 3, 4, 5, 6, 8)
#: Below this gain the default is kept.
TIE = 0.01
ROUNDS = 11
#: Relative difference allowed: settings add in different orders, with float16 operands.
SAME = 5e-3


@dataclass(frozen=True)
class Point:
    """The key that settings are chosen by."""

    kind: str
    dim: int
    rows: int

    def case(self, tiny: bool) -> Case:
        """A case with a cache and this many query rows per kv head."""
        heads, tokens = {8: (32, 1), 16: (32, 4), 32: (32, 8), 64: (64, 8)}[self.rows]
        if tiny:
            return Case("decode_attention", (self.kind,), 1, heads // 8, 1, self.dim, 256, tokens)
        return Case("decode_attention", (self.kind,), 8, heads, 8, self.dim, 32768, tokens)


@dataclass(frozen=True)
class Trial:
    """What a launch is forced to use.

    Attributes:
        part: what is tried: one of `caramba_fast.kernels.tuned.PARTS`.
        settings: None for the default.
        num_splits: as of the op.
        resident: programs per SM at once; None for what the compiled kernel allows.
    """

    part: str = "settings"
    settings: Settings | None = None
    num_splits: int = 0
    resident: int | None = None


@dataclass(frozen=True)
class Row:
    """One trial at one point; the columns of the table.

    ``streams`` are the kinds of keys and values, ``query_rows`` those of a lane, padded; overheads are in units of the
    time of a tile (`caramba_fast.kernels.splits.Overheads`).
    """

    kind: str
    streams: str
    dim: int
    query_rows: int
    part: str
    rows: int
    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    narrow: bool
    num_splits: int
    resident: int | None
    median_us: float | None
    gb_per_s: float | None
    default: bool
    chosen: bool = False
    program_overhead: float | None = None
    merge_overhead: float | None = None
    together_overhead: float | None = None
    note: str = ""


def points(tiny: bool) -> list[Point]:
    """The points to tune, the most used first."""
    if tiny:
        return [Point("q4_0", 32, 8)]
    kinds = ("q4", "q8", "q4_0", "q8_0", "nf4", "fp16")
    shapes = ((128, 8), (128, 32), (64, 8), (128, 16), (128, 64), (256, 8))
    return [Point(kind, dim, rows) for dim, rows in shapes for kind in kinds]


def candidates(default: Settings, query_rows: int, tiny: bool) -> list[Settings]:
    """Settings to try, the default first; query rows are in one program or split over several."""
    rows = {max(8, default.rows // 2), default.rows, min(default.rows * 2, query_rows)}
    tried = [
        replace(default, rows=r, tile=tile, num_warps=warps, num_stages=stages, max_registers=None)
        for r, tile, warps, stages in product(sorted(rows), TILES, WARPS, STAGES)
    ]
    return [default, *(x for x in (tried[:2] if tiny else tried) if x != default)]


@contextmanager
def forced(trial: Trial, seen: list[Any] | None = None) -> Iterator[None]:
    """Forces launches to follow ``trial``, whatever was tuned; ``seen`` collects settings and arguments of `plan`."""
    settings, plan = splits_launch.settings, splits_launch.plan
    attend = workloads.OPS["decode_attention"]

    def choose(*args: Any) -> Settings:
        found = trial.settings or settings(*args)
        if seen is not None:
            seen.append(found)
        return found

    def planned(*args: Any) -> tuple[int, int]:
        if seen is not None:
            seen.append(args)
        return plan(*args)

    with patch.multiple(
        splits_launch, settings=choose, plan=planned, tuned=lambda *_: Tuned(resident=trial.resident)
    ), patch.dict(workloads.OPS, decode_attention=partial(attend, num_splits=trial.num_splits)):  # fmt: skip
        yield


def _attempt(call: Any, trial: Trial, expected: Tensor) -> str:
    """Why a trial is excluded, or ""."""
    try:
        with forced(trial):
            error = relative_l2(call(), expected.double())
    except (TritonError, RuntimeError) as reason:
        return f"does not run: {str(reason).splitlines()[0][:80]}"
    return "" if error <= SAME else f"wrong: relL2 {error:.1e} from the default's"


#: Values that `fitted` tries for the slowdown of programs that share an SM.
TOGETHER = tuple(n / 20 for n in range(25))


def fitted(seconds: Mapping[int, float], tiles: int, programs: int, room: Room) -> Overheads | None:
    """Costs of a program and of merging, from ``seconds`` by number of splits; None where a tile seems to cost nothing.

    The model is that of `splits.cheapest` with the time of a tile, fitted by least squares of relative errors.
    ``tiles`` are those of a row, ``programs`` is rows times lanes.
    """
    ones = torch.ones(len(seconds), dtype=torch.float64)
    best: tuple[float, Overheads | None] = (float("inf"), None)
    for together in TOGETHER:
        model = [
            [x / t for x in load(tiles, programs, n, room, together)] for n, t in seconds.items()
        ]
        matrix = torch.tensor(model, dtype=torch.float64)
        found = torch.linalg.lstsq(matrix, ones[:, None], driver="gelsd").solution[:, 0]
        error = float((matrix @ found - ones).norm())
        tile, program, merge = found.tolist()
        if tile > 0 and error < best[0] * (1 - TIE):
            costs = Overheads(
                round(max(program / tile, 0.0), 3), round(max(merge / tile, 0.0), 4), together
            )
            best = error, costs
    return best[1]


class Tuning:
    """All trials of one point."""

    def __init__(self, point: Point, device: torch.device, tiny: bool, fill: bool) -> None:
        self.point, self.device, self.tiny = point, device, tiny
        case = point.case(tiny)
        self.entry = workload(case if fill else smallest(case), device, fill=fill).ours[0]
        self.call = self.entry.calls[0]
        seen: list[Any] = []
        with forced(Trial(), seen):
            self.expected = self.call()
        self.settings = [Trial(settings=x) for x in candidates(seen[0], point.rows, tiny)]

    def rows(self) -> list[Row]:
        """Every trial with its time."""
        found, best = self._timed(self.settings)
        chosen = self.settings[best].settings
        trials = [Trial("splits", chosen, n) for n in (0, *(SPLITS[:3] if self.tiny else SPLITS))]
        timed, best = self._timed(trials)
        costs = self._overheads(trials[0], timed)
        if costs is None:
            timed[best] = replace(timed[best], chosen=False)
        else:
            timed[best] = replace(
                timed[best], **{f"{name}_overhead": x for name, x in costs._asdict().items()}
            )
        counts = (None, *(RESIDENT[:2] if self.tiny else RESIDENT))
        balanced, best = self._timed([Trial("resident", chosen, -1, n) for n in counts])
        if balanced[best].resident is None:  # what the compiled kernel allows needs no row
            balanced[best] = replace(balanced[best], chosen=False)
        return [*found, *timed, *balanced]

    def _overheads(self, default: Trial, timed: list[Row]) -> Overheads | None:
        seen: list[Any] = []
        with forced(default, seen):
            self.call()
        tokens, tile, programs, room = seen[-1][:4]
        times = {row.num_splits: row.median_us for row in timed if row.num_splits and row.median_us}
        if len(times) < 3:
            return None
        return fitted(times, -(-tokens // tile), programs, room)

    def _timed(self, trials: list[Trial]) -> tuple[list[Row], int]:
        """Rows of trials, the default first, timed in the same rounds; and the index of the best."""
        notes = {x: _attempt(self.call, x, self.expected) for x in trials}

        def under(trial: Trial) -> Implementation:
            def call() -> Any:
                with forced(trial):
                    return self.call()

            return replace(self.entry, name=str(trial), calls=(call,))

        timed = {under(x): x for x in trials if not notes[x]}
        samples = interleaved(list(timed), self.device, 1 if self.tiny else ROUNDS)
        median = {timed[x]: quantile(list(taken.values()), 0.5) for x, taken in samples.items()}
        best = min(median, key=median.__getitem__)
        if trials[0] in median and median[trials[0]] <= median[best] * (1 + TIE):
            best = trials[0]
        rows = [self._row(x, median.get(x), notes[x], x == trials[0], x == best) for x in trials]
        return rows, trials.index(best)

    def _row(
        self, x: Trial, seconds: float | None, note: str, is_default: bool, is_chosen: bool
    ) -> Row:
        point, settings = self.point, x.settings
        assert settings is not None
        return Row(
            point.kind, "/".join(LAYOUTS.get(point.kind, (point.kind,) * 2)), point.dim, point.rows, x.part,
            settings.rows, settings.tile, settings.num_warps, settings.num_stages, settings.max_registers,
            settings.narrow,
            x.num_splits, x.resident,
            median_us=round(seconds * 1e6, 2) if seconds else None,
            gb_per_s=round(self.entry.moved / seconds * 1e-9, 1) if seconds else None,
            default=is_default, chosen=is_chosen, note=note,
        )  # fmt: skip


def tune(point: Point, device: torch.device, tiny: bool, shard: Shard | None = None) -> list[Row]:
    """All trials of a point; with ``shard``, only compiles that part of the settings and measures nothing."""
    tuning = Tuning(point, device, tiny, fill=shard is None)
    if shard is None:
        return tuning.rows()
    for trial in shard.of(tuning.settings):
        _attempt(tuning.call, trial, tuning.expected)
    return []


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.kernels.tune", description=__doc__
    )
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
    failed = 0
    with use_backend("triton"):
        for index, point in enumerate(left):
            if time.monotonic() - started > chosen.time_limit:
                print(f"tune: {len(left) - index} of {len(wanted)} points left out")
                break
            try:
                rows = tune(point, device, chosen.tiny, chosen.compile_only)
            except Exception as error:  # the other points are tuned
                print(f"tune: {point} failed: {described(error)}", flush=True)
                failed += 1
                continue
            table += [asdict(row) | about for row in rows]
            for row in rows:
                if row.default or row.chosen:
                    print(row, flush=True)
            if rows and chosen.out is not None:
                write_table(chosen.out, [*table[0]], table)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
