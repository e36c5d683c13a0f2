"""Decode steps of a transformers Llama by cache.

``python -m caramba_fast.bench.generation.hf_decode [--publish] [--quick]``

A Llama of 8 layers and hidden size 512 with random weights takes single tokens through its own ``forward``, as in
``generate``: with transformers' DynamicCache, with its quantized caches where their packages are installed (``make
bench-hf`` brings them), and with ours. Caches hold the keys and values of a real prompt, repeated up to the wanted
length. All take their steps in turn, in rounds; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.environment import environment
from caramba_fast.bench.kernels.timing import quantile, ratio
from caramba_fast.bench.out import check_out, write_table
from caramba_fast.bench.pages.hf_page import FILE, PAGE, PART, lines_of
from caramba_fast.bench.pages.sections import add_targets, finish, results_at
from caramba_fast.hf import CarambaCache, accelerate, restore
from caramba_fast.hf.compat import CACHE

#: Imported by name, since the package itself may import it in one layer only.
transformers = import_module("transformers")

LAYERS, HIDDEN, HEADS, VOCABULARY = 8, 512, 8, 4096
KV_HEADS, DTYPES = (2, 8), (torch.float32, torch.bfloat16)
#: 64 is the baseline of the other lengths: a model's own speed, with almost no cache.
CONTEXTS = (64, 512, 2048, 8192, 32768)
OURS = ("q8", "q4", "nf4", "bf16")
#: Package and nbits of transformers' quantized caches.
THEIRS = {
    "quanto4": ("optimum.quanto", 4),
    "hqq4": ("hqq", 4),
    "hqq8": ("hqq", 8),
    "fp8": (None, None),
}
PROMPT = 128
ROUNDS, STEPS, BUDGET_S = 15, 4, 40.0
#: Capacity of our caches beyond the context, so that they do not grow while steps are timed.
ROOM = (ROUNDS + 1) * (STEPS + 1)
COLUMNS = (
    "kv_heads", "dtype", "context", "cache", "samples", "median_ms", "p20_ms", "p80_ms", "tokens_per_s",
    "vs_dynamic", "cache_bytes", "dequantizations", "threads", "transformers", "device", "torch", "triton", "commit",
    "source",
)  # fmt: skip
Row = dict[str, Any]


@dataclass
class Entry:
    """A filled cache with its timings.

    Attributes:
        cache: a cache of transformers or ours.
        ours: whether the model is accelerated for its steps.
        attention: the model's attention during its steps, if it is not its own.
        rounds: median seconds a step, by round.
        steps: seconds of every step.
    """

    name: str
    cache: Any
    ours: bool
    attention: str | None = None
    rounds: dict[int, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)


def model_of(kv_heads: int, dtype: torch.dtype) -> Any:
    """The model with random weights."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=HIDDEN * 11 // 4, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, vocab_size=VOCABULARY,
        max_position_embeddings=2 * max(CONTEXTS),
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


@torch.no_grad()
def prompt_states(model: Any, ids: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (1, H_kv, T, D) of every layer for tokens ``ids`` (1, T), by default `PROMPT` random ones."""
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.randint(VOCABULARY, (1, PROMPT)) if ids is None else ids
    model(input_ids=ids.to(model.device), use_cache=True, **{CACHE: cache})
    return [(layer.keys, layer.values) for layer in cache.layers]


def caches(
    model: Any, context: int, ours: Sequence[str] = OURS, theirs: Sequence[str] | None = None
) -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """(name, whether it is ours, factory) of each cache; ``theirs`` names some of `THEIRS`, by default all."""
    yield "dynamic", False, lambda: transformers.DynamicCache(config=model.config)
    for kind in ours:
        yield kind, True, lambda kind=kind: CarambaCache(model, kind, max_seq_len=context + ROOM)
    for name, (package, bits) in THEIRS.items():
        if theirs is not None and name not in theirs:
            continue
        if package is None or find_spec(package.partition(".")[0]):
            backend = name.rstrip("48") if package else "fp8"
            more = {} if bits is None else {"nbits": bits}
            yield (
                name,
                False,
                lambda b=backend, m=more: transformers.QuantizedCache(b, model.config, **m),
            )


@torch.no_grad()
def filled(
    model: Any,
    states: list[tuple[Tensor, Tensor]],
    context: int,
    ours: Sequence[str] = OURS,
    theirs: Sequence[str] | None = None,
) -> list[Entry]:
    """Every cache that can be made here, holding ``context`` tokens."""
    entries = []
    for name, is_ours, make in caches(model, context, ours, theirs):
        try:
            entries.append(Entry(name, holding(make(), states, context), is_ours))
        except (ImportError, ValueError, RuntimeError) as error:
            print(f"  {name}: does not run here: {error}", flush=True)
    return entries


@torch.no_grad()
def holding(cache: Any, states: list[tuple[Tensor, Tensor]], context: int) -> Any:
    """The cache, filled with ``context`` tokens: the states of a prompt, repeated."""
    for index, pair in enumerate(states):
        k, v = (x.repeat(1, 1, -(-context // x.shape[2]), 1)[:, :, :context] for x in pair)
        cache.update(k, v, index)
    return cache


@torch.no_grad()
def take_steps(model: Any, entry: Entry, count: int) -> list[float]:
    """Seconds of each of ``count`` steps, after one that is not counted."""
    if entry.ours:
        accelerate(model, entry.name)
    own = model.config._attn_implementation
    if entry.attention is not None:
        model.set_attn_implementation(entry.attention)
    token, taken = torch.tensor([[5]], device=model.device), []
    try:
        for _ in range(count + 1):
            started = time.perf_counter()
            # The token is read, as in generate, which waits for asynchronous work.
            out = model(input_ids=token, past_key_values=entry.cache, use_cache=True)
            out.logits.argmax(-1).item()
            taken.append(time.perf_counter() - started)
    finally:  # out of memory: the others go on
        restore(model)
        if entry.attention is not None:
            model.set_attn_implementation(own)
    return taken[1:]


def measure(model: Any, entries: list[Entry], rounds: int, budget_s: float) -> None:
    """Rounds in which every cache takes its steps; the first is a warm-up."""
    started = time.perf_counter()
    for number in range(-1, rounds):
        for entry in entries:
            taken = take_steps(model, entry, STEPS)
            if number >= 0:
                entry.steps += taken
                entry.rounds[number] = statistics.median(taken)
        if number >= 4 and time.perf_counter() - started > budget_s:
            return


def cache_bytes(cache: Any) -> int:
    """Stored bytes, scales and not yet quantized tokens included."""
    if isinstance(cache, CarambaCache):
        return cache.nbytes
    return sum(_bytes_in(vars(layer)) for layer in cache.layers)


def _bytes_in(x: Any) -> int:
    """Bytes of the tensors in nested containers and tensor subclasses."""
    if isinstance(x, dict):
        return sum(map(_bytes_in, x.values()))
    if isinstance(x, (list, tuple)):
        return sum(map(_bytes_in, x))
    if hasattr(x, "__tensor_flatten__") and type(x) is not Tensor:
        return sum(_bytes_in(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.nbytes if isinstance(x, Tensor) else 0


def rows_of(kv_heads: int, dtype: torch.dtype, context: int, entries: list[Entry]) -> list[Row]:
    """The rows of one setting."""
    about = environment(torch.device("cpu"))
    base = entries[0]
    found = []
    for entry in entries:
        median = quantile(entry.steps, 0.5)
        found.append(
            {
                "kv_heads": kv_heads,
                "dtype": str(dtype).removeprefix("torch."),
                "context": context,
                "cache": entry.name,
                "samples": len(entry.steps),
                "median_ms": f"{1e3 * median:.3f}",
                "p20_ms": f"{1e3 * quantile(entry.steps, 0.2):.3f}",
                "p80_ms": f"{1e3 * quantile(entry.steps, 0.8):.3f}",
                "tokens_per_s": f"{1 / median:.1f}",
                "vs_dynamic": f"{ratio(base.rounds, entry.rounds):.3f}",
                "cache_bytes": cache_bytes(entry.cache),
                "dequantizations": getattr(entry.cache, "dequantizations", ""),
                "threads": torch.get_num_threads(),
                "transformers": transformers.__version__,
                **about,
            }
        )
    return found


def main() -> None:
    """Measures every setting and writes each row at once."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    add_targets(parser, "the CSV file to write")
    parser.add_argument("--quick", action="store_true", help="two lengths, few rounds")
    parser.add_argument("--contexts", type=int, nargs="*", help=f"by default {CONTEXTS}")
    parser.add_argument("--kv-heads", type=int, nargs="*", default=KV_HEADS)
    options = parser.parse_args()
    check_out([options.out], force=options.force)
    with results_at(options, FILE) as path:
        if not options.page_only:
            run(options, path)
        finish(options, {PART: lines_of(path)}, PAGE)


def run(options: argparse.Namespace, path: Path) -> None:
    """Measures the chosen settings into the file."""
    contexts = options.contexts or ((512, 2048) if options.quick else CONTEXTS)
    rounds, budget = (5, 8.0) if options.quick else (ROUNDS, BUDGET_S)
    rows: list[Row] = []
    for kv_heads, dtype in product(options.kv_heads, DTYPES):
        model = model_of(kv_heads, dtype)
        states = prompt_states(model)
        for context in contexts:
            entries = filled(model, states, context)
            measure(model, entries, rounds, budget)
            found = rows_of(kv_heads, dtype, context, entries)
            rows += found
            write_table(path, COLUMNS, rows)
            for row in found:
                print(
                    *(row[name] for name in COLUMNS[:4]),
                    f"{row['tokens_per_s']} tokens/s, {row['vs_dynamic']} × dynamic", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
