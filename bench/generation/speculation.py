"""Speculation with the demo model: ``python -m caramba_fast.bench.generation.speculation [--publish]``.

Every prompt is continued plainly and with every draft, in turn, with every cache. A round has a few prompts of its own,
so that every round adds to the acceptance; a speed-up is the median over rounds of plain by speculative seconds. The
effect of a cache on the acceptance is also computed on the same positions of one text (`speculation_forced`), where
sampled texts cannot diverge.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.environment import details, environment
from caramba_fast.bench.generation.jackknife import points_apart, ratio_interval
from caramba_fast.bench.generation.speculation_forced import forced
from caramba_fast.bench.generation.speculation_prompts import KINDS, prompts
from caramba_fast.bench.kernels.timing import quantile
from caramba_fast.bench.out import BESIDE, check_out, write_details, write_table
from caramba_fast.bench.pages.sections import add_targets, finish, results_at
from caramba_fast.bench.pages.speculation_page import lines
from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.models import Transformer, demo_tokenizer, load_demo

#: Written into the details beside the results.
COMMAND = "generation.speculation"
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampling": {"temperature": 0.8, "top_p": 0.95},
}
CACHES = ("fp16", "q8", "q4")
ROUNDS, PER_ROUND, NEW_TOKENS = 5, 4, 128
COLUMNS = (
    "prompt", "mode", "cache", "draft", "spec_k", "rounds", "prompts", "new_tokens", "drafted", "accepted",
    "acceptance", "acceptance_half_width", "tokens_per_pass", "speedup", "speedup_p20", "speedup_p80",
    "speedup_with_prompt", "plain_tokens_per_s", "same_as_plain", "threads", "device", "torch", "commit", "source",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A draft model, or prompt lookup if ``model`` is None."""

    name: str
    model: Transformer | None
    spec_k: int


@dataclass(frozen=True)
class Result:
    """One continued prompt: seconds after the first token, total seconds, tokens, and counts of drafts."""

    decode_s: float
    total_s: float
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    new: int = 0
    row_passes: int = 0


def first_layers(model: Transformer, count: int) -> Transformer:
    """A model of the first blocks of ``model`` with its norm and head; weights are shared, nothing is trained."""
    with torch.device("meta"):
        small = Transformer(model.config.model_copy(update={"num_hidden_layers": count}))
    own = model.state_dict()
    small.load_state_dict({name: own[name] for name in small.state_dict()}, assign=True)
    small.lm_head.weight, small.rope = model.lm_head.weight, model.rope
    return small.requires_grad_(False).eval()


def drafts(target: Transformer) -> list[Draft]:
    """The drafts to measure."""
    return [
        Draft("lookup (K 4)", None, 4),
        Draft("lookup (K 8)", None, 8),
        Draft("first 2 of 4 layers (K 4)", first_layers(target, 2), 4),
        Draft("DBA demo of the same size (K 4)", load_demo("dba"), 4),
    ]


def run(generator: Generator, prompt: Sequence[int], new_tokens: int) -> Result:
    """Continues one prompt from an empty cache."""
    generator.reset()
    out = generator.generate([prompt])
    metrics = generator.metrics
    assert metrics is not None and isinstance(out, Tensor)
    tokens = out[0, len(prompt) :].tolist()
    decode = (new_tokens - 1) / metrics.decode_tokens_per_s
    if not isinstance(generator, SpeculativeGenerator):
        return Result(decode, metrics.total_s, tokens)
    stats = generator.stats
    return Result(
        decode, metrics.total_s, tokens, stats.drafted, stats.accepted, stats.new_tokens,
        stats.row_passes,
    )  # fmt: skip


Runs = dict[tuple[str, str], list[list[Result]]]


def measure(
    target: Transformer,
    listed: Sequence[Draft],
    mode: str,
    texts: Sequence[Sequence[int]],
    rounds: int,
    new_tokens: int,
) -> Runs:
    """Results by (cache, draft), "plain" among the drafts: for each round those of its prompts."""
    common: dict[str, Any] = dict(
        max_new_tokens=new_tokens, ignore_eos=True, max_seq_len=1024, seed=0, **MODES[mode]
    )
    entries: dict[tuple[str, str], Generator] = {}
    for cache in CACHES:
        entries[cache, "plain"] = Generator(target, cache_kind=cache, **common)
        for draft in listed:
            entries[cache, draft.name] = SpeculativeGenerator(
                target, draft.model, cache_kind=cache, spec_k=draft.spec_k, **common
            )
    for generator in entries.values():
        run(generator, texts[0][:64], new_tokens)
    found: Runs = {key: [[] for _ in range(rounds)] for key in entries}
    order, each = list(entries), len(texts) // rounds
    for index, text in enumerate(texts[: rounds * each]):
        first = index % len(order)
        for key in (*order[first:], *order[:first]):
            found[key][index // each].append(run(entries[key], text, new_tokens))
    return found


def rows(
    found: Runs, listed: Sequence[Draft], about: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row for each cache and draft."""
    for cache, draft in product(CACHES, listed):
        plain, mine = found[cache, "plain"], found[cache, draft.name]
        all_plain, all_mine = ([r for turn in runs for r in turn] for runs in (plain, mine))
        ratios, whole = (
            [
                sum(getattr(r, name) for r in a) / sum(getattr(r, name) for r in b)
                for a, b in zip(plain, mine, strict=True)
            ]
            for name in ("decode_s", "total_s")
        )
        acceptance, half = ratio_interval([(r.accepted, r.drafted) for r in all_mine])
        speed = (len(all_plain[0].tokens) - 1) / statistics.median(r.decode_s for r in all_plain)
        same = sum(a.tokens == b.tokens for a, b in zip(all_plain, all_mine, strict=True))
        yield {
            **about, "cache": cache, "draft": draft.name, "spec_k": draft.spec_k, "rounds": len(mine),
            "prompts": len(all_mine), "new_tokens": len(all_mine[0].tokens),
            "drafted": sum(r.drafted for r in all_mine), "accepted": sum(r.accepted for r in all_mine),
            "acceptance": round(acceptance, 4), "acceptance_half_width": round(half, 4),
            "tokens_per_pass": round(sum(r.new for r in all_mine) / sum(r.row_passes for r in all_mine), 3),
            "speedup": round(statistics.median(ratios), 3), "speedup_p20": round(quantile(ratios, 0.2), 3),
            "speedup_p80": round(quantile(ratios, 0.8), 3),
            "speedup_with_prompt": round(statistics.median(whole), 3),
            "plain_tokens_per_s": round(speed, 1), "same_as_plain": same if about["mode"] == "greedy" else "",
        }  # fmt: skip


def differences(
    kept: Mapping[tuple[str, str], Runs], listed: Sequence[Draft]
) -> list[dict[str, Any]]:
    """Points by which quantized caches move the acceptance of whole runs, pooled over prompts, paired by prompt."""
    lines = []
    for mode, draft, cache in product(MODES, listed, CACHES[1:]):
        pairs: list[tuple[float, ...]] = []
        for kind in KINDS:
            if (kind, mode) in kept:
                sides = [
                    [r for turn in kept[kind, mode][name, draft.name] for r in turn]
                    for name in (cache, CACHES[0])
                ]
                pairs += [
                    (a.accepted, a.drafted, b.accepted, b.drafted)
                    for a, b in zip(*sides, strict=True)
                ]
        if pairs:
            lines.append({"mode": mode, "draft": draft.name, "cache": cache, **points_apart(pairs)})
    return lines


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.generation.speculation", description=__doc__
    )
    add_targets(parser, f"CSV file to write{BESIDE}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--prompts", type=int, default=PER_ROUND, help="of each round")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of prompts")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=tuple(MODES))
    parser.add_argument(
        "--positions", type=int, default=512, help="of each of 8 texts, for the differences"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = _arguments(argv)
    check_out([given.out], force=given.force, command=COMMAND)
    with results_at(given, "speculation.csv") as path:
        if not given.page_only:
            _measure_all(given, path)
        finish(given, {"speculation": lines(path)})
    return 0


def _measure_all(given: argparse.Namespace, path: Path) -> None:
    device, target, tokenizer = torch.device("cpu"), load_demo(), demo_tokenizer()
    listed, about = drafts(target), {**environment(device), "threads": torch.get_num_threads()}
    kept: dict[tuple[str, str], Runs] = {}
    done: list[dict[str, Any]] = []
    modes = {name: MODES[name] for name in given.modes}
    content: dict[str, Any] = {"environment": details(device), "modes": modes}
    content["forced"] = forced(target, listed, modes, CACHES, given.positions)
    for mode, kind in product(modes, given.kinds):
        texts = prompts(kind, tokenizer, given.rounds * given.prompts)
        kept[kind, mode] = measure(target, listed, mode, texts, given.rounds, given.new_tokens)
        found = list(rows(kept[kind, mode], listed, {**about, "prompt": kind, "mode": mode}))
        for row in found:
            print(f"{kind:7} {mode:8} {row['cache']:4} {row['draft']:20} acceptance {row['acceptance']:.3f} "
                  f"{row['tokens_per_pass']:.2f} a pass, {row['speedup']:.2f}x", flush=True)  # fmt: skip
        done += found
        write_table(path, COLUMNS, done)
        content |= {"load": os.getloadavg()[0], "runs": differences(kept, listed)}
        write_details(path, COMMAND, content)


if __name__ == "__main__":
    raise SystemExit(main())
