"""Decode steps of a whole model by cache kind: ``python -m caramba_fast.bench.generation.decode_model [--out CSV]``.

A Llama of 8 layers and hidden size 512 with random weights and key biases generates greedily: projections, append,
attention, MLP, logits and sampling, as in `Generator.generate_iter`. The codes of a real prompt are repeated up to the
wanted length, which takes the same time per step as a prompt of that length. All kinds take their steps in turn, in
rounds; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.bench.environment import environment
from caramba_fast.bench.kernels.timing import quantile, ratio
from caramba_fast.bench.out import add_out, check_out, write_table

# Models and caches need pydantic; `report` makes the page without it.
if TYPE_CHECKING:
    from caramba_fast.cache import ModelKVCache
    from caramba_fast.models import Transformer

FILE = "decode_model.csv"
KINDS = ("fp16", "q8", "q8:plain", "q4", "q4:plain", "nf4", "nf4:plain")
LAYERS, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 8, 512, 32, 8, 4096
HEAD_DIMS, BATCHES, CONTEXTS = (64, 128), (1, 8), (1024, 8192, 32768)
#: Tokens of the prompt that is really computed.
PROMPT = 128
#: A sample has as many steps as fp16 does in this time, at most MOST_STEPS.
SAMPLE_S, MOST_STEPS = 0.03, 16
ROUNDS, WARM_UP = 15, 3
#: Kinds measured together get at least LEAST rounds, and more within this time.
BUDGET_S, LEAST = 10.0, 5
#: Caches of more bytes together are measured in groups, with fp16 in each.
MOST_BYTES = 14e9
COLUMNS = (
    "head_dim", "batch", "context", "kind", "layers", "hidden", "heads", "kv_heads", "threads", "samples", "steps",
    "median_ms", "p20_ms", "p80_ms", "tokens_per_s", "vs_fp16", "stored_bytes", "device", "torch", "commit", "source",
)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One model size, batch and length."""

    head_dim: int
    batch: int
    context: int

    @property
    def max_seq_len(self) -> int:
        """Capacity for every step of every round of every group."""
        return self.context + len(KINDS) * (ROUNDS + WARM_UP) * MOST_STEPS


def model(head_dim: int) -> Transformer:
    """A model with random weights; its keys have biases, large on a few channels, as Qwen2's."""
    from caramba_fast.models import ModelConfig, Transformer  # noqa: PLC0415 - see the top

    config = ModelConfig(
        model_type="qwen2", qkv_bias=True, vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=head_dim,
        max_position_embeddings=2 * max(CONTEXTS), initializer_range=0.04,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Transformer(config).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("k_proj.bias"):
            heads = parameter.data.view(KV_HEADS, head_dim)
            heads.normal_()
            heads[:, head_dim // 4] = 8.0
    return made


def lengthen(cache: ModelKVCache, length: int) -> None:
    """Repeats the tokens in a cache until every row has ``length``, in all layers at once.

    Repeats whole groups if keys are quantized per channel; rings are left unchanged.
    """
    pos = cache.pos
    for layer in cache:
        held = pos // layer.group * layer.group
        for stream in layer.streams.values():
            for buffer in (x for x in (stream.codes, stream.scales) if x is not None):
                slots = stream.codes.shape[2] // buffer.shape[2]  # tokens per row of scales
                size, end = held // slots, -(-length // slots)
                for start in range(size, end, size):
                    part = buffer[:, :, start : min(start + size, end)]
                    part.copy_(buffer[:, :, : part.shape[2]])
            if stream.tail is not None:
                stream.tail.nan_to_num_(0.0, 0.0, 0.0)
        layer.lengths.set([length] * layer.batch_size)


class Steps:
    """A generator with one cache kind, ready for decode steps."""

    def __init__(self, of: Transformer, setting: Setting, kind: str) -> None:
        from caramba_fast.infer import Generator  # noqa: PLC0415 - see the top

        self.kind = kind
        self.generator = Generator(
            of,
            cache_kind=kind,
            max_seq_len=setting.max_seq_len,
            max_new_tokens=setting.max_seq_len - setting.context,
            temperature=0,
            ignore_eos=True,
        )
        prompt = torch.randint(0, of.vocab_size, (setting.batch, PROMPT))
        self._iterator: Iterator[int] | Iterator[Tensor] = self.generator.generate_iter(prompt)
        next(self._iterator)
        cache = self.generator.cache
        assert cache is not None
        lengthen(cache, setting.context)
        self.stored = round(cache.bytes_per_token * setting.batch * setting.context)

    def take(self, steps: int) -> float:
        """Takes steps; seconds per step."""
        started = time.perf_counter()
        for _ in range(steps):
            next(self._iterator)
        return (time.perf_counter() - started) / steps


def groups(of: Transformer, setting: Setting, kinds: Sequence[str]) -> list[list[str]]:
    """Groups of the kinds after the first that fit into memory together with the first."""
    from caramba_fast.cache import ModelKVCache  # noqa: PLC0415 - see the top
    from caramba_fast.infer import Generator  # noqa: PLC0415

    sizes = {}
    for kind in kinds:
        configs = Generator(of, cache_kind=kind).config.stream_configs()
        meta = ModelKVCache(
            of.cache_layout, setting.batch, setting.max_seq_len, device="meta", **configs
        )
        sizes[kind] = meta.nbytes
    found: list[list[str]] = [[]]
    for kind in kinds[1:]:
        held = sizes[kinds[0]] + sum(sizes[name] for name in found[-1])
        if found[-1] and held + sizes[kind] > MOST_BYTES:
            found.append([])
        found[-1].append(kind)
    return found


def together(entries: Sequence[Steps], rounds: int) -> tuple[dict[str, dict[int, float]], int]:
    """Takes the kinds in turn, beginning with another in each round: (seconds per step by kind and round, steps)."""
    for entry in entries:
        entry.take(WARM_UP - 1)
    steps = min(MOST_STEPS, max(1, math.ceil(SAMPLE_S / entries[0].take(1))))
    found: dict[str, dict[int, float]] = {entry.kind: {} for entry in entries}
    started = time.monotonic()
    for turn in range(min(rounds, ROUNDS)):
        if turn >= LEAST and time.monotonic() - started > BUDGET_S:
            break
        first = turn % len(entries)
        for entry in (*entries[first:], *entries[:first]):
            found[entry.kind][turn] = entry.take(steps)
    return found, steps


def measure(of: Transformer, setting: Setting, kinds: Sequence[str], rounds: int) -> list[Row]:
    """One row per kind; the first kind is the baseline."""
    base, rows = Steps(of, setting, kinds[0]), []
    for group in groups(of, setting, kinds):
        rows += _group([base, *(Steps(of, setting, kind) for kind in group)], setting, rounds)
    return [row for index, row in enumerate(rows) if index == 0 or row["kind"] != kinds[0]]


def _group(entries: Sequence[Steps], setting: Setting, rounds: int) -> list[Row]:
    found, steps = together(entries, rounds)
    rows: list[Row] = []
    for entry in entries:
        taken = list(found[entry.kind].values())
        median = statistics.median(taken)
        rows.append({
            **vars(setting), "kind": entry.kind, "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS,
            "kv_heads": KV_HEADS, "threads": torch.get_num_threads(), "samples": len(taken), "steps": steps,
            "median_ms": round(median * 1e3, 4), "p20_ms": round(quantile(taken, 0.2) * 1e3, 4),
            "p80_ms": round(quantile(taken, 0.8) * 1e3, 4), "tokens_per_s": round(setting.batch / median, 2),
            "vs_fp16": round(ratio(found[entries[0].kind], found[entry.kind]), 3), "stored_bytes": entry.stored,
        })  # fmt: skip
    return rows


def summary(rows: Sequence[Row]) -> list[str]:
    """One line per setting: tokens per second and the ratio to fp16."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [
        f"| head_dim | batch | context | {' | '.join(kinds)} |",
        "|---:" * (3 + len(kinds)) + "|",
    ]
    settings = dict.fromkeys((row["head_dim"], row["batch"], row["context"]) for row in rows)
    for key in settings:
        found = {
            row["kind"]: f"{float(row['tokens_per_s']):,.1f} ({float(row['vs_fp16']):.2f}×)"
            for row in rows
            if (row["head_dim"], row["batch"], row["context"]) == key
        }
        cells = [*map(str, key), *(found.get(kind, "") for kind in kinds)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def section(rows: Sequence[Row]) -> list[str]:
    """The page's table."""
    if not rows:
        return []
    facts = [f"{name} {rows[0][name]}" for name in ("device", "threads", "torch", "commit")]
    return [
        "## Decode steps of a whole model", "",
        f"From `bench/results/{FILE}`: tokens a second over all rows of the batch, and in brackets how many times as "
        f"many as with an fp16 cache in the same rounds. {LAYERS} layers, hidden size {HIDDEN}, {HEADS} query heads, "
        f"{KV_HEADS} kv heads, random weights with key biases, fp32; sampling included. {'; '.join(facts)}.", "",
        *summary(rows),
    ]  # fmt: skip


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.generation.decode_model", description=__doc__
    )
    add_out(parser, "CSV file to write")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="compared with the first")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no setting after this")  # fmt: skip
    return parser.parse_args(argv)


def _check(chosen: argparse.Namespace) -> None:
    """Raises ValueError for what would fail in the middle of measuring, or after a limit of time unseen."""
    from caramba_fast.config import cache_configs  # noqa: PLC0415 - see the top

    for name, least in (("contexts", PROMPT), ("batches", 1), ("head_dims", 1), ("rounds", 1)):
        given = getattr(chosen, name)
        if any(x < least for x in (given if isinstance(given, (list, tuple)) else [given])):
            raise ValueError(f"{name} is {given}; {least} or more is allowed")
    for kind in chosen.kinds:
        cache_configs(kind)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    started, chosen = time.monotonic(), _arguments(argv)
    check_out([chosen.out], force=chosen.force)
    _check(chosen)
    torch.set_num_threads(chosen.threads or torch.get_num_threads())
    about = environment(torch.device("cpu"))
    rows: list[Row] = []
    # Shortest first, so that a time limit leaves out the slowest.
    listed = [
        Setting(dim, batch, context)
        for context, batch, dim in product(chosen.contexts, chosen.batches, chosen.head_dims)
    ]
    models = {dim: model(dim) for dim in chosen.head_dims}
    for index, setting in enumerate(listed):
        if time.monotonic() - started > chosen.time_limit:
            print(f"decode_model: {len(listed) - index} of {len(listed)} settings left out: "
                  f"{chosen.time_limit:g} s are over")  # fmt: skip
            break
        found = measure(models[setting.head_dim], setting, chosen.kinds, chosen.rounds)
        lines = summary(found)
        print("\n".join(lines if index == 0 else lines[2:]), flush=True)
        rows += [{**row, **about} for row in found]
        if chosen.out:
            write_table(chosen.out, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
