"""``caramba-fast run``: runs a manifest and prints the results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from caramba_fast.cli.models import of_drafts
from caramba_fast.manifest import Prepared, RunReport, load_manifest, prepare, run_manifest
from caramba_fast.manifest.schema import at

#: Figures of a benchmark: name, heading, factor, digits.
SHOWN = (
    ("decode_tokens_per_s", "tokens/s\n(p20–p80)", 1.0, 1),
    ("ttft_s", "first\nms", 1e3, 1),
    ("inter_token_p50_s", "p50\nms", 1e3, 2),
    ("inter_token_p99_s", "p99\nms", 1e3, 2),
    ("cache_bytes", "cache\nMiB", 2.0**-20, 2),
    ("bytes_per_token", "bytes/\ntoken", 1.0, 0),
)


def run_file(path: Path, only: str | None, prompt: str | None, check: bool, *, force: bool) -> None:
    """Reads a manifest and runs it; with ``check``, only checks and lists its runs."""
    console, manifest = Console(), load_manifest(path)
    if check:
        with at(str(path)):
            listed = list(prepare(manifest, path.parent, only=only, prompt=prompt, force=force))
        for ready in listed:
            _list(ready, console)
        return

    def say(text: str) -> None:
        try:
            console.print(escape(text), style="dim", highlight=False)
        except OSError as error:
            raise _UnprintedError from error  # which is nothing of the manifest's

    reports = run_manifest(manifest, path.parent, only=only, prompt=prompt, force=force, say=say)
    unprinted: BaseException | None = None
    while unprinted is None:
        try:
            with at(str(path)):
                report = next(reports, None)
        except _UnprintedError as error:
            unprinted = error.__cause__
            continue
        if report is None:
            return
        _show(report, console)
    raise unprinted


class _UnprintedError(Exception):
    """Standard output takes nothing more; its cause says why."""


def _list(ready: Prepared, console: Console) -> None:
    for run in ready.runs:
        tokens = sum(map(len, run.ids))
        console.print(
            f"{ready.target.name}/{run.spec.id}: {run.spec.mode} with {ready.target.model}, cache "
            f"{', '.join(run.configs)}, {tokens} prompt tokens"
            f"{'' if run.output is None else f', writes {run.output}'}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def _show(report: RunReport, console: Console) -> None:
    each = len(report.texts) // len(report.prompts)
    for index, text in enumerate(report.texts):
        if len(report.texts) > 1:
            console.print(f"[{index + 1}]", style="dim", markup=False, highlight=False)
        console.print(
            report.prompts[index // each] + text, markup=False, highlight=False, soft_wrap=True
        )
    if report.mode == "benchmark":
        console.print(_table(report.metrics))
    else:
        console.print(_line(report), style="dim", highlight=False, soft_wrap=True)
    if report.output is not None:
        console.print(
            f"written to {report.output}",
            style="dim",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _line(report: RunReport) -> str:
    figures = report.metrics
    rate = figures["decode_tokens_per_s"]
    speed = f", {rate:.1f} tokens/s" if math.isfinite(rate) else ""
    return (
        f"{figures['new_tokens']} tokens{speed}, first after {1000 * figures['ttft_s']:.0f} ms, "
        f"cache {report.report['cache_kind']}{of_drafts(report.report)}"
    )


def _table(metrics: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    for _, heading, _, _ in SHOWN:
        table.add_column(heading, justify="right")
    for kind, figures in metrics.items():
        speed = figures["decode_tokens_per_s"]
        cells = [f"{figures[name]['median'] * by:.{digits}f}" for name, _, by, digits in SHOWN]
        cells[0] += f" ({speed['p20']:.0f}–{speed['p80']:.0f})"
        table.add_row(kind, *cells)
    return table
