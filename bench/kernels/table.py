"""The CSV of a run: a line per implementation, written after each case, so that a run can be resumed."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caramba_fast.bench.kernels.predict import Prediction
from caramba_fast.bench.out import write_details, write_table

#: Written into the details beside the CSV.
COMMAND = "kernels.run"
#: Columns of a case; with kind and implementation they identify a line.
CASE = (
    "case", "op", "batch", "heads", "kv_heads", "dim", "kv", "tokens", "dtype", "window", "threads"
)  # fmt: skip
#: Predicted, then measured. ``error`` is relL2 against float64, or the share of wrong bits; ``share`` is of the
#: bandwidth ``probe_gb_per_s`` measured in the same rounds; ``vs_sdpa`` and ``vs_best`` are speedups over torch's
#: attention and over ``best``, the fastest unquantized implementation.
MEASURED = (
    "error", "samples", "median_us", "p20_us", "p80_us", "gb_per_s", "probe_gb_per_s", "share", "vs_sdpa",
    "vs_best", "best", "note",
)  # fmt: skip
ENVIRONMENT = ("device", "torch", "triton", "commit", "source")
COLUMNS = (
    *CASE, "kind", "implementation", "backend", *Prediction.__dataclass_fields__, *MEASURED, *ENVIRONMENT
)  # fmt: skip
Row = dict[str, Any]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a result file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass
class Table:
    """Rows of one run, kept in memory and written to a file, if any, after each case."""

    path: Path | None
    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    details: dict[str, object] = field(default_factory=dict)

    def start(self, details: dict[str, object], resume: bool) -> set[str]:
        """Begins the file, or resumes one of the same source; returns the cases it already has."""
        if self.path is None:
            return set()
        wanted = {name: self.environment[name] for name in ("device", "source", "torch", "triton")}
        earlier: list[Row] = [
            dict(row)
            for row in (read(self.path) if resume else [])
            if all(row.get(name, "") == value for name, value in wanted.items())
        ]
        self.details = details
        self.rows += earlier
        return {row["case"] for row in earlier}

    def add(self, rows: list[Row]) -> None:
        """Adds the rows of one case and writes them to the file."""
        self.rows += rows
        if self.path is None:
            return
        write_table(self.path, COLUMNS, self.rows)
        write_details(self.path, COMMAND, self.details)
