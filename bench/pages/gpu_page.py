"""The table of docs/gpu.md: what is expected of a GPU, and what one has measured.

``python -m caramba_fast.bench.pages.gpu_page`` writes it from ``bench/kernels/predictions.csv`` and, where there is
one, ``bench/results/cuda.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from caramba_fast.bench.kernels.predict import PREDICTIONS
from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import RESULTS, ROOT, table, write_parts

PAGE, PART = ROOT.parent / "docs" / "gpu.md", "gpu"
MEASURED = RESULTS / "cuda.csv"
KINDS = ("fp16", "q8", "q4", "q8_0", "q4_0", "nf4")
NOT_MEASURED = "not measured"
Rows = Sequence[Mapping[str, str]]


def lines_of(predictions: Path = PREDICTIONS, measured: Path = MEASURED) -> list[str]:
    """The part of the page."""
    expected = [row for row in read(predictions) if row["predicted_us"]]
    found = {
        (row["case"], row["kind"]): row
        for row in read(measured)
        if row["backend"] == "triton" and row["median_us"]
    }
    devices = ", ".join(dict.fromkeys(row["device"] for row in found.values()))
    lines = [f"Measured on {devices}." if devices else "No GPU has measured any of these.", ""]
    body = []
    for case in dict.fromkeys(row["case"] for row in expected):
        kinds = {row["kind"]: row for row in expected if row["case"] == case}
        hoped = [_time(kinds[kind], "predicted_us") if kind in kinds else "" for kind in KINDS]
        times = [
            "" if kind not in kinds
            else _time(found[case, kind], "median_us") if (case, kind) in found
            else NOT_MEASURED
            for kind in KINDS
        ]  # fmt: skip
        body.append((case, *hoped, *times))
    headings = (
        "",
        *(f"{kind}, expected µs" for kind in KINDS),
        *(f"{kind}, measured µs" for kind in KINDS),
    )
    return [*lines, *table(headings, body)]


def _time(row: Mapping[str, str], name: str) -> str:
    return f"{float(row[name]):,.1f}"


if __name__ == "__main__":
    write_parts({PART: lines_of()}, PAGE)
