"""Plots the share of bandwidth over the length of the cache: ``python -m caramba_fast.bench.pages.roofline CSV PNG``.

One line per format and batch, of decode attention with one query token; predictions are dashed. Needs matplotlib (the
extra ``plot``).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from caramba_fast.bench.kernels.table import read

#: Line colours by format, widths by batch.
COLOURS = {
    "fp16": "C7",
    "bf16": "C5",
    "q8": "C9",
    "q4": "C1",
    "q8_0": "C0",
    "q4_0": "C3",
    "nf4": "C2",
}
WIDTHS = {"1": 1.0, "8": 1.8, "32": 2.6}
Line = list[tuple[int, float, float | None]]


def shape(row: dict[str, str]) -> tuple[str, ...]:
    """The common shape of the lines in a picture."""
    return tuple(row[name] for name in ("heads", "kv_heads", "dim", "tokens", "window", "threads"))


def curves(rows: list[dict[str, str]]) -> dict[tuple[str, str], Line]:
    """(kind, batch) -> (KV, share, predicted share) by KV, for the shape measured at most lengths."""
    measured = [
        row for row in rows
        if row["op"] == "decode_attention" and row["implementation"] == "caramba" and row["share"]
        and row["tokens"] == "1" and row["window"] == "0"
    ]  # fmt: skip
    lengths = defaultdict(set)
    for row in measured:
        lengths[shape(row)].add(row["kv"])
    if not lengths:
        raise ValueError("no decode attention of one token was measured in this file")
    chosen = max(lengths, key=lambda key: len(lengths[key]))
    found: dict[tuple[str, str], Line] = defaultdict(list)
    for row in measured:
        if shape(row) == chosen:
            expected = float(row["predicted_share"]) if row["predicted_share"] else None
            point = (int(row["kv"]), float(row["share"]), expected)
            found[row["kind"], row["batch"]].append(point)
    return {key: sorted(line) for key, line in found.items()}


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Writes the picture; ValueError if there is nothing to plot."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for (kind, batch), line in curves(rows).items():
        style: dict[str, Any] = {"color": COLOURS.get(kind), "linewidth": WIDTHS.get(batch, 1.0)}
        lengths = [kv for kv, _, _ in line]
        axes.plot(
            lengths, [share for _, share, _ in line], "o-", label=f"{kind}, batch {batch}", **style
        )
        expected = [share for _, _, share in line if share is not None]
        if len(expected) == len(lengths):
            axes.plot(lengths, expected, "--", alpha=0.5, **style)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="cached tokens", ylabel="share of bandwidth", ylim=(0, None))
    axes.set_title(f"decode attention, {rows[0]['device']} (dashed: predicted)", fontsize=10)
    axes.axhline(1.0, color="black", linewidth=0.8)
    figure.legend(fontsize=8, ncols=1, loc="outside right upper")
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    plot(read(Path(sys.argv[1])), Path(sys.argv[2]))
