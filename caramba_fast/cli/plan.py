"""``caramba-fast plan``: the cache chosen for a model on this machine, and why each other candidate was rejected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from caramba_fast.cli.models import settings_of
from caramba_fast.cli.quality import DEMO, Subject, begin_token, load_subject, read_text
from caramba_fast.config import short_name
from caramba_fast.infer.policy_fields import MIB
from caramba_fast.models.registry import check_device
from caramba_fast.policy import (
    CachePlan,
    CachePolicyFields,
    CandidateRow,
    NoCandidateError,
    choose_cache,
)
from caramba_fast.policy.plan import cells
from caramba_fast.policy.plot import save_plot
from caramba_fast.quality import RecallFormat
from caramba_fast.quality.plot import check_plot, is_plot
from caramba_fast.writing import check_replaceable

#: Terminal width from which verdicts fit beside the figures.
_WIDE = 110
_STYLES = {"chosen": "bold green", "quality": "red", "budget": "dim"}


def run_plan(
    name: str,
    text: str | None,
    settings: dict[str, Any],
    *,
    max_seq_len: int,
    batch: int,
    prefill: str,
    device: str,
    dtype: str,
    revision: str | None,
    plot: Path | None,
    as_json: bool,
    force: bool,
) -> None:
    """Measures every candidate, prints the table, and writes the plot.

    Args:
        name: 'demo', 'demo:dba', a hard variant, a checkpoint folder, a GGUF file or a Hub id.
        text: a text file to measure on; None for held-out text with demo models, else text sampled from the model.
        settings: fields of `CachePolicyFields`; None leaves a default.
        max_seq_len, batch, prefill: of the cache.
        device, dtype: device and weight dtype of the model.
        revision: branch, tag or commit, if ``name`` is a Hub id.
        plot: a .png or .svg file to write.
        as_json: print only the plan, as JSON.
        force: overwrite any file that ``plot`` names.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: as the message says; the table, if any, is printed first.
    """
    console = Console()
    check_device(device)
    given = settings_of(CachePolicyFields, settings)
    if plot is not None:
        check_plot(plot)
        check_replaceable(plot, "picture", is_plot, force=force)
    subject = load_subject(f"{DEMO}:gqa" if name == DEMO else name, device, dtype, revision)
    ids = None if text is None and subject.demo is None else read_text(subject, text)
    try:
        with Console(stderr=True).status("starting") as status:
            plan = choose_cache(
                subject.model, given, max_seq_len=max_seq_len, batch_size=batch, prefill=prefill,  # type: ignore[arg-type]
                calibration_ids=None if ids is None else ids.tolist(),
                recall=_recall(subject, given), bos_token_id=begin_token(subject), measure_all=True,
                progress=lambda words: None if as_json else status.update(words),
            )  # fmt: skip
    except NoCandidateError as error:
        if not as_json:
            print_table(console, error.rows, name)
        _picture(error.rows, given, plot, name, console, quiet=as_json)
        raise ValueError(str(error).splitlines()[0]) from error
    if as_json:
        console.print_json(plan.model_dump_json(), highlight=False)
    else:
        _print(console, plan, name)
    _picture(plan.rows, given, plot, name, console, quiet=as_json)


def _recall(subject: Subject, settings: CachePolicyFields) -> RecallFormat | None:
    """The needle format; None if the tokenizer has no words for needles and no gate needs them."""
    try:
        return RecallFormat.of(subject.tokenizer)
    except ValueError:
        if settings.cache_quality_min_needle is not None:
            raise
        return None


def print_table(console: Console, rows: Sequence[CandidateRow], title: str) -> None:
    """Prints every candidate with its figures and outcome; outcomes go below the table on a narrow terminal."""
    beside = console.width >= _WIDE
    headings, body = cells(rows)
    shown = headings if beside else headings[:-1]
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in shown:
        words = heading in ("cache", "verdict")
        found.add_column(
            heading.replace(" ", "\n").replace("/", "/\n"), overflow="fold", no_wrap=not words,
            justify="left" if words else "right", min_width=12 if words else None,
        )  # fmt: skip
    for row, line in zip(rows, body, strict=True):
        found.add_row(*line[: len(shown)], style=_STYLES.get(row.status))
    console.print(found)
    for row in () if beside else rows:
        console.print(
            f" {short_name(row.spec)}: {row.reason}", style=_STYLES.get(row.status), markup=False,
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _print(console: Console, plan: CachePlan, name: str) -> None:
    key, chosen = plan.key, plan.row(plan.spec)
    print_table(console, plan.rows, f"{name}, {key.batch_size} × {key.max_seq_len} tokens")
    console.print(
        f"chosen: {short_name(plan.spec)}, {plan.nbytes / MIB:.2f} MiB ({plan.nbytes:,} bytes): {chosen.reason}",
        style="bold", markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    for note in plan.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    source = "A kept plan; nothing was measured now. " if plan.reused else ""
    measured = max((row.predictions for row in plan.rows), default=0)
    console.print(
        f"{source}MiB: the whole cache, tail, scales and unused slots included. Quality against an fp16 cache on up "
        f"to {measured:,} predictions after {key.settings['cache_quality_prompt_len']} tokens, on text "
        f"{plan.text}; ± is half a 95% confidence interval over windows. Steps: medians at "
        f"{key.settings['cache_auto_bench_prompt_len']} cached tokens, {key.device}, backend "
        f"{key.versions['backend']}.",
        style="dim", markup=False, highlight=False,
    )  # fmt: skip


def _picture(
    rows: Sequence[CandidateRow],
    settings: CachePolicyFields,
    plot: Path | None,
    name: str,
    console: Console,
    *,
    quiet: bool,
) -> None:
    if plot is not None:
        save_plot(rows, settings, plot, f"{name}: quality against bytes")
        if not quiet:
            console.print(f"Written: {plot}.", highlight=False, soft_wrap=True)
