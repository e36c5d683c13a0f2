"""Choices of the cache policy: ``python -m caramba_fast.bench.generation.policy [--page-only] [--cases NAME ...]``.

For real models as `make real` fetches them, in bf16 and on its texts, and for the demo models. Writes
``bench/results/policy.json``, from which pictures and the measured part of ``docs/policy.md`` are made. Cases that are
not measured keep their results.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.real.models import SOURCES, model_folder
from caramba_fast.bench.real.text import KINDS, text
from caramba_fast.config.spec import short_name
from caramba_fast.models import demo_tokenizer, held_out_text, load_demo, load_model, load_tokenizer
from caramba_fast.policy import CachePlan, CachePolicyFields, CandidateRow, choose_cache
from caramba_fast.policy.plan import cells
from caramba_fast.policy.plot import save_plot
from caramba_fast.quality import RecallFormat
from caramba_fast.quality.needles import token_ids

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "results" / "policy.json", ROOT.parent / "docs"
PAGE, START, END = DOCS / "policy.md", "<!-- measured: start -->", "<!-- measured: end -->"
#: As much of the held-out texts as the policy's windows need.
CHARACTERS = 200_000


@dataclass(frozen=True)
class Case:
    """A choice to show: a demo model, or a real one of `SOURCES`; settings, tokens of a row, and a description."""

    name: str
    model: str
    words: str
    settings: dict[str, Any]
    max_seq_len: int = 2048


PLAIN = ("fp16", "q8", "q8/q4", "q4", "nf4", "q4:plain", "nf4:plain")
#: Windows must be long enough: after short ones no cache has lost much yet.
REAL: dict[str, Any] = {
    "cache_quality_prompt_len": 256, "cache_quality_decode_steps": 8, "cache_auto_bench_prompt_len": 4000,
    "cache_quality_max_mean_kl": 0.005,
}  # fmt: skip
CASES = (
    Case("qwen2.5-gate", "qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct, a gate on the KL",
         {**REAL, "cache_auto_candidates": ("fp16", "q8", "q8/q4", "q4", "nf4", "q8:plain", "q4:plain")}, 8192),
    Case("smollm2-budget", "smollm2", "SmolLM2-135M-Instruct, a budget and a gate on the KL",
         {**REAL, "cache_budget_mb": 80.0}, 8192),
    Case("gqa-free", "gqa", "GQA demo model, no budget and no gates", {}),
    Case("gqa-budget", "gqa", "GQA demo model, a budget", {"cache_budget_mb": 2.5}),
    Case("dba-budget", "dba", "DBA demo model, a budget and a gate on the KL",
         {"cache_budget_mb": 2.0, "cache_quality_max_mean_kl": 0.0006}),
    Case("bias-gate", "gqa_bias", "GQA demo model with large key biases, a gate on ΔNLL, 4 bits with and without "
         "their defaults", {"cache_quality_max_delta_nll": 0.01, "cache_auto_candidates": PLAIN}),
    Case("gqa-long", "gqa", "GQA demo model, timed at 1900 cached tokens instead of 64",
         {"cache_auto_bench_prompt_len": 1900}),
)  # fmt: skip


def subject_of(case: Case) -> tuple[Any, dict[str, Any]]:
    """The model, and the arguments of `choose_cache` for it."""
    if case.model in SOURCES:
        folder = model_folder(case.model)
        tokenizer = load_tokenizer(folder)
        each = CHARACTERS // len(KINDS)
        parts = [text(kind, "held out")[:each] for kind in KINDS]
        ids = [token for part in parts for token in token_ids(tokenizer, part).tolist()]
        return load_model(folder, dtype=torch.bfloat16), {"calibration_ids": ids}
    tokenizer = demo_tokenizer(case.model)
    ids = token_ids(tokenizer, held_out_text()).tolist()
    return load_demo(case.model), {"calibration_ids": ids, "recall": RecallFormat.of(tokenizer)}


def measure(case: Case) -> dict[str, Any]:
    """The plan, and the seconds of making it and of finding it again."""
    model, given = subject_of(case)
    with tempfile.TemporaryDirectory() as folder:
        settings = CachePolicyFields(**case.settings, cache_plan_path=Path(folder) / "plans.json")
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            plan = choose_cache(
                model, settings, max_seq_len=case.max_seq_len, measure_all=True, **given
            )
            seconds.append(time.perf_counter() - start)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"seconds": seconds, "load": load, "plan": plan.model_dump(mode="json")}


def page(results: dict[str, Any]) -> str:
    """The measured part of the page."""
    parts = []
    for case in (case for case in CASES if case.name in results):
        found = results[case.name]
        plan = CachePlan.model_validate(found["plan"])
        given = ", ".join(f"`{name}={_word(value)}`" for name, value in case.settings.items())
        parts.append(f"### {case.words}\n\n{given}\n" if given else f"### {case.words}\n")
        parts.append(_table(plan.rows))
        first, second = found["seconds"]
        parts.append(
            f"\nChosen: `{short_name(plan.spec)}`, {plan.nbytes:,} bytes: {plan.row(plan.spec).reason}. "
            f"Measuring everything took {first:.1f} s, finding the plan again {1e3 * second:.0f} ms; "
            f"{plan.key.batch_size} × {plan.key.max_seq_len} tokens, {plan.key.device}, "
            f"torch {plan.key.versions['torch']}, on {plan.text}.\n"
        )
        parts.append(f"![quality against bytes](policy-{case.name}.png)\n")
    loads = [found["load"] for found in results.values() if found["load"] is not None]
    busy = (
        f" Load average at the end of each choice: {', '.join(f'{x:.1f}' for x in loads)}."
        if loads
        else ""
    )
    parts.append(
        "Every candidate is measured for the tables; a generator measures only what fits, and times only what passes."
        f"{busy} Step times are only as good as the machine is quiet: beyond its number of processors in load, read "
        "the bytes and the quality, not the times.\n"
    )
    return "\n".join(parts)


def _word(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _table(rows: tuple[CandidateRow, ...]) -> str:
    headings, body = cells(rows)
    sides = ["---" if name in ("cache", "verdict") else "---:" for name in headings]
    lines = [headings, sides, *([f"`{line[0]}`", *line[1:]] for line in body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measures unless ``--page-only``, and writes page and pictures."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--page-only", action="store_true", help="from the results there are")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="measure these")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for case in () if args.page_only else (case for case in CASES if case.name in args.cases):
        results[case.name] = measure(case)
        ordered = {name: results[name] for name in names if name in results}
        RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for case in (case for case in CASES if case.name in results):
        rows = CachePlan.model_validate(results[case.name]["plan"]).rows
        picture = DOCS / f"policy-{case.name}.png"
        save_plot(rows, CachePolicyFields(**case.settings), picture, case.words)
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{page(results)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
