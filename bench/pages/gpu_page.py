"""The tables of docs/gpu.md: ``python -m caramba_fast.bench.pages.gpu_page``.

From ``bench/results/cuda.csv``, for the cases of ``bench/kernels/predictions.csv``, and steps of a model from
``bench/results/cuda_llama-3.2-1b.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from caramba_fast.bench.kernels.predict import PREDICTIONS
from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import RESULTS, ROOT, table, write_parts

PAGE, PART, MODEL_PART = ROOT.parent / "docs" / "gpu.md", "gpu", "gpu model"
MEASURED, MODEL = RESULTS / "cuda.csv", RESULTS / "cuda_llama-3.2-1b.csv"
KINDS = ("fp16", "q8", "q4", "q8_0", "q4_0", "nf4")
#: With two key streams torch chooses the kernel.
PEERS = {"sdpa flash": "", "sdpa": " (no flash)"}
NOT_MEASURED = "not measured"
Rows = Sequence[Mapping[str, str]]


def lines_of(predictions: Path = PREDICTIONS, measured: Path = MEASURED) -> list[str]:
    """The table of attention."""
    expected = [(row["case"], row["kind"]) for row in read(predictions)]
    timed = [row for row in read(measured) if row["median_us"]]
    found = {(row["case"], row["kind"]): row for row in timed if row["backend"] == "triton"}
    peers = {row["case"]: row for row in timed if row["implementation"] in PEERS}
    devices = ", ".join(dict.fromkeys(row["device"] for row in found.values()))
    lines = [f"Measured on {devices}." if devices else "No GPU has measured any of these.", ""]
    body = []
    for case in dict.fromkeys(case for case, _ in expected):
        there = {kind for name, kind in expected if name == case}
        peer = ""
        if case in peers:
            row = peers[case]
            peer = f"{float(row['median_us']):,.1f}{PEERS[row['implementation']]}"
        cells = (_cell(found.get((case, kind))) if kind in there else "" for kind in KINDS)
        body.append((case, peer, *cells))
    return [*lines, *table(("", "flash SDPA over fp16, µs", *KINDS), body)]


def model_lines(measured: Path = MODEL) -> list[str]:
    """Steps of a model by program and cache: milliseconds, and bytes of the cache."""
    rows = read(measured)
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    found = {(row["program"], row["cache"], row["context"]): row for row in rows}
    about = ", ".join(
        dict.fromkeys(f"{row['model']}, {row['dtype']}, {row['device']}" for row in rows)
    )
    body = []
    for program, cache in dict.fromkeys((row["program"], row["cache"]) for row in rows):
        there = [found.get((program, cache, context)) for context in contexts]
        times = [NOT_MEASURED if row is None else f"{float(row['median_ms']):.2f}" for row in there]
        size = "" if there[-1] is None else f"{int(there[-1]['cache_bytes']) / 2**20:,.0f}"
        body.append((program, cache, *times, size))
    heads = (f"{int(context):,} tokens" for context in contexts)
    return [f"{about}; milliseconds.", "", *table(("", "cache", *heads, "MiB of the last"), body)]


def _cell(row: Mapping[str, str] | None) -> str:
    if row is None:
        return NOT_MEASURED
    times = f" ({float(row['vs_sdpa']):.2f}×)" if row["vs_sdpa"] else ""
    return f"{float(row['median_us']):,.1f}{times}"


if __name__ == "__main__":
    write_parts({PART: lines_of(), MODEL_PART: model_lines()}, PAGE)
