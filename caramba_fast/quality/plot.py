"""Plots of quality loss against bytes: of a quality report, and the functions `caramba_fast.policy.plot` shares.

Each cache is a point; a cache without a loss, such as the baseline, is a vertical line.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caramba_fast.quality.figures import CacheQuality, Interval
from caramba_fast.quality.report import QualityReport
from caramba_fast.writing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
#: Points are numbered instead of labelled if a spec is longer than _SHORT or there are more than _FEW caches.
_SHORT, _FEW = 16, 12
#: Width of a letter of a label, and possible vertical offsets of a label from its point, in points.
_LETTER, _HEIGHTS = 4.8, (0, 8, -8, 16, -16, 24, -24)
#: Inches per letter and per line of the legend.
_KEY_LETTER, _KEY_LINE = 0.061, 0.17
#: Creator in a plot's metadata.
MAKER = "caramba-fast"
Box = tuple[float, float, float, float]


def check_plot(path: str | Path) -> None:
    """Raises if a plot could not be written.

    Raises:
        ValueError: the name does not end in .png or .svg.
        FileNotFoundError: the folder does not exist.
        ModuleNotFoundError: matplotlib is missing (``pip install matplotlib``).
    """
    if Path(path).suffix not in ENDINGS:
        raise ValueError(f"{path} ends in {Path(path).suffix!r}; .png and .svg can be written")
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {Path(path).parent}")
    _check_matplotlib()


def _check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install matplotlib") from error


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, size in inches; raises ModuleNotFoundError without matplotlib."""
    _check_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: Figure, path: str | Path) -> None:
    """Writes a figure atomically, in the format of the file extension, with metadata that `is_plot` recognizes."""
    ending = Path(path).suffix
    name = {"Creator" if ending == ".svg" else "Software": MAKER}
    content = io.BytesIO()
    figure.savefig(content, dpi=160, format=ending[1:], metadata=name)
    with replacing(path) as stream:
        stream.write(content.getvalue())


def is_plot(path: str | Path) -> bool:
    """Whether `write_figure` wrote the file."""
    with Path(path).open("rb") as file:
        start = file.read(4096)
    return MAKER.encode() in start and (b"<svg" in start or start.startswith(b"\x89PNG"))


def style_axes(axis: Any, bytes_label: str, margins: tuple[float, float]) -> None:
    """Sets up axes of bytes and logarithmic loss, with a thin grid."""
    axis.set_yscale("log")
    axis.margins(*margins)
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)
    axis.set_xlabel(bytes_label)


def draw_point(
    axis: Any, x: float, y: float, interval: Interval, floor: float, colour: str, *,
    filled: bool, size: int,
) -> None:  # fmt: skip
    """Draws a cache of loss ``y`` with its interval (nan for none), clipped below at ``floor``."""
    low, high = interval
    if not math.isnan(low):
        axis.vlines(x, max(low, floor), high, color="0.7", linewidth=1, zorder=0)
    face = colour if filled else "white"
    axis.plot(x, y, "o", markersize=size, color=colour, markerfacecolor=face, zorder=2)


def draw_size(axis: Any, x: float, words: str, colour: str, words_colour: str) -> None:
    """Draws a vertical line at the size of a cache without a loss, such as the baseline."""
    axis.axvline(x, color=colour, linestyle=":", linewidth=1)
    axis.annotate(
        words, (x, 1), xycoords=("data", "axes fraction"), xytext=(-3, -10),
        textcoords="offset points", ha="right", fontsize=8, color=words_colour,
    )  # fmt: skip


def write_labels(axis: Any, labels: Sequence[tuple[str, float, float]]) -> None:
    """Writes each (words, x, y) beside its point, at the first place that overlaps neither a point nor a label.

    Call ``figure.draw_without_rendering()`` before: the axes must be in their final position.
    """
    scale = 72 / axis.figure.dpi
    places = [axis.transData.transform((x, y)) * scale for _, x, y in labels]
    edge = axis.bbox.x0 * scale
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in places]
    for (words, *point), (x, y) in zip(labels, places, strict=True):
        width = _LETTER * len(words)
        boxes = []
        for up, side in itertools.product(_HEIGHTS, (1, -1)):
            left = x + 5 if side > 0 else x - 5 - width
            if left > edge:
                boxes.append((left, y + up - 4, left + width, y + up + 4))
        box = next((b for b in boxes if not any(_meet(b, other) for other in taken)), boxes[0])
        right = box[0] > x
        taken.append(box)
        axis.annotate(
            words, point, xytext=(5 if right else -5, box[1] + 4 - y), textcoords="offset points",
            ha="left" if right else "right", va="center", fontsize=8,
        )  # fmt: skip


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def plot_report(report: QualityReport, title: str = "") -> Figure:
    """Mean KL (log scale, with its interval) against bytes per token, one panel per context.

    Caches of the Pareto front are filled and joined by a line. The baseline, whose KL is 0, is a vertical line at its
    size. Raises ModuleNotFoundError without matplotlib (``pip install matplotlib``).
    """
    kinds = list(dict.fromkeys(r.kind for r in report.rows if r.kind != report.baseline))
    numbered = len(kinds) > _FEW or any(len(kind) > _SHORT for kind in kinds)
    labels = {kind: str(i) if numbered else kind for i, kind in enumerate(kinds, start=1)}
    panels = len(report.contexts)
    width, height = 5.6 * panels, 4.4
    if numbered:  # room for the legend beside the panels
        width += _KEY_LETTER * (4 + max(map(len, kinds)))
        height = max(height, 0.6 + _KEY_LINE * len(kinds))
    figure = new_figure(width, height)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis, context in zip(axes, report.contexts, strict=True):
        rows = [row for row in report.rows if row.context == context]
        _panel(axis, rows, report.baseline, labels)
        axis.set_title(f"context {context}", fontsize=10)
    axes[0].set_ylabel(f"mean KL to {report.baseline} [nats]")
    if numbered:
        from matplotlib.lines import Line2D  # noqa: PLC0415

        handles = [Line2D([], [], linestyle="none") for _ in kinds]
        key = [f"{label:>2} {kind}" for kind, label in labels.items()]
        figure.legend(
            handles, key, loc="outside right upper", handlelength=0, handletextpad=0, frameon=False,
            prop={"family": "monospace", "size": 7},
        )  # fmt: skip
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.draw_without_rendering()  # fixes the position of the axes
    for axis, context in zip(axes, report.contexts, strict=True):
        rows = _shown([row for row in report.rows if row.context == context], labels)
        write_labels(axis, [(labels[r.kind], r.cache_bytes_per_token, r.mean_kl) for r in rows])
    return figure


def save_plot(report: QualityReport, path: str | Path, title: str = "") -> None:
    """Writes `plot_report` as PNG or SVG, by file extension; raises as `check_plot`."""
    check_plot(path)
    write_figure(plot_report(report, title), path)


def _shown(rows: list[CacheQuality], labels: dict[str, str]) -> list[CacheQuality]:
    return [row for row in rows if row.kind in labels and 0 < row.mean_kl < math.inf]


def _panel(axis: Any, rows: list[CacheQuality], baseline: str, labels: dict[str, str]) -> None:
    shown = _shown(rows, labels)
    front = sorted((row.cache_bytes_per_token, row.mean_kl) for row in shown if row.pareto)
    if front:
        axis.plot(*zip(*front, strict=True), color="tab:blue", linewidth=1, zorder=1)
    floor = min((row.mean_kl for row in shown), default=1.0) / 10
    for row in shown:
        interval = row.ci.get("mean_kl", (math.nan, math.nan))
        draw_point(
            axis, row.cache_bytes_per_token, row.mean_kl, interval, floor, "tab:blue",
            filled=row.pareto, size=5,
        )  # fmt: skip
    for row in rows:
        if row.kind == baseline:
            draw_size(axis, row.cache_bytes_per_token, baseline, "0.4", "0.4")
    style_axes(axis, "cache bytes per token, everything included", (0.2, 0.1))
