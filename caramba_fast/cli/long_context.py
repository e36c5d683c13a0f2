"""The long-context part of ``caramba-fast demo``: transformers with its own cache and with this package's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from caramba_fast.models import held_out_text
from caramba_fast.quality.plot import new_figure, write_figure

CONTEXTS, CACHES = (512, 8192, 32768), ("q8", "q4")
STOCK = "DynamicCache"
ROUNDS = 2
#: SmolLM2-135M's shape. The time of a step depends only on the shape, so the weights may be random.
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
SHAPE_NAME = "Llama of 30 layers, hidden size 576, 3 kv heads of 64 (SmolLM2-135M's shape, random weights), bf16"
#: Where `make real` puts the model, relative to the working directory.
REAL = Path("runs/models/smollm2")
PROMPT_TOKENS, NEW_TOKENS = 2048, 24
MIB = 2**20


@dataclass(frozen=True)
class LongRow:
    """A line of a table.

    Attributes:
        context: tokens cached before the step.
        cache: its name.
        tokens_per_s: speed of single steps, batch 1.
        nbytes: bytes of the whole cache.
        text: the generated text; "" if there is none.
    """

    context: int
    cache: str
    tokens_per_s: float
    nbytes: int
    text: str = ""


def missing() -> str | None:
    """A missing requirement of this part, or None."""
    return None if find_spec("transformers") else "transformers"


def measure_steps(say: Callable[[str], None]) -> list[LongRow]:
    """Times single steps with caches of `CONTEXTS` tokens, in turn; the caches are filled without a forward pass."""
    bench: Any = import_module("caramba_fast.bench.generation.hf_decode")
    transformers: Any = import_module("transformers")
    say("long contexts: building the model")
    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=2 * max(CONTEXTS))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    states = bench.prompt_states(model)
    rows = []
    for context in CONTEXTS:
        say(f"long contexts: {context:,} tokens")
        entries = [
            e
            for e in bench.filled(model, states, context, CACHES)
            if e.name in ("dynamic", *CACHES)
        ]
        bench.measure(model, entries, ROUNDS, float("inf"))
        for entry in entries:
            name = STOCK if entry.name == "dynamic" else entry.name
            rows.append(
                LongRow(
                    context,
                    name,
                    1 / bench.quantile(entry.steps, 0.5),
                    bench.cache_bytes(entry.cache),
                )
            )
    return rows


def measure_real(folder: Path, say: Callable[[str], None]) -> list[LongRow]:
    """Runs `generate` of a real model after `PROMPT_TOKENS` of held-out text, with each cache."""
    from caramba_fast.hf import accelerate, restore  # noqa: PLC0415 - needs transformers
    from caramba_fast.hf.compat import CACHE  # noqa: PLC0415

    transformers: Any = import_module("transformers")
    bench: Any = import_module("caramba_fast.bench.generation.hf_decode")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = tokenizer(held_out_text()[:16384], return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
    rows = []
    for cache in (STOCK, *CACHES):
        say(f"{folder.name}: {cache} after {ids.shape[1]:,} tokens of text")
        clock = _Clock()
        if cache != STOCK:
            accelerate(model, cache)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            do_sample=False, return_dict_in_generate=True, streamer=clock,
        )  # fmt: skip
        restore(model)
        text = tokenizer.decode(out.sequences[0, ids.shape[1] :])
        rows.append(LongRow(ids.shape[1], cache, clock.rate, bench.cache_bytes(out[CACHE]), text))
    return rows


class _Clock:
    """A streamer that records the time of each token, and first that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing."""

    @property
    def rate(self) -> float:
        """Median tokens per second after the first token."""
        steps = sorted(b - a for a, b in zip(self.times[1:], self.times[2:], strict=False))
        return 1 / steps[len(steps) // 2]


def show(console: Console, title: str, rows: Sequence[LongRow]) -> None:
    """Prints the table of one model, and each distinct text once."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("context", justify="right")
    table.add_column("cache")
    for heading in ("tok/s", "× stock", "MiB", "of stock"):
        table.add_column(heading, justify="right")
    for context in dict.fromkeys(row.context for row in rows):
        found = [row for row in rows if row.context == context]
        stock = next(row for row in found if row.cache == STOCK)
        for row in found:
            table.add_row(
                f"{context:,}" if row is found[0] else "", row.cache, f"{row.tokens_per_s:.1f}",
                f"{row.tokens_per_s / stock.tokens_per_s:.2f}", f"{row.nbytes / MIB:.1f}",
                f"{row.nbytes / stock.nbytes:.0%}",
            )  # fmt: skip
    console.print(table)


def plot(path: Path, rows: Sequence[LongRow]) -> None:
    """Writes the plot: tokens per second and MiB against context."""
    figure = new_figure(8.0, 3.6)
    speed, size = figure.subplots(1, 2)
    for name in dict.fromkeys(row.cache for row in rows):
        line = [row for row in rows if row.cache == name]
        contexts = [row.context for row in line]
        colour = "black" if name == STOCK else None
        speed.plot(contexts, [row.tokens_per_s for row in line], "o-", label=name, color=colour)
        size.plot(contexts, [row.nbytes / MIB for row in line], "o-", label=name, color=colour)
    for axis, label in ((speed, "tokens a second"), (size, "MiB of the cache")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens of context")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    speed.legend()
    write_figure(figure, path)


def run_long_context(
    console: Console, say: Callable[[str], None], pause: Callable[[], None], picture: Path | None
) -> None:
    """Measures, prints and plots this part to ``picture`` (.png or .svg; its folder is created).

    ``say`` is called with progress messages, ``pause`` before anything is printed.
    """
    rows = measure_steps(say)
    written = measure_real(REAL, say) if (REAL / "config.json").is_file() else []
    pause()
    show(console, SHAPE_NAME, rows)
    notes = f"Single steps of transformers with filled caches, batch 1, median of {ROUNDS} interleaved rounds."
    console.print(
        f"{notes} At short contexts a cache costs next to nothing.", style="dim", highlight=False
    )
    if written:
        show(
            console,
            f"\n{REAL.name}, {NEW_TOKENS} tokens after real text, model.generate()",
            written,
        )
        for text in dict.fromkeys(row.text for row in written):
            names = " and ".join(row.cache for row in written if row.text == text)
            console.print(f"[bold]{names}[/bold]: {escape(repr(text))}", highlight=False)
    if picture is not None:
        plot(picture, rows)
        console.print(f"Written: {picture}.", highlight=False, soft_wrap=True)
