"""``caramba-fast run``: does what a manifest says and prints what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from caramba_fast.manifest import RunReport, load_manifest, run_manifest

#: Figures of a benchmark: their name, heading, factor, digits.
SHOWN = (
    ("decode_tokens_per_s", "tok/s", 1.0, 1),
    ("ttft_s", "first ms", 1e3, 1),
    ("inter_token_p50_s", "p50 ms", 1e3, 2),
    ("inter_token_p99_s", "p99 ms", 1e3, 2),
    ("cache_bytes", "cache MiB", 2.0**-20, 2),
    ("bytes_per_token", "bytes/token", 1.0, 0),
)


def run_file(
    path: Path, only: str | None, prompt: str | None, check: bool, console: Console | None = None
) -> list[RunReport]:
    """Reads a manifest and does its runs; with ``check`` it is only read."""
    console = console or Console()
    manifest = load_manifest(path)
    if check:
        for target in manifest.targets:
            for run in target.runs:
                console.print(
                    f"{target.name}/{run.id}: {run.mode} with {target.model}, "
                    f"cache {run.config.cache_name}", markup=False, highlight=False,
                )  # fmt: skip
        return []

    def say(text: str) -> None:
        console.print(escape(text), style="dim", highlight=False)

    done = []
    for report in run_manifest(manifest, path.parent, only=only, prompt=prompt, say=say):
        _show(report, console)
        done.append(report)
    return done


def _show(report: RunReport, console: Console) -> None:
    for text in report.texts:
        console.print(text, markup=False, highlight=False)
    if report.mode == "benchmark":
        console.print(_table(report.metrics))
    else:
        m = report.metrics
        console.print(
            f"{m['new_tokens']} tokens, {m['decode_tokens_per_s']:.1f} tokens/s, first after "
            f"{1000 * m['ttft_s']:.0f} ms, cache {report.report['cache_kind']}",
            style="dim", highlight=False,
        )  # fmt: skip
    if report.output is not None:
        console.print(f"written to {report.output}", style="dim", markup=False, highlight=False)


def _table(metrics: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    for _, heading, _, _ in SHOWN:
        table.add_column(heading, justify="right")
    for kind, figures in metrics.items():
        table.add_row(kind, *(f"{figures[name] * by:.{digits}f}" for name, _, by, digits in SHOWN))
    return table
