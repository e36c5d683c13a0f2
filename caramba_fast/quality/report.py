"""QualityReport: the figures of a measurement, the Pareto front, and reading and writing them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from caramba_fast.config.files import read_json, shown
from caramba_fast.quality.figures import CacheQuality, NeedleQuality
from caramba_fast.writing import replacing

Row = TypeVar("Row", CacheQuality, NeedleQuality)
#: Exceptions that parsing another kind of file can raise.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, csv.Error)
_READ: dict[Any, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda value: value in (True, "True"),
}


@dataclass(frozen=True)
class QualityReport:
    """Figures of all caches at all contexts.

    Attributes:
        rows: by context, the baseline first, then the caches as they were given.
        needles: retrieval by depth, in the same order; empty without needles.
        about: description of the measurement, JSON values.
    """

    rows: list[CacheQuality] = field(default_factory=list)
    needles: list[NeedleQuality] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def contexts(self) -> list[int]:
        """The contexts measured, in order."""
        return list(dict.fromkeys(row.context for row in self.rows))

    @property
    def baseline(self) -> str:
        """The cache all others are compared with."""
        return str(self.about.get("baseline", ""))

    def row(self, kind: str, context: int | None = None) -> CacheQuality:
        """The figures of one cache, at the first context by default; raises KeyError if it was not measured."""
        wanted = self.contexts[0] if context is None and self.rows else context
        for row in self.rows:
            if (row.kind, row.context) == (kind, wanted):
                return row
        known = ", ".join(f"{row.kind} at {row.context}" for row in self.rows)
        raise KeyError(f"{kind} at {wanted} was not measured; there are {known}")

    def to_json(self, path: str | Path) -> None:
        """Writes the report as JSON: nan is null, infinities are strings."""
        content = {
            "about": self.about,
            "rows": [asdict(row) for row in self.rows],
            "needles": [asdict(row) for row in self.needles],
        }
        text = json.dumps(_plain(content), indent=1, allow_nan=False)
        with replacing(path) as stream:
            stream.write(f"{text}\n".encode())

    @classmethod
    def from_json(cls, path: str | Path) -> QualityReport:
        """Reads what `to_json` wrote; raises ValueError if the file is damaged or not a report."""
        try:
            content = read_json(path)
            return cls(
                [_row(CacheQuality, row) for row in content["rows"]],
                [_row(NeedleQuality, row) for row in content["needles"]],
                content["about"],
            )
        except _DAMAGE as error:
            raise ValueError(f"{path} is not a quality report: {shown(error)}") from error

    def to_csv(self, path: str | Path) -> None:
        """Writes the rows as CSV; intervals are columns ``<figure>_low`` and ``<figure>_high``."""
        lines = [_flat(row) for row in self.rows]
        columns = dict.fromkeys(name for line in lines for name in line)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows(lines)
        with replacing(path) as stream:
            stream.write(text.getvalue().encode())


def read_csv(path: str | Path) -> list[CacheQuality]:
    """Reads the rows that `QualityReport.to_csv` wrote; raises ValueError if the file is not such a table."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            return [_row(CacheQuality, _nested(line)) for line in csv.DictReader(file)]
    except _DAMAGE as error:
        raise ValueError(f"{path} is not a table of a quality report: {shown(error)}") from error


def is_report(path: str | Path) -> bool:
    """Whether `QualityReport.to_json` wrote the file."""
    try:
        found = read_json(path)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == {"about", "rows", "needles"}


def is_table(path: str | Path) -> bool:
    """Whether the file begins like one that `QualityReport.to_csv` wrote."""
    first = [column.name for column in fields(CacheQuality)][:3]
    with Path(path).open("rb") as file:
        return file.read(4096).startswith(",".join(first).encode())


def on_pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (cost, loss): True if no other point is at most as large in both and smaller in one."""
    return [
        not any(
            cost <= own_cost and loss <= own_loss and (cost, loss) != (own_cost, own_loss)
            for cost, loss in points
        )
        for own_cost, own_loss in points
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _row(kind: type[Row], values: dict[str, Any]) -> Row:
    given: dict[str, Any] = {}
    for column in fields(kind):
        value = values[column.name]
        if column.name == "ci":
            given["ci"] = {
                name: (_number(low), _number(high)) for name, (low, high) in value.items()
            }
        else:
            read = _READ[column.type]
            given[column.name] = _number(value) if read is float else read(value)
    return kind(**given)


def _flat(row: CacheQuality) -> dict[str, Any]:
    line = {column.name: getattr(row, column.name) for column in fields(row) if column.name != "ci"}
    for name, (low, high) in row.ci.items():
        line.update({f"{name}_low": low, f"{name}_high": high})
    return line


def _nested(line: dict[str, str]) -> dict[str, Any]:
    ci = {
        name: (line[f"{name}_low"], line[f"{name}_high"])
        for name in line
        if line.get(f"{name}_low") and line.get(f"{name}_high")
    }
    return {**line, "ci": ci}
