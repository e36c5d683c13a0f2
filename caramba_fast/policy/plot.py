"""Plot of a choice: quality loss of each candidate against its bytes, and its outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caramba_fast.config import short_name
from caramba_fast.infer.policy_fields import MIB, CachePolicyFields
from caramba_fast.policy.plan import CandidateRow
from caramba_fast.quality.plot import (
    check_plot,
    draw_point,
    draw_size,
    new_figure,
    style_axes,
    write_figure,
    write_labels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How each outcome is drawn: label, colour, whether filled.
_LOOKS = {
    "chosen": ("chosen", "tab:green", True),
    "passes": ("passes", "tab:blue", True),
    "quality": ("fails the quality gates", "tab:red", False),
    "budget": ("over the budget", "0.5", False),
}


def save_plot(
    rows: Sequence[CandidateRow], settings: CachePolicyFields, path: str | Path, title: str = ""
) -> None:
    """Writes `plot_rows` as PNG or SVG, by file extension; raises as `check_plot`."""
    check_plot(path)
    write_figure(plot_rows(rows, settings, title), path)


def plot_rows(rows: Sequence[CandidateRow], settings: CachePolicyFields, title: str = "") -> Figure:
    """Mean KL to an fp16 cache (log scale, with its interval) against MiB of the whole cache.

    The budget and a gate on the KL are lines. A candidate without KL (such as fp16) is a vertical line at its size.
    """
    figure = new_figure(7.2, 4.4)
    axis = figure.subplots()
    for row in rows:
        _, colour, filled = _look(row)
        x = row.nbytes / MIB
        if row.mean_kl:
            low, high = row.ci.get("mean_kl", (None, None))
            interval = (math.nan, math.nan) if low is None or high is None else (low, high)
            draw_point(
                axis, x, row.mean_kl, interval, row.mean_kl / 10, colour, filled=filled, size=6
            )
        else:
            draw_size(axis, x, row.spec, colour, "black")
    _draw_limits(axis, settings)
    style_axes(axis, "cache, MiB, everything included", (0.15, 0.15))
    axis.set_ylabel("mean KL to fp16 [nats]")
    _draw_key(axis, rows)
    axis.set_title(title, fontsize=10, loc="left")
    figure.draw_without_rendering()  # fixes the position of the axes
    labels = [(_words(row), row.nbytes / MIB, row.mean_kl) for row in rows if row.mean_kl]
    write_labels(axis, labels)
    return figure


def _words(row: CandidateRow) -> str:
    return short_name(row.spec) + (
        "" if row.relative_step is None else f"  ×{row.relative_step:.2f}"
    )


def _look(row: CandidateRow) -> tuple[str, str, bool]:
    return _LOOKS.get(row.status, _LOOKS["passes"])


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
