"""The rows of serve.csv: summaries of runs of `serve`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from caramba_fast.bench.kernels.timing import quantile
from caramba_fast.bench.serving.serve_load import Run, percentiles
from caramba_fast.bench.serving.serve_room import Room
from caramba_fast.bench.serving.serve_systems import ENGINE, STATIC, TRANSFORMERS

#: Baseline cache for the number of concurrent requests; also the static batches of caches that have none of their own.
BASE = "fp16"
CLOSED, ENDLESS = "closed", "endless"
COLUMNS = (
    "load", "requests_per_s", "system", "cache", "rounds", "requests", "tokens", "tokens_per_s", "tokens_per_s_p20",
    "tokens_per_s_p80", "vs_static", "vs_transformers", "ttft_p50_ms", "ttft_p99_ms", "inter_token_p50_ms",
    "inter_token_p99_ms", "queue_p50_ms", "queue_p99_ms", "preemptions", "running", "most_before_preemption",
    "vs_fp16", "most_vs_fp16", "pages", "cache_bytes", "note", "load_average", "threads", "transformers", "device",
    "torch", "triton", "commit", "source",
)  # fmt: skip
Key = tuple[str, str]
Row = dict[str, Any]
Runs = dict[Key, list[Run]]


def rows_of(what: str, found: Runs, sizes: Mapping[Key, int], arriving: float = 0) -> Iterator[Row]:
    """A row for each system.

    ``found`` and ``sizes`` (bytes of caches) are by system and cache. ``arriving`` is the rate of an open loop in
    requests a second; 0 for a closed one, which reports the rate of answers.
    """
    theirs = next((runs for (name, _), runs in found.items() if name == TRANSFORMERS), None)
    for (name, cache), runs in found.items():
        static = found.get((STATIC, cache), found.get((STATIC, BASE)))
        rates = [run.rate for run in runs]
        requests_per_s = arriving or statistics.median(run.requests_per_s for run in runs)
        counted = [run.preemptions for run in runs if run.preemptions is not None]
        yield {
            "load": what, "requests_per_s": round(requests_per_s, 2), "system": name, "cache": cache,
            "rounds": len(runs), "requests": len(runs[0].records), "tokens": runs[0].tokens,
            "tokens_per_s": round(statistics.median(rates), 1),
            "tokens_per_s_p20": round(quantile(rates, 0.2), 1),
            "tokens_per_s_p80": round(quantile(rates, 0.8), 1),
            "vs_static": _ratio(runs, static), "vs_transformers": _ratio(runs, theirs),
            **_latencies(runs), "preemptions": sum(counted) if counted else "",
            "running": round(statistics.median(run.running for run in runs), 1),
            "cache_bytes": sizes[name, cache],
        }  # fmt: skip


def _ratio(runs: list[Run], base: list[Run] | None) -> float | str:
    """The ratio of tokens a second: the median over rounds."""
    if base is None:
        return ""
    return round(statistics.median(a.rate / b.rate for a, b in zip(runs, base, strict=True)), 3)


def _latencies(runs: list[Run]) -> Row:
    """Percentiles over the requests and tokens of all rounds, in milliseconds."""
    found = {}
    for name, take in (("ttft", Run.ttft), ("inter_token", Run.gaps), ("queue", Run.queue)):
        values = list(chain.from_iterable(map(take, runs)))
        if values:
            for which, value in zip(("p50", "p99"), percentiles(values), strict=True):
                found[f"{name}_{which}_ms"] = round(1e3 * value, 2)
    return found


def room_rows(rooms: Mapping[str, list[Room]]) -> Iterator[Row]:
    """Concurrent requests: a row for each cache, over all supplies."""
    base = rooms.get(BASE)
    for cache, found in rooms.items():
        row: Row = {
            "load": ENDLESS, "system": ENGINE, "cache": cache, "rounds": len(found),
            "preemptions": sum(x.preemptions for x in found),
            "running": round(statistics.fmean(x.mean for x in found), 1),
            "most_before_preemption": max(x.most for x in found),
            "pages": found[0].pages, "cache_bytes": found[0].cache_bytes,
        }  # fmt: skip
        if base is not None:
            row["vs_fp16"] = round(sum(x.mean for x in found) / sum(x.mean for x in base), 3)
            row["most_vs_fp16"] = round(max(x.most for x in found) / max(x.most for x in base), 3)
        yield row
