"""The table of docs/gpu.md: what a GPU has measured, of the cases that are to be measured.

``python -m caramba_fast.bench.pages.gpu_page`` writes it from ``bench/results/cuda.csv``; the cases are those of
``bench/kernels/predictions.csv``.
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
#: Of two key streams torch chooses how to attend.
PEERS = {"sdpa flash": "", "sdpa": " (no flash)"}
NOT_MEASURED = "not measured"
Rows = Sequence[Mapping[str, str]]


def lines_of(predictions: Path = PREDICTIONS, measured: Path = MEASURED) -> list[str]:
    """The part of the page."""
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


def _cell(row: Mapping[str, str] | None) -> str:
    if row is None:
        return NOT_MEASURED
    times = f" ({float(row['vs_sdpa']):.2f}×)" if row["vs_sdpa"] else ""
    return f"{float(row['median_us']):,.1f}{times}"


if __name__ == "__main__":
    write_parts({PART: lines_of()}, PAGE)
