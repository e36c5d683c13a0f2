"""Measures a decode step of attention in other programs beside ours: ``python -m caramba_fast.bench.peers.run``.

``make bench-peers`` installs what it needs and writes ``bench/results/peers.csv`` and docs/peers.md; ``--quick`` takes
a few shapes and writes neither. One process, all systems in turn. A system that cannot run has a row with the reason.
A result further from float64 than its precision explains is not timed and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

from caramba_fast.bench.environment import details, environment
from caramba_fast.bench.kernels.timing import ROUNDS
from caramba_fast.bench.out import BESIDE, add_out, check_out, write_details, write_table
from caramba_fast.bench.pages import peers_page
from caramba_fast.bench.pages.sections import RESULTS, finish
from caramba_fast.bench.peers import ggml_library
from caramba_fast.bench.peers.measure import Row, measure
from caramba_fast.bench.peers.problem import GRIDS
from caramba_fast.bench.peers.systems import systems

#: Written into the details beside the results.
COMMAND = "peers.run"
COLUMNS = (
    "batch", "heads", "kv_heads", "dim", "kv", "tokens", "threads", "system", "kind", "bits", "samples", "median_us",
    "p20_us", "p80_us", "ours", "vs_ours", "stored_bytes", "error", "gb_per_s", "probe_gb_per_s", "share", "note",
    "device", "torch", "commit", "source",
)  # fmt: skip
PACKAGES = ("openvino", "onnxruntime", "onnx")
QUICK_ROUNDS = 7


def versions() -> dict[str, str]:
    """Versions of the compared programs."""
    found = {"ggml": ggml_library.version() or "not built"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.peers.run", description=__doc__
    )
    parser.add_argument("--grid", choices=tuple(GRIDS), default="full")
    parser.add_argument("--quick", action="store_true", help="the same as --grid quick")
    parser.add_argument("--systems", default="", metavar="NAMES",
                        help="only these programs, separated by commas; ours is always there")  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, help="only the shapes of so many threads")
    add_out(parser, f"CSV file to write{BESIDE}; by default nothing is kept")
    parser.add_argument("--publish", action="store_true",
                        help="write bench/results/peers.csv, docs/peers.md and its picture")  # fmt: skip
    parser.add_argument("--page-only", action="store_true",
                        help="measure nothing: the page and the picture from the results there are")  # fmt: skip
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no shape after this")  # fmt: skip
    return parser.parse_args(argv)


def run(given: argparse.Namespace, out: Path | None) -> list[Row]:
    """Measures a grid, writing the rows of every finished shape."""
    started = time.monotonic()
    about = environment(torch.device("cpu"))
    wanted = set(filter(None, given.systems.split(",")))
    chosen = [s for s in systems() if s.ours or not wanted or s.name in wanted]
    grid = "quick" if given.quick else given.grid
    shapes = [s for s in GRIDS[grid]() if given.threads in (0, s.threads)]
    print(", ".join(f"{k} {v}" for k, v in {**about, **versions()}.items() if v), flush=True)
    rows: list[Row] = []
    for index, shape in enumerate(shapes):
        if time.monotonic() - started > given.time_limit:
            print(f"peers: {len(shapes) - index} of {len(shapes)} shapes left out: time is over")
            break
        print(f"\n{shape.name}", flush=True)
        rounds = ROUNDS if grid == "full" else QUICK_ROUNDS
        found = [{**row, **about} for row in measure(shape, chosen, rounds)]
        rows += found
        print("\n".join(peers_page.summary(found)), flush=True)
        if out is not None:
            write_table(out, COLUMNS, rows)
            done = {"grid": grid, "measured": index + 1, "shapes": len(shapes)}
            facts = {**details(torch.device("cpu")), **done, "peers": versions()}
            write_details(out, COMMAND, facts)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = _arguments(argv)
    target = RESULTS / peers_page.FILE
    if given.publish and (given.quick or given.grid != "full" or given.systems):
        print("peers: a part of the grid is not published", file=sys.stderr)
        return 2
    check_out([given.out], force=given.force, command=COMMAND)
    rows = [] if given.page_only else run(given, target if given.publish else given.out)
    if given.publish or given.page_only:
        given.publish = True
        finish(given, {peers_page.PART: peers_page.lines_of(target)}, peers_page.PAGE)
        peers_page.plot(target, peers_page.PICTURE)
    wrong = [row for row in rows if str(row.get("note", "")).startswith("wrong")]
    for row in wrong:
        print(f"peers: {row['system']} {row['kind']}: {row['note']}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
