"""The README's table of decode attention, from the CSV of a run.

``python -m caramba_fast.bench.pages.readme CSV README``

It stands between two comments in the README and is replaced as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caramba_fast.bench.kernels.table import read

START, END = "<!-- decode attention: bench.readme -->", "<!-- end -->"
KINDS = ("fp16", "q8_0", "q4_0", "nf4")


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a case of plain decode attention with D 128: times of fp16, and speed of the others."""
    lines = [
        "| decode attention | fp16 | q8_0 | q4_0 | nf4 | SDPA fp32 | best of torch |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {
            row["kind"]: row
            for row in rows
            if row["case"] == case and row.get("backend") and row.get("median_us")
        }
        if not set(KINDS) <= set(found) or "decode_attention" not in case:
            continue
        base = float(found["fp16"]["median_us"])
        cells = [f"{base / 1000:,.2f} ms"]
        cells += [f"{base / float(found[kind]['median_us']):.2f}×" for kind in KINDS[1:]]
        for column in ("vs_sdpa", "vs_best"):
            ratio = found["fp16"].get(column)
            cells.append(f"{1 / float(ratio):.2f}×" if ratio else "")
        lines.append(f"| {case.removeprefix('decode_attention').strip()} | {' | '.join(cells)} |")
    return lines


def replaced(readme: str, lines: Sequence[str]) -> str:
    """``readme`` with another table.

    Raises:
        ValueError: the comments that enclose it are missing.
    """
    if START not in readme or END not in readme:
        raise ValueError(f"the README lacks {START} or {END}")
    before, rest = readme.split(START, 1)
    return "\n".join([f"{before}{START}", "", *lines, "", END + rest.split(END, 1)[1]])


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(replaced(target.read_text(), table(read(source))))
