"""Result files of a benchmark: the table that ``--out`` names, and for some a JSON file of the same name beside it.

Nobody chose the name of the JSON file, so it records its command and only ever replaces one of the same command.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from caramba_fast.writing import check_replaceable, replacing

#: Columns every table has.
MARKS = {b"threads", b"commit", b"source"}
BESIDE = ", and a JSON file beside it"


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the options ``--out``, explained by ``what``, and ``--force``."""
    parser.add_argument("--out", type=Path, help=what)
    parser.add_argument(
        "--force", action="store_true",
        help="replace a CSV that is no table of benchmarks, and a JSON file beside it that another command wrote",
    )  # fmt: skip


def check_out(tables: Iterable[Path | None], *, force: bool, command: str | None = None) -> None:
    """Checks before measuring that results may be written to ``tables`` (None for one that is not kept).

    ``command`` writes details beside each table; None for none. ``force`` allows replacing anything. Otherwise raises
    FileExistsError for a file that is no table, or details of another command. Raises ValueError for a table that has
    the name of its details.
    """
    for table in filter(None, tables):
        details = table.with_suffix(".json")
        if command is not None and details == table:
            raise ValueError(
                f"--out is {table}; the details go there, and the table needs another name"
            )
        check_replaceable(table, "table of benchmarks", _is_table, force=force)
        if command is not None:
            of_command = f"result of {command}"
            check_replaceable(details, of_command, lambda x: _wrote(x) == command, force=force)


def write_details(table: Path, command: str, content: Mapping[str, Any]) -> None:
    """Writes the details of ``command`` beside its table."""
    text = json.dumps({"command": command, **content}, indent=1)
    write_text(table.with_suffix(".json"), f"{text}\n")


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a CSV; what was there stays until all rows are on the disk. Other keys of a row are left out."""
    write_text(path, table_text(columns, rows))


def table_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A CSV with a header, as text."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_text(path: Path, text: str) -> None:
    """Writes a text file as a whole, and the folder it is in if that is missing; OSError names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


def _is_table(path: Path) -> bool:
    """Whether a CSV file's first line has the columns that every benchmark writes."""
    with path.open("rb") as file:
        columns = file.read(4096).split(b"\n", 1)[0].strip().split(b",")
    return set(columns) >= MARKS


def _wrote(path: Path) -> Any:
    """The command that a JSON file names, if any."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found.get("command") if isinstance(found, dict) else None
