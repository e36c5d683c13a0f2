"""The measured table as plain text: what errors carry, and what the command prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from caramba_fast.policy.plan import CandidateRow
from caramba_fast.policy.settings import MIB

#: Heading, and cell of a row; "–" where something was not measured.
COLUMNS: tuple[tuple[str, Callable[[CandidateRow], str]], ...] = (
    ("cache", lambda r: r.spec),
    ("MiB", lambda r: f"{r.nbytes / MIB:.2f}"),
    ("bytes/token", lambda r: f"{r.bytes_per_token:.0f}"),
    ("ΔNLL", lambda r: _with_half(r, "delta_nll", "+.4f")),
    ("PPL ratio", lambda r: _number(r.ppl_ratio, ".4f")),
    ("KL mnat", lambda r: _number(None if r.mean_kl is None else 1000 * r.mean_kl, ".3g")),
    ("needles", lambda r: _number(r.needles, ".1%")),
    ("step/fp16", lambda r: _number(r.relative_step, ".2f")),
    ("verdict", lambda r: r.reason),
)


def cells(rows: Sequence[CandidateRow]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; columns nothing was measured for are left out."""
    written = [[cell(row) for _, cell in COLUMNS] for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] != "–" for line in written)]
    return [COLUMNS[i][0] for i in used], [[line[i] for i in used] for line in written]


def plain_table(rows: Sequence[CandidateRow]) -> str:
    """The table as lines of text."""
    headings, body = cells(rows)
    lines = [headings, *body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _with_half(row: CandidateRow, figure: str, form: str) -> str:
    """A figure with half its interval."""
    value, (low, high) = getattr(row, figure), row.ci.get(figure, (None, None))
    if value is None or low is None or high is None:
        return _number(value, form)
    return f"{value:{form}}±{(high - low) / 2:.4f}"
