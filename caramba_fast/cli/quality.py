"""``caramba-fast quality``: the quality loss of a model with each cache, measured on text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from caramba_fast.cache import DecoupledLayerShape
from caramba_fast.infer.tokenizer import find_tokenizer
from caramba_fast.models import (
    LanguageModel,
    demo_tokenizer,
    held_out_text,
    load_demo,
)
from caramba_fast.models.checkpoint import dtype_of
from caramba_fast.models.gguf import SUFFIX as GGUF
from caramba_fast.models.hub import local_path
from caramba_fast.models.registry import check_device, load
from caramba_fast.quality import (
    CacheQuality,
    QualityReport,
    RecallFormat,
    cached_forward,
    measure,
)
from caramba_fast.quality.hard import hard_variants
from caramba_fast.quality.needles import Tokenizer, token_ids
from caramba_fast.quality.plot import is_plot, save_plot
from caramba_fast.quality.report import is_report, is_table
from caramba_fast.writing import check_replaceable

#: Caches measured by default, for standard and for decoupled attention.
STANDARD = ("q8", "q8/q4", "q4", "q4:plain", "nf4", "nf4:plain")
DECOUPLED = ("q8", "q4/q8/q4", "q4", "q4:plain", "nf4", "nf4:plain")
DEMO = "demo"
DEFAULT_CONTEXT = 1024
PARTS, TABLE, REPORT, PICTURE = "parts", "quality.csv", "quality.json", "quality.png"


@dataclass(frozen=True)
class Subject:
    """A model with its tokenizer; ``demo`` is the demo model's name, None for a checkpoint."""

    name: str
    model: LanguageModel
    tokenizer: Tokenizer
    demo: str | None


def run_quality(
    name: str,
    text: str | None,
    caches: Sequence[str],
    contexts: Sequence[int],
    out: Path | None,
    *,
    baseline: str,
    tokens: int,
    needles: int,
    device: str,
    dtype: str,
    revision: str | None,
    force: bool,
) -> None:
    """Measures, prints the tables, and writes the files into ``out``.

    Raises ValueError, FileNotFoundError or ModuleNotFoundError for an invalid argument, or a missing file or package.
    """
    console = Console()
    check_device(device)
    if out is not None:
        check_out(out, force=force)
    subject = load_subject(name, device, dtype, revision)
    ids = read_text(subject, text)
    form = _recall_format(subject.tokenizer) if needles else None
    with _progress(console) as progress, _warnings_to(console):
        task = progress.add_task(name, total=None)
        report = measure(
            cached_forward(subject.model),
            caches or _default_caches(subject.model),
            text_ids=ids,
            recall=form,
            contexts=check_contexts(subject.model, contexts),
            tokens=tokens,
            needles=needles,
            baseline=baseline,
            bos_token_id=begin_token(subject),
            folder=None if out is None else out / PARTS,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    report.about["name"] = name
    for context in report.contexts:
        console.print(table(report, context, name))
    _print_notes(console, report)
    if out is not None:
        write(report, out, name, console)


def load_subject(
    name: str, device: str, dtype: str = "float32", revision: str | None = None
) -> Subject:
    """``demo``, ``demo:gqa``, a variant such as ``demo:gqa/outliers-8``, a checkpoint folder, a GGUF file or a Hub id.

    A checkpoint is loaded natively if this package has its architecture, else by transformers.
    """
    weights = dtype_of(dtype)
    kind, _, demo = name.partition(":")
    if kind != DEMO:
        folder = local_path(name, revision)
        if not folder.is_dir() and not (folder.suffix == GGUF and folder.is_file()):
            raise ValueError(
                f"{name!r} is neither a checkpoint folder, a {GGUF} file nor a demo model; known are "
                f"{', '.join(f'{DEMO}:{known}' for known in ('gqa', 'dba'))}"
            )
        text = find_tokenizer(folder)
        if text is None:
            raise FileNotFoundError(f"{folder / 'tokenizer.json'} does not exist")
        return Subject(name, load(folder, device, weights), text.tokenizer, None)
    if revision is not None:
        raise ValueError(f"revision is {revision!r}; demo models have none")
    demo, slash, variant = (demo or "gqa").partition("/")
    variants = hard_variants(demo)
    if not slash:
        model = load_demo(demo, device=device)
    elif variant in variants:
        model = variants[variant]().to(device)
    else:
        raise ValueError(
            f"unknown variant {variant!r} of {DEMO}:{demo}; known are {', '.join(variants)}"
        )
    return Subject(
        name, model if weights is None else model.to(weights), demo_tokenizer(demo), demo
    )


def read_text(subject: Subject, text: str | None) -> np.ndarray:
    """Token ids of the text to measure on: a file, or the demo models' held-out text."""
    if text is None and subject.demo is None:
        raise ValueError(
            f"{subject.name} needs a text to be measured on: --text FILE, of a kind the model is used for "
            f"and has not been trained on (--text {DEMO} takes the demo models' Python source)"
        )
    if text is None or text == DEMO:
        content = held_out_text()
    elif not Path(text).is_file():
        raise FileNotFoundError(f"--text {text} is not a file; give one, or '{DEMO}'")
    else:
        try:
            content = Path(text).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {text} is not UTF-8 text: {error}") from error
    ids = token_ids(subject.tokenizer, content)
    if len(ids) and int(ids.max()) >= subject.model.vocab_size:
        raise ValueError(
            f"the tokenizer of {subject.name} gives token {int(ids.max())}; the model knows "
            f"{subject.model.vocab_size}: they do not belong together"
        )
    return ids


def begin_token(subject: Subject) -> int | None:
    """The token that the subject's tokenizer puts first, if any."""
    first = token_ids(subject.tokenizer, "", special=True)
    return int(first[0]) if len(first) == 1 else None


def longest(model: LanguageModel) -> int | None:
    """The model's maximum context length in tokens; None if it does not say, as models with ALiBi."""
    found: int | None = getattr(model, "trained_positions", None)
    return found


def check_contexts(model: LanguageModel, contexts: Sequence[int]) -> list[int]:
    """The given contexts, or the default one; raises if the model does not support them."""
    most = longest(model)
    wrong = [
        context for context in contexts if context < 2 or (most is not None and context > most)
    ]
    if wrong:
        allowed = (
            "2 or more" if most is None else f"2 to {most} (the model's max_position_embeddings)"
        )
        raise ValueError(f"context is {wrong[0]}; {allowed} is allowed")
    return list(dict.fromkeys(contexts)) or [min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)]


def _default_caches(model: LanguageModel) -> Sequence[str]:
    return DECOUPLED if isinstance(model.cache_layout[0], DecoupledLayerShape) else STANDARD


def _recall_format(tokenizer: Tokenizer) -> RecallFormat:
    try:
        return RecallFormat.of(tokenizer)
    except ValueError as error:
        raise ValueError(f"{error} (--needles 0)") from error


@contextmanager
def _warnings_to(console: Console) -> Iterator[None]:
    """Shows warnings as plain lines above the progress bar."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(
            f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )
        yield


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True)


def table(report: QualityReport, context: int, name: str) -> Table:
    """The figures of all caches at one context."""
    rows = [row for row in report.rows if row.context == context]
    found = Table(
        title=f"{name}, context {context}", title_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    found.add_column("cache", overflow="fold", min_width=12)
    headings = ["bytes/\ntoken", "PPL\nratio", "KL\nmnat", "KL p99\nmnat", "same\ntop-1", "accept"]
    if rows[0].needles:
        headings.append("needles\nfound")
    for heading in headings:
        found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row.kind} *" if row.pareto else row.kind,
            f"{row.cache_bytes_per_token:.0f}",
            f"{row.ppl_ratio:.4f}" if row.ppl_ratio < 10 else f"{row.ppl_ratio:.1f}",
            _thousandths(row, "mean_kl"),
            _three_digits(1000 * row.p99_kl),
            f"{row.top1_agreement:.1%}",
            f"{row.acceptance:.1%}",
        ]
        if rows[0].needles:
            cells.append(f"{row.recall:.1%}")
        found.add_row(*cells)
    return found


def _thousandths(row: CacheQuality, figure: str) -> str:
    """A figure in thousandths ± half its interval, rounded to two digits of the latter."""
    value, (low, high) = 1000 * getattr(row, figure), row.ci[figure]
    half = 500 * (high - low)
    if not math.isfinite(half) or half == 0:
        return f"{value:.3g}"
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{value:.{min(digits, 2)}f}±{half:.{min(digits, 2)}f}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _print_notes(console: Console, report: QualityReport) -> None:
    base = report.rows[0]
    needles = f" and {base.needles:,} needles" if base.needles else ""
    console.print(
        f"Against {base.kind}, on {base.tokens:,} predictions in {base.windows} windows of text{needles}, at each "
        "context; ± is half a 95% confidence interval over windows (all intervals are in the CSV). Bytes: a whole "
        "cache of the context, divided by its tokens. mnat: thousandths of a nat. accept: share of drafted tokens "
        "speculative sampling would keep. *: no other cache is both smaller and closer to the baseline.",
        style="dim",
        highlight=False,
    )


def check_out(out: Path, *, force: bool) -> None:
    """Raises FileExistsError if a file of another kind has the name of an output file."""
    for name, what, is_one in (
        (TABLE, "table", is_table), (REPORT, "report", is_report), (PICTURE, "picture", is_plot),
    ):  # fmt: skip
        check_replaceable(out / name, what, is_one, force=force)


def write(report: QualityReport, out: Path, name: str, console: Console) -> None:
    """Writes the report's files and prints what they are."""
    report.to_csv(out / TABLE)
    report.to_json(out / REPORT)
    files: list[Any] = [out / TABLE, out / REPORT]
    try:
        save_plot(report, out / PICTURE, name)
        files.append(out / PICTURE)
    except ModuleNotFoundError as error:
        console.print(f"no picture: {error}", style="yellow", markup=False)
    console.print(f"Written: {', '.join(map(str, files))}.", highlight=False, soft_wrap=True)
    console.print(
        f"Finished parts are in {out / PARTS}: another run into this folder only measures what is new.",
        style="dim", highlight=False, soft_wrap=True,
    )  # fmt: skip
