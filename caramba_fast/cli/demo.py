"""``caramba-fast demo``: the trained demo model through each cache kind, in one table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from caramba_fast.infer import GenerationMetrics, Generator
from caramba_fast.models import Transformer, demo_tokenizer, held_out_text, load_demo
from caramba_fast.ops import backends
from caramba_fast.quality import (
    CacheQuality,
    RecallFormat,
    compare_caches,
    draw_needles,
    retrieval_rate,
)

KINDS = ("fp16", "q8", "q4", "nf4")
PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a text file as a list of strings."""
    with open(path, encoding=encoding) as'''
CONTEXT_TOKENS = 512
WINDOW = 1024
NEEDLE_DISTANCE, NEEDLES = 1024, 32


@dataclass(frozen=True)
class DemoRow:
    """Everything the table shows of one cache kind."""

    kind: str
    text: str
    metrics: GenerationMetrics
    quality: CacheQuality
    recall: float


def write_with(
    model: Transformer, tokenizer: Tokenizer, prompt: list[int], kind: str, new_tokens: int
) -> tuple[str, GenerationMetrics]:
    """Greedy continuation of the prompt and what it took."""
    generator = Generator(model, cache_kind=kind, temperature=0.0, max_new_tokens=new_tokens)
    generator.generate([prompt])  # allocates, warms up
    generator.reset()
    output = generator.generate([prompt])[0, len(prompt) :].tolist()
    assert generator.metrics is not None
    return tokenizer.decode(output), generator.metrics


def run_demo(quality_tokens: int, new_tokens: int, console: Console | None = None) -> list[DemoRow]:
    """Measures every kind, prints continuations and the table, and returns the rows."""
    console = console or Console()
    model, tokenizer = load_demo(), demo_tokenizer()
    held_out = np.asarray(tokenizer.encode(held_out_text()).ids)
    question = tokenizer.encode(PROMPT).ids
    prompt = held_out[:CONTEXT_TOKENS].tolist() + tokenizer.encode("\n\n").ids + question
    windows = max(1, min(quality_tokens, len(held_out)) // WINDOW)
    ids = torch.from_numpy(held_out[: windows * WINDOW].reshape(windows, WINDOW))
    needles = draw_needles(RecallFormat.of(tokenizer), held_out, NEEDLE_DISTANCE, NEEDLES)
    rows = []
    with _progress(console) as progress:
        task = progress.add_task("quality on held-out text", total=2 * len(KINDS) + 1)
        qualities = compare_caches(model, ids, KINDS)
        progress.advance(task)
        for kind, quality in zip(KINDS, qualities, strict=True):
            progress.update(task, description=f"{kind}: writing")
            text, metrics = write_with(model, tokenizer, prompt, kind, new_tokens)
            progress.advance(task)
            progress.update(task, description=f"{kind}: needles")
            recall = retrieval_rate(model, needles, kind)
            progress.advance(task)
            rows.append(DemoRow(kind, text, metrics, quality, recall))
    _print_texts(console, rows)
    console.print(_table(rows, len(prompt)))
    _print_notes(console, model, windows)
    return rows


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _print_texts(console: Console, rows: list[DemoRow]) -> None:
    console.print("[bold]Prompt[/bold] (after 512 tokens of other code)")
    console.print(escape(PROMPT), style="dim", highlight=False)
    for row in rows:
        console.print(f"\n[bold]{row.kind}[/bold] continues")
        console.print(escape(row.text.rstrip()), highlight=False)
    console.print()


def _table(rows: list[DemoRow], prompt_tokens: int) -> Table:
    table = Table(title=f"One model, {len(rows)} caches", title_justify="left")
    table.add_column("cache")
    for heading in (
        "bytes/\ntoken", "of\nfp16", "cache\nMiB", "first token\nms", "tokens/s", "ΔNLL\nnats",
        "perplexity\nratio", "same\ntop token", "needles\nfound",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    base = rows[0].metrics.bytes_per_token
    for row in rows:
        m, q = row.metrics, row.quality
        table.add_row(
            row.kind,
            f"{m.bytes_per_token:.0f}",
            f"{m.bytes_per_token / base:.1%}",
            f"{m.cache_bytes / 2**20:.2f}",
            f"{1000 * m.ttft_s:.0f}",
            f"{m.decode_tokens_per_s:.0f}",
            f"{q.delta_nll:+.4f}",
            f"{q.ppl_ratio:.4f}",
            f"{q.top1_agreement:.1%}",
            f"{row.recall:.0%}",
        )
    table.caption = f"first token and tokens/s: after a prompt of {prompt_tokens} tokens, batch 1"
    table.caption_justify = "left"
    return table


def _print_notes(console: Console, model: Transformer, windows: int) -> None:
    attention = next(s for s in backends() if s.op == "decode_attention" and s.device == "cpu")
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"Model: {size / 1e6:.1f}M parameters, trained on Python's standard library. ΔNLL, perplexity "
        f"and top token: {windows * WINDOW:,} tokens of held-out source, against the fp16 cache. "
        f"Needles: a line {NEEDLE_DISTANCE} tokens back, {NEEDLES} trials.\n"
        f"Attention over the cache ran on: {attention.runs}.",
        style="dim",
        highlight=False,
    )
