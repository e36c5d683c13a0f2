"""Serving a fixed load: ``python -m caramba_fast.bench.serving.serve [--publish] [--quick]``.

The demo model answers the requests of `serve_load` in static batches, in our engine, as a transformers model in our
engine, and in the continuous batching of transformers (`serve_systems`), with the same bytes for keys and values. All
systems take the same requests in turn, in rounds; a ratio is the median over rounds. How many requests fit into the
same bytes is counted separately (`serve_room`). Takes minutes on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.environment import environment
from caramba_fast.bench.out import write_table
from caramba_fast.bench.pages.sections import add_targets, measured
from caramba_fast.bench.pages.serve_page import FILE, PAGE, PART, lines_of
from caramba_fast.bench.serving.serve_load import CONCURRENCY, Run, arrivals, load
from caramba_fast.bench.serving.serve_room import FULL_REQUESTS, SEEDS, STEPS, room
from caramba_fast.bench.serving.serve_rows import (
    CLOSED,
    COLUMNS,
    Key,
    Row,
    Runs,
    room_rows,
    rows_of,
)
from caramba_fast.bench.serving.serve_systems import (
    ENGINE,
    ENGINE_HF,
    STATIC,
    SYSTEMS,
    TRANSFORMERS,
    WARM_UP,
    Batching,
    Static,
    System,
    Transformers,
    fp16_bytes,
    hf_model,
)
from caramba_fast.models import demo_tokenizer, held_out_text, load_demo

CACHES = ("fp16", "q8", "q4")
REQUESTS, OPEN_REQUESTS, ROUNDS = 80, 40, 3
#: Arrival rates of open loops, relative to the rate at which our engine with `OPEN_CACHES[-1]` answers in the closed
#: loop while all clients wait.
RATES, OPEN_CACHES = (0.5, 0.8, 1.2), ("fp16", "q4")


def systems(
    native: Any, named: Sequence[str], caches: Sequence[str]
) -> tuple[list[System], list[Row]]:
    """The systems that run here, warmed up, and a row with the reason for each of the others."""
    found, left_out = list[System](), list[Row]()
    size = fp16_bytes(native, CONCURRENCY)
    for name in named:
        for cache in ("fp32",) if name == TRANSFORMERS else caches:
            try:
                system = _made(name, cache, native, size)
                system.run(WARM_UP * CONCURRENCY)
            except (TypeError, ImportError, AttributeError, ValueError, RuntimeError) as error:
                print(f"{name}, {cache}: does not run here: {error}", flush=True)
                row = {"load": CLOSED, "system": name, "cache": cache, "note": str(error)}
                left_out.append(row)
            else:
                found.append(system)
    return found, left_out


def _made(name: str, cache: str, native: Any, size: int) -> System:
    makers: dict[str, Callable[[], System]] = {
        STATIC: lambda: Static(native, cache),
        ENGINE: lambda: Batching(ENGINE, native, cache, size),
        ENGINE_HF: lambda: Batching(ENGINE_HF, hf_model(), cache, size),
        TRANSFORMERS: lambda: Transformers(hf_model(), size),
    }
    return makers[name]()


def in_turn(listed: Sequence[System], rounds: int, run: Callable[[System], Run]) -> Runs:
    """Runs of every system, one in each round; rounds begin with different systems."""
    found: Runs = {(system.name, system.cache): [] for system in listed}
    for number in range(rounds):
        first = number % len(listed)
        for system in (*listed[first:], *listed[:first]):
            done = run(system)
            found[system.name, system.cache].append(done)
            print(f"  {system.name}, {system.cache}: {done.rate:.0f} tokens/s", flush=True)
    return found


class Results:
    """All rows so far, written to the file after every addition."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self.about, self.rows = path, about, list[Row]()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds rows."""
        self.rows += [{**row, **self.about} for row in rows]
        write_table(self.path, COLUMNS, self.rows)


def measure(given: argparse.Namespace, path: Path) -> None:
    """Measures everything asked for."""
    model, text = load_demo(), demo_tokenizer().encode(held_out_text()).ids
    results = Results(path, _about())
    if given.supplies:
        _measure_room(given, model, text, results)
    listed, left_out = systems(model, given.systems, given.caches)
    if not listed:
        results.add(left_out)
        return
    items = load(text, given.requests)
    print(f"closed loop, {CONCURRENCY} at once, {given.requests} requests", flush=True)
    closed = in_turn(listed, given.rounds, lambda system: system.run(items))
    results.add([*rows_of(CLOSED, closed, _sizes(listed)), *left_out])
    base = closed.get((ENGINE, OPEN_CACHES[-1])) or next(iter(closed.values()))
    most = statistics.median(run.full_requests_per_s for run in base)
    chosen = [s for s in listed if s.name == TRANSFORMERS or s.cache in OPEN_CACHES]
    for share in given.rates if chosen else ():
        _measure_open(chosen, load(text, given.open_requests), share, most, results)


def _measure_room(
    given: argparse.Namespace, model: Any, text: Sequence[int], results: Results
) -> None:
    size = fp16_bytes(model, FULL_REQUESTS)
    rooms = {
        cache: [room(model, cache, size, text, seed, given.steps) for seed in SEEDS[: given.supplies]]
        for cache in given.caches
    }  # fmt: skip
    for cache, found in rooms.items():
        print(f"at once, {cache}: {found}", flush=True)
    results.add(room_rows(rooms))


def _measure_open(
    listed: Sequence[System], items: Any, share: float, most: float, results: Results
) -> None:
    rate = share * most
    print(f"open loop, {rate:.1f} requests a second", flush=True)
    times = arrivals(len(items), rate)
    found = in_turn(listed, 1, lambda system: system.run(items, times))
    results.add(rows_of(f"{share:.0%}", found, _sizes(listed), rate))


def _sizes(listed: Sequence[System]) -> dict[Key, int]:
    return {(system.name, system.cache): system.cache_bytes for system in listed}


def _about() -> Row:
    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = ""
    return {
        **environment(torch.device("cpu")), "threads": torch.get_num_threads(), "transformers": transformers,
        "load_average": f"{os.getloadavg()[0]:.1f}",
    }  # fmt: skip


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.serving.serve", description=__doc__
    )
    add_targets(parser, "CSV file to write")
    parser.add_argument("--quick", action="store_true", help="one round of few requests, a minute")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--caches", nargs="+", choices=CACHES, help=f"by default {CACHES}")
    parser.add_argument("--requests", type=int, help=f"of the closed loop, by default {REQUESTS}")
    parser.add_argument("--open-requests", type=int, default=OPEN_REQUESTS, help="of open loops")
    parser.add_argument("--rounds", type=int, help=f"of the closed loop, by default {ROUNDS}")
    parser.add_argument("--rates", type=float, nargs="*",
                        help=f"arrivals of open loops, as shares of what is answered; by default {RATES}")  # fmt: skip
    parser.add_argument("--supplies", type=int, choices=range(len(SEEDS) + 1),
                        help="endless loads on which requests at once are counted")  # fmt: skip
    parser.add_argument("--steps", type=int, default=STEPS, help="of each of them")
    given = parser.parse_args(argv)
    quick = {"caches": ("fp16", "q4"), "requests": 32, "rounds": 1, "rates": (), "supplies": 1}
    full = {"caches": CACHES, "requests": REQUESTS, "rounds": ROUNDS, "rates": RATES, "supplies": 3}
    for name, value in (quick if given.quick else full).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return measured(_arguments(argv), FILE, measure, PART, lines_of, PAGE)


if __name__ == "__main__":
    raise SystemExit(main())
