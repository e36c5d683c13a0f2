"""``caramba-fast demo``: runs the demo models with each cache kind; one table per model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from caramba_fast.cache import DecoupledLayerShape, LayerShape
from caramba_fast.cli.long_context import missing, run_long_context
from caramba_fast.infer import GenerationMetrics, Generator
from caramba_fast.models import Transformer, demo_path, demo_tokenizer, held_out_text, load_demo
from caramba_fast.ops import backends
from caramba_fast.quality import (
    CacheQuality,
    RecallFormat,
    cache_size,
    compare_caches,
    draw_needles,
    retrieval_rate,
)
from caramba_fast.quality.plot import check_plot, is_plot
from caramba_fast.quality.text import cut_windows
from caramba_fast.writing import check_replaceable

#: Demo model -> its description and the caches it is run with; the first cache is the baseline.
SHOWN = {
    "gqa": ("standard attention (GQA)", ("fp16", "q8", "q4", "q4:plain", "nf4")),
    "dba": ("decoupled attention (DBA)", ("fp16", "q8", "q4", "q4:plain", "q4/q8/q4")),
}
PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a text file as a list of strings."""
    with open(path, encoding=encoding) as'''
CONTEXT_TOKENS = 512
WINDOW = 1024
NEEDLE_DISTANCE, NEEDLES = 1024, 16
ROUNDS = 3
#: A layer of width 2048 with 16 heads, and the widths of decoupled attention.
WIDTH, HEADS = 2048, 16
LAYER_SHAPES = (
    ("standard, K and V of 2048", LayerShape(WIDTH, WIDTH, HEADS), ("fp16", "q8", "q4")),
    (
        "DBA: sem 128, geo 256, V 256",
        DecoupledLayerShape(128, 256, 256, HEADS),
        ("fp16", "q8", "q4/q8/q4"),
    ),
)


@dataclass(frozen=True)
class DemoRow:
    """A row of the table: one cache kind."""

    kind: str
    text: str
    metrics: GenerationMetrics
    quality: CacheQuality
    recall: float


@dataclass(frozen=True)
class Written:
    """Greedy continuation of the prompt, and the metrics of its generation."""

    text: str
    metrics: GenerationMetrics


def write_with_each(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: list[int],
    kinds: Sequence[str],
    new_tokens: int,
    advance: Callable[[], None],
) -> dict[str, Written]:
    """Generates ROUNDS times with every kind, in turn, so that other load slows all of them alike."""
    runs: dict[str, list[Written]] = {kind: [] for kind in kinds}
    for index in range(ROUNDS + 1):
        for kind in kinds:
            generator = Generator(model, cache=kind, temperature=0.0, max_new_tokens=new_tokens)
            rows: Any = generator.generate([prompt])
            output = rows[0, len(prompt) :].tolist()
            assert generator.metrics is not None
            if index:  # the first round warms up
                runs[kind].append(Written(tokenizer.decode(output), generator.metrics))
        advance()
    return {kind: _median(found) for kind, found in runs.items()}


def _median(runs: Sequence[Written]) -> Written:
    """The run of median speed, with the median time to the first token."""
    middle = sorted(runs, key=lambda run: run.metrics.decode_tokens_per_s)[len(runs) // 2]
    ttft = statistics.median(run.metrics.ttft_s for run in runs)
    return replace(middle, metrics=replace(middle.metrics, ttft_s=ttft))


def measure_model(
    name: str, quality_tokens: int, new_tokens: int, progress: Progress
) -> tuple[list[DemoRow], Transformer, int]:
    """All rows of one demo model, the model, and the number of prompt tokens."""
    kinds = SHOWN[name][1]
    model, tokenizer = load_demo(name), demo_tokenizer(name)
    held_out = np.asarray(tokenizer.encode(held_out_text()).ids)
    context = held_out[:CONTEXT_TOKENS].tolist()
    prompt = context + tokenizer.encode("\n\n" + PROMPT).ids
    ids = torch.from_numpy(cut_windows(held_out[None, : max(quality_tokens, WINDOW)], WINDOW))
    needles = draw_needles(RecallFormat.of(tokenizer), held_out, NEEDLE_DISTANCE, NEEDLES)
    task = progress.add_task(f"{name}: held-out text", total=2 + ROUNDS + len(kinds))
    qualities = compare_caches(model, ids, kinds)
    progress.update(task, advance=1, description=f"{name}: writing")
    written = write_with_each(
        model, tokenizer, prompt, kinds, new_tokens, lambda: progress.advance(task)
    )
    rows = []
    for kind, quality in zip(kinds, qualities, strict=True):
        progress.update(task, description=f"{name} {kind}: needles")
        recall = retrieval_rate(model, needles, kind)
        rows.append(DemoRow(kind, written[kind].text, written[kind].metrics, quality, recall))
        progress.advance(task)
    return rows, model, len(prompt)


def run_demo(
    quality_tokens: int,
    new_tokens: int,
    *,
    long_context: bool = False,
    picture: Path | None = None,
) -> dict[str, list[DemoRow]]:
    """Measures every model and kind, prints the tables, and returns the rows by model.

    With ``long_context`` it also runs transformers with its own cache and with this package's, and plots that to
    ``picture`` (.png or .svg).
    """
    demo_path()  # raises with instructions if the models are missing
    if picture is not None:
        if not long_context or missing():
            raise ValueError(
                "--plot draws long contexts beside transformers: it goes with --long-context"
                + (f", and needs: pip install {missing()}" if missing() else "")
            )
        picture.parent.mkdir(parents=True, exist_ok=True)
        check_plot(picture)
        check_replaceable(picture, "picture", is_plot)
    console = Console()
    with _progress(console) as progress:
        measured = {
            name: measure_model(name, quality_tokens, new_tokens, progress) for name in SHOWN
        }
    console.print("[bold]Prompt[/bold] (after 512 tokens of other code)")
    console.print(escape(PROMPT), style="dim", highlight=False)
    for name, (rows, model, prompt_tokens) in measured.items():
        _print_texts(console, name, rows)
        console.print(_table(name, rows, model, prompt_tokens))
    console.print(_compression_table())
    _print_notes(console, next(iter(measured.values()))[0])
    if long_context:
        _show_long_context(console, picture)
    return {name: rows for name, (rows, _, _) in measured.items()}


def _show_long_context(console: Console, picture: Path | None) -> None:
    console.print()
    lacking = missing()
    if lacking:
        console.print(
            f"Long contexts beside stock transformers: pip install {lacking}", highlight=False
        )
        return
    with _progress(console) as progress:
        task = progress.add_task("long contexts", total=None)
        run_long_context(
            console, lambda words: progress.update(task, description=words), progress.stop, picture
        )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _print_texts(console: Console, name: str, rows: list[DemoRow]) -> None:
    """Prints each distinct continuation once, with the caches that gave it."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row.text, []).append(row.kind)
    for text, writers in kinds.items():
        console.print(f"\n[bold]{name}[/bold], {' and '.join(writers)}:")
        console.print(escape(text.rstrip()), highlight=False)
    console.print()


def _table(name: str, rows: list[DemoRow], model: Transformer, prompt_tokens: int) -> Table:
    size = sum(parameter.numel() for parameter in model.parameters())
    title = f"{SHOWN[name][0]}, {size / 1e6:.1f}M parameters"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    for heading in (
        "bytes/\ntoken", "of\nfp16", "MiB", "first\nms", "tok/s", "ΔNLL\nnats",
        "PPL\nratio", "same\ntop-1", "needle\nfound",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    base = rows[0].metrics.bytes_per_token
    for row in rows:
        m, q = row.metrics, row.quality
        table.add_row(
            row.kind,
            f"{m.bytes_per_token:.0f}",
            f"{m.bytes_per_token / base:.0%}",
            f"{m.cache_bytes / 2**20:.2f}",
            f"{1000 * m.ttft_s:.0f}",
            f"{m.decode_tokens_per_s:.0f}",
            f"{q.delta_nll:+.4f}",
            f"{q.ppl_ratio:.4f}",
            f"{q.top1_agreement:.1%}",
            f"{row.recall:.0%}",
        )
    table.caption = f"first: time to first token; with tok/s after {prompt_tokens} prompt tokens, median of {ROUNDS}"
    table.caption_justify = "left"
    return table


def _compression_table() -> Table:
    """Actual bytes of one layer's caches, counted on allocated caches."""
    title = f"Cache of one layer of {HEADS} heads"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("attention")
    table.add_column("cache")
    table.add_column("bytes/token", justify="right")
    table.add_column("reduction", justify="right")
    base = 0.0
    for label, shape, kinds in LAYER_SHAPES:
        for kind in kinds:
            size = cache_size([shape], kind, 128).bytes_per_token
            base = base or size
            table.add_row(label, kind, f"{size:.0f}", f"{base / size:.1f}x")
            label = ""  # noqa: PLW2901
    return table


def _print_notes(console: Console, rows: list[DemoRow]) -> None:
    attention = next(s for s in backends() if s.op == "decode_attention" and s.device == "cpu")
    console.print(
        f"ΔNLL, perplexity and top token: {rows[0].quality.tokens:,} predictions on Python source the "
        f"models have not seen, against the fp16 cache. Needles: a line {NEEDLE_DISTANCE} tokens back, "
        f"{NEEDLES} trials. Attention over the cache ran on: {attention.runs}.",
        style="dim",
        highlight=False,
    )
