"""The picture of a choice: what each candidate costs in quality against its bytes, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caramba_fast.infer.policy_fields import MIB, CachePolicyFields
from caramba_fast.policy.plan import CandidateRow
from caramba_fast.quality.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
#: Width of a letter and height of a line of a label, and where a label may stand, in points.
_LETTER, _LINE, _HEIGHTS = 4.8, 10, (0, 10, -10, 20, -20, 30, -30)
#: How each end of a candidate is drawn: words, colour, whether filled.
_LOOKS = {
    "chosen": ("chosen", "tab:green", True),
    "passes": ("passes", "tab:blue", True),
    "quality": ("fails the quality gates", "tab:red", False),
    "budget": ("over the budget", "0.5", False),
}


def check_plot(path: str | Path) -> None:
    """Raises for a picture that could not be written.

    Raises:
        ValueError: a name that does not end in .png or .svg.
        ModuleNotFoundError: matplotlib is missing (``pip install caramba-fast[plot]``).
    """
    if Path(path).suffix not in ENDINGS:
        raise ValueError(f"{path} ends in {Path(path).suffix!r}; .png and .svg can be written")
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install 'caramba-fast[plot]'"
        ) from error


def save_plot(
    rows: Sequence[CandidateRow], settings: CachePolicyFields, path: str | Path, title: str = ""
) -> None:
    """Writes `plot_rows` as PNG or SVG, by the name's ending; raises what `check_plot` does."""
    check_plot(path)
    write_figure(plot_rows(rows, settings, title), path)


def plot_rows(rows: Sequence[CandidateRow], settings: CachePolicyFields, title: str = "") -> Figure:
    """Mean KL to an fp16 cache (log scale, with its interval) against MiB of the whole cache.

    The budget and a gate on the KL are lines; a candidate without KL (fp16 itself) is a vertical line at its
    size.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        if row.mean_kl:
            _draw(axis, row)
        else:
            size = row.nbytes / MIB
            axis.axvline(size, color=_look(row)[1], linestyle=":", linewidth=1)
            axis.annotate(
                row.spec, (size, 1), xycoords=("data", "axes fraction"), xytext=(-3, -10),
                textcoords="offset points", ha="right", fontsize=8,
            )  # fmt: skip
    axis.set_yscale("log")
    axis.margins(x=0.15, y=0.15)
    _draw_limits(axis, settings)
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)
    axis.set_xlabel("cache, MiB, everything included")
    axis.set_ylabel("mean KL to fp16 [nats]")
    _draw_key(axis, rows)
    axis.set_title(title, fontsize=10, loc="left")
    figure.draw_without_rendering()  # fixes where the axes are
    _write_labels(axis, [row for row in rows if row.mean_kl])
    return figure


def _look(row: CandidateRow) -> tuple[str, str, bool]:
    return _LOOKS.get(row.status, _LOOKS["passes"])


def _draw(axis: Any, row: CandidateRow) -> None:
    _, colour, filled = _look(row)
    x, y = row.nbytes / MIB, row.mean_kl or 0.0
    low, high = row.ci.get("mean_kl", (None, None))
    if low is not None and high is not None:
        axis.vlines(x, max(low, y / 10), high, color="0.7", linewidth=1, zorder=0)
    face = colour if filled else "white"
    axis.plot(x, y, "o", markersize=6, color=colour, markerfacecolor=face, zorder=2)


def _write_labels(axis: Any, rows: Sequence[CandidateRow]) -> None:
    """Beside each point, moved up or down in steps of a line until it meets no other label."""
    scale = 72 / axis.figure.dpi
    taken: list[tuple[float, float, float]] = []  # left, right, middle
    for row in rows:
        x, y = row.nbytes / MIB, row.mean_kl
        left, middle = axis.transData.transform((x, y)) * scale
        step = "" if row.relative_step is None else f"  ×{row.relative_step:.2f}"
        text = row.spec + step
        right = left + _LETTER * len(text)
        up = next(
            (up for up in _HEIGHTS if not any(
                low < right and left < high and abs(middle + up - at) < _LINE
                for low, high, at in taken)),
            0,
        )  # fmt: skip
        taken.append((left, right, middle + up))
        axis.annotate(
            text, (x, y), xytext=(6, up), textcoords="offset points", fontsize=8, va="center"
        )


def _draw_limits(axis: Any, settings: CachePolicyFields) -> None:
    if settings.cache_budget_mb is not None:
        axis.axvline(settings.cache_budget_mb, color="0.5", linewidth=1)
        axis.annotate(
            "budget", (settings.cache_budget_mb, 0), xycoords=("data", "axes fraction"),
            xytext=(3, 4), textcoords="offset points", fontsize=8, color="0.4",
        )  # fmt: skip
    if settings.cache_quality_max_mean_kl:
        axis.axhline(settings.cache_quality_max_mean_kl, color="tab:red", linewidth=1)


def _draw_key(axis: Any, rows: Sequence[CandidateRow]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    looks = dict.fromkeys(_look(row) for row in rows)
    handles = [
        Line2D([], [], marker="o", linestyle="none", color=colour, label=words,
               markerfacecolor=colour if filled else "white")
        for words, colour, filled in looks
    ]  # fmt: skip
    axis.legend(handles=handles, fontsize=8, loc="best", title="× step time to fp16",
                title_fontsize=8)  # fmt: skip
