"""The tables and the picture of docs/peers.md, from ``bench/results/peers.csv``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import ROOT, is_absent, left_out, table

FILE, PART = "peers.csv", "peers"
PAGE = ROOT.parent / "docs" / "peers.md"
PICTURE = ROOT.parent / "docs" / "peers.png"
OURS = "caramba"
SHAPE = ("batch", "heads", "kv_heads", "dim", "kv", "tokens", "threads")
HEADINGS = ("", "bits", "ms", "times ours", "MB stored", "GB/s", "share", "error", "note")
#: The shape of the picture: one row and one token of the wide heads on one thread.
SHOWN = {"batch": "1", "heads": "32", "dim": "128", "tokens": "1", "threads": "1"}
PANELS = (
    ("16 or 32 bits a value", ("16", "32")), ("8 bits a value", ("8",)), ("4 bits a value", ("4",))
)  # fmt: skip
COLOURS = {OURS: "black", "OpenVINO": "C0", "ONNX Runtime": "C1", "ggml": "C2", "torch": "C3"}
#: Line styles of a program's kinds, in the order of the table.
STYLES = ("o-", "s--", "^:", "v-.", "D-", "x--")
Row = Mapping[str, Any]


def _shape(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in SHAPE)


def _title(row: Row) -> str:
    rows = "1 row" if str(row["batch"]) == "1" else f"{row['batch']} rows"
    tokens = "1 new token" if str(row["tokens"]) == "1" else f"{row['tokens']} new tokens"
    threads = "1 thread" if str(row["threads"]) == "1" else f"{row['threads']} threads"
    heads = f"{row['heads']} query heads, {row['kv_heads']} kv heads of {row['dim']}"
    return f"{row['kv']} tokens cached, {rows}, {heads}, {tokens}, {threads}"


def _number(row: Row, name: str, form: str, unit: float = 1.0) -> str:
    value = row.get(name)
    return "" if value in (None, "") else format(float(value) * unit, form)


def _cells(row: Row) -> tuple[str, ...]:
    ratio = _number(row, "vs_ours", ".2f")
    itself = row["system"] == OURS and row["kind"] == row.get("ours")
    return (
        f"{row['system']} {row['kind']}", str(row["bits"]), _number(row, "median_us", ",.3f", 1e-3),
        "" if itself or not ratio else f"{ratio} × {row['ours']}", _number(row, "stored_bytes", ",.1f", 1e-6),
        _number(row, "gb_per_s", ".1f"), _number(row, "share", ".0%"), _number(row, "error", ".1e"),
        str(row.get("note") or ""),
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> list[str]:
    """The table of one shape, and the probe's bandwidth."""
    lines = table(HEADINGS, [_cells(row) for row in rows])
    speed = next((row["probe_gb_per_s"] for row in rows if row.get("probe_gb_per_s")), None)
    return [*lines, *([] if speed is None else ["", f"Memory read by the probe: {speed} GB/s."])]


def overview(rows: Sequence[Row]) -> list[str]:
    """Time of a step relative to ours of the same width, by program and kind, over all shapes."""
    times: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        if row["system"] != OURS and row["vs_ours"]:
            name = (f"{row['system']} {row['kind']}", str(row["bits"]), f"`{row['ours']}`")
            of_tokens = times.setdefault(name, {}).setdefault(str(row["tokens"]), [])
            of_tokens.append(float(row["vs_ours"]))
    counts = sorted({tokens for found in times.values() for tokens in found}, key=int)
    body = [
        (
            *name, sum(map(len, found.values())), f"{min(map(min, found.values())):.2f}×",
            *(f"{median(found[tokens]):.2f}×" if tokens in found else "" for tokens in counts),
            f"{max(map(max, found.values())):.2f}×",
        )
        for name, found in times.items()
    ]  # fmt: skip
    medians = (f"median, {tokens} new token{'s' * (tokens != '1')}" for tokens in counts)
    heads = ("", "bits", "beside", "shapes", "least", *medians, "most")
    return [
        "### All shapes", "", "Times as long as ours at the same width: below 1 the other is faster.", "",
        *table(heads, body),
    ]  # fmt: skip


def lines_of(path: Path) -> list[str]:
    """The part of the page."""
    rows = read(path)
    if not rows:
        return ["Not measured."]
    first, lines = rows[0], []
    facts = path.with_suffix(".json")
    about = json.loads(facts.read_text("utf-8")) if facts.exists() else {}
    named = [f"{name} {version}" for name, version in about.get("peers", {}).items()]
    origin = (first["device"], *named, f"torch {first['torch']}", f"commit {first['commit']}")
    lines += [f"From `bench/results/{path.name}`. {'; '.join(origin)}."]
    if about.get("measured") != about.get("shapes"):
        lines[0] += f" Only {about['measured']} of {about['shapes']} shapes: the time was over."
    lines += ["", *overview(rows)]
    for shape in dict.fromkeys(_shape(row) for row in rows):
        found = [row for row in rows if _shape(row) == shape and not is_absent(row)]
        lines += ["", f"### {_title(found[0])}", "", *summary(found)]
    return [*lines, *left_out(rows, lambda row: f"{row['system']} {row['kind']}")]


def curves(rows: Sequence[Row], bits: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """System and kind -> (KV, time relative to ours) by KV, for the shape in `SHOWN`."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        shown = all(str(row[name]) == value for name, value in SHOWN.items())
        if shown and str(row["bits"]) in bits and row["vs_ours"]:
            name = f"{row['system']} {row['kind']}"
            found.setdefault(name, []).append((int(row["kv"]), float(row["vs_ours"])))
    return {name: sorted(line) for name, line in found.items()}


def plot(path: Path, picture: Path) -> None:
    """Writes the picture, a panel per width and a line per system; ValueError if there is nothing to plot."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    rows = read(path)
    panels = [(title, curves(rows, bits)) for title, bits in PANELS]
    if not any(lines for _, lines in panels):
        raise ValueError("no shape of the picture was measured")
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), sharey=True), panels, strict=True
    ):
        seen: Counter[str] = Counter()
        for name, line in lines.items():
            program = next(known for known in COLOURS if name.startswith(known))
            style = STYLES[seen[program] % len(STYLES)]
            seen[program] += 1
            kv, times = zip(*line, strict=True)
            axes.plot(kv, times, style, color=COLOURS[program], label=name, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("cached tokens")
        if lines:
            place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
            axes.legend(fontsize=7, ncols=2, **place)
    figure.supylabel("time of a step, times that of caramba at the same width", fontsize=10)
    figure.savefig(picture, dpi=120)
