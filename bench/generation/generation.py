"""Whole generations: ``python -m caramba_fast.bench.generation.generation [--publish] [--only PART ...]``.

Three parts, each with a file under ``bench/results`` and a table in ``docs/inference.md``: the speedup of a cache
(tokens per second with and without one, by length), its size (bytes beside the usual formulas), and the share of a
decode step outside the model's forward pass (`generation_overhead`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.environment import details, environment
from caramba_fast.bench.generation import generation_bytes, generation_overhead
from caramba_fast.bench.kernels.timing import ratio
from caramba_fast.bench.out import check_out, write_details, write_table
from caramba_fast.bench.pages import generation_page
from caramba_fast.bench.pages.sections import add_targets, finish, results_at
from caramba_fast.infer import Generator
from caramba_fast.models import Transformer, demo_tokenizer, held_out_text, load_demo

#: Written into the details beside the results.
COMMAND = "generation.generation"
PARTS = ("steps", "bytes", "overhead")
FILES = {"steps": "generation.csv", "bytes": "generation_bytes.csv", "overhead": "overhead.csv"}
LENGTHS, TEXTS = (64, 128, 256, 512, 1024, 2000), (64, 256, 512)
CACHES = ("fp16", "q4")
ROUNDS, TEXT_ROUNDS, STEPS, WARM_UP, PROMPT = 7, 3, 4, 2, 16
NONE = "none"
COLUMNS = (
    "what", "length", "cache", "rounds", "median_ms", "tokens_per_s", "times_no_cache", "threads", "device", "torch",
    "commit", "source",
)  # fmt: skip


def tokens() -> list[int]:
    """Token ids of real text."""
    return demo_tokenizer().encode(held_out_text()).ids


@torch.no_grad()
def next_token(model: Transformer, ids: Tensor) -> Tensor:
    """The most likely token after (1, T) ids without a cache: a full forward pass with one row of logits."""
    last = torch.tensor([ids.shape[1] - 1])
    return model.forward(ids, logits_index=last).argmax(-1)


def steps(model: Transformer, lengths: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of one more token after each length: a full forward pass and steps with caches, in turn."""
    text = tokens()
    for length in lengths:
        ids = torch.tensor([text[:length]])
        iterators = {cache: _stepping(model, cache, text[:length], rounds) for cache in CACHES}
        found: dict[str, dict[int, float]] = {name: {} for name in (NONE, *CACHES)}
        next_token(model, ids)
        for turn in range(rounds):
            began = time.perf_counter()
            next_token(model, ids)
            found[NONE][turn] = time.perf_counter() - began
            for cache, iterator in iterators.items():
                began = time.perf_counter()
                for _ in range(STEPS):
                    next(iterator)
                found[cache][turn] = (time.perf_counter() - began) / STEPS
        yield from _rows("step", length, found, 1)


def _stepping(model: Transformer, cache: str, prompt: list[int], rounds: int) -> Iterator[Any]:
    room = rounds * STEPS + WARM_UP + 1
    generator = Generator(model, cache_kind=cache, max_seq_len=len(prompt) + room, max_new_tokens=room,
                          temperature=0, ignore_eos=True)  # fmt: skip
    iterator = generator.generate_iter([prompt])
    for _ in range(WARM_UP):
        next(iterator)
    return iterator


def texts(model: Transformer, lengths: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of whole generations of each length from a short prompt; the time includes prefill."""
    prompt = tokens()[:PROMPT]
    for length in lengths:
        new = length - PROMPT
        found: dict[str, dict[int, float]] = {name: {} for name in (NONE, *CACHES)}
        for turn in range(rounds):
            for name, times in found.items():
                began = time.perf_counter()
                if name == NONE:
                    _write_without_cache(model, prompt, new)
                else:
                    Generator(model, cache_kind=name, max_seq_len=length, max_new_tokens=new, temperature=0,
                              ignore_eos=True).generate([prompt])  # fmt: skip
                times[turn] = time.perf_counter() - began
        yield from _rows("text", length, found, new)


def _write_without_cache(model: Transformer, prompt: Sequence[int], new: int) -> Tensor:
    ids = torch.tensor([list(prompt)])
    for _ in range(new):
        ids = torch.cat((ids, next_token(model, ids)), dim=1)
    return ids


def _rows(
    what: str, length: int, found: dict[str, dict[int, float]], new: int
) -> Iterator[dict[str, Any]]:
    for name, times in found.items():
        median = statistics.median(times.values())
        yield {
            "what": what, "length": length, "cache": name, "rounds": len(times),
            "median_ms": round(1e3 * median, 3), "tokens_per_s": round(new / median, 1),
            "times_no_cache": round(ratio(found[NONE], times), 2),
        }  # fmt: skip


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.generation.generation", description=__doc__
    )
    add_targets(parser, "folder to write CSV files to, and a JSON file beside each")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="cached tokens of steps"
    )
    parser.add_argument("--texts", type=int, nargs="*", default=TEXTS, help="tokens of whole texts")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of steps without and with a cache"
    )
    parser.add_argument("--overhead-rounds", type=int, default=generation_overhead.ROUNDS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = _arguments(argv)
    with results_at(given) as folder:
        paths = {part: folder / name for part, name in FILES.items()}
        if given.out is not None:
            check_out([paths[part] for part in given.only], force=given.force, command=COMMAND)
        if not given.page_only:
            _measure(given, paths)
        finish(given, generation_page.parts(paths))
    return 0


def _measure(given: argparse.Namespace, paths: dict[str, Path]) -> None:
    model, device = load_demo(), torch.device("cpu")
    about = {**environment(device), "threads": torch.get_num_threads()}
    beside: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    columns: Sequence[str]
    for part in given.only:
        if part == "steps":
            rows = [*steps(model, given.lengths, given.rounds),
                    *texts(model, given.texts, min(given.rounds, TEXT_ROUNDS))]  # fmt: skip
            columns = COLUMNS
        elif part == "bytes":
            rows, columns = list(generation_bytes.rows()), generation_bytes.COLUMNS
        else:
            rows, profile = generation_overhead.measure(model, tokens(), given.overhead_rounds)
            columns, beside[part] = generation_overhead.COLUMNS, {"profile": profile}
        for row in rows:
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        write_table(paths[part], columns, [{**row, **about} for row in rows])
        content = {"environment": details(device), "load": os.getloadavg()[0], **beside[part]}
        write_details(paths[part], COMMAND, content)


if __name__ == "__main__":
    raise SystemExit(main())
