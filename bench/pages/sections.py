"""Measured parts of a page: each stands between two comments and is replaced as a whole.

Benchmarks print the parts they would write; with ``--publish`` they rewrite results and page.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caramba_fast.bench.out import add_out, check_out

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results", ROOT.parent / "docs" / "inference.md"


def comments(name: str) -> tuple[str, str]:
    """The comments before and after a part."""
    return f"<!-- measured: {name} -->", f"<!-- measured: end of {name} -->"


def replaced(page: str, name: str, lines: Sequence[str]) -> str:
    """``page`` with new lines in its part ``name``; ValueError if the comments that enclose it are missing."""
    start, end = comments(name)
    if page.count(start) != 1 or end not in page.split(start)[1]:
        raise ValueError(f"the page needs one {start} and {end} behind it")
    before, rest = page.split(start)
    return "\n".join([f"{before}{start}", "", *lines, "", end + rest.split(end, 1)[1]])


def write_parts(parts: Mapping[str, Sequence[str]], page: Path = PAGE) -> None:
    """Replaces parts of a page in place."""
    text = page.read_text("utf-8")
    for name, lines in parts.items():
        text = replaced(text, name, lines)
    page.write_text(text, "utf-8")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table; the first ``left`` columns are text, the others figures."""
    sides = ["---" if index < left else "---:" for index in range(len(headings))]
    return [f"| {' | '.join(map(str, row))} |" for row in (headings, sides, *rows)]


def is_absent(row: Mapping[str, Any]) -> bool:
    """Whether the row is of a program that could not run."""
    return str(row.get("note") or "").startswith(("not installed", "does not run here"))


def left_out(rows: Iterable[Mapping[str, Any]], name: Callable[[Any], str]) -> list[str]:
    """A footnote on the programs that could not run, and in how many cases unless it was all."""
    rows = list(rows)
    all_of, missing = (
        Counter(name(row) for row in found) for found in (rows, filter(is_absent, rows))
    )
    if not missing:
        return []
    names = [
        one if times == all_of[one] else f"{one} ({times} of {all_of[one]} cases)"
        for one, times in missing.items()
    ]
    return ["", f"Left out, as they could not run where this was measured: {', '.join(names)}."]


def add_targets(parser: argparse.ArgumentParser, out: str) -> None:
    """Adds the options that say where results go; ``out`` explains ``--out``."""
    add_out(parser, f"{out}; by default nothing is kept")
    parser.add_argument(
        "--publish", action="store_true", help="write bench/results and the page they belong to"
    )
    parser.add_argument(
        "--page-only", action="store_true", help="measure nothing, take the results there are"
    )


@contextmanager
def results_at(given: argparse.Namespace, file: str = "") -> Iterator[Path]:
    """Path of the results: ``--out``, ``bench/results``, or a temporary folder."""
    if given.out is not None:
        yield given.out
    elif given.publish or given.page_only:
        yield RESULTS / file
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / file


def finish(
    given: argparse.Namespace, parts: Mapping[str, Sequence[str]], page: Path = PAGE
) -> None:
    """Prints the parts, and writes them into the page if asked to."""
    for lines in parts.values():
        print("\n".join(["", *lines]))
    if given.publish:
        write_parts(parts, page)


def measured(
    given: argparse.Namespace,
    file: str,
    measure: Callable[[argparse.Namespace, Path], None],
    part: str,
    lines_of: Callable[[Path], Sequence[str]],
    page: Path = PAGE,
) -> int:
    """Measures into ``file`` unless ``--page-only``, prints the part and puts it into the page; the exit status."""
    check_out([given.out], force=given.force)
    with results_at(given, file) as path:
        if not given.page_only:
            measure(given, path)
        finish(given, {part: lines_of(path)}, page)
    return 0
