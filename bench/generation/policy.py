"""What the cache policy chooses for the demo models: ``python -m caramba_fast.bench.generation.policy [--page-only]``.

Writes ``bench/results/policy.json``, pictures, and the measured part of ``docs/policy.md``, of which every
number is read from that file.
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

from caramba_fast.models import demo_tokenizer, held_out_text, load_demo
from caramba_fast.policy import CachePlan, CachePolicyFields, CandidateRow, choose_cache
from caramba_fast.policy.plan import cells
from caramba_fast.policy.plot import save_plot
from caramba_fast.quality import RecallFormat
from caramba_fast.quality.needles import token_ids

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "results" / "policy.json", ROOT.parent / "docs"
PAGE, START, END = DOCS / "policy.md", "<!-- measured: start -->", "<!-- measured: end -->"
MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class Case:
    """A choice to show: a demo model, settings, and words."""

    name: str
    demo: str
    words: str
    settings: dict[str, Any]


PLAIN = ("fp16", "q8", "q8/q4", "q4", "nf4", "q4:plain", "nf4:plain")
CASES = (
    Case("gqa-free", "gqa", "GQA, no budget and no gates", {}),
    Case("gqa-budget", "gqa", "GQA, a budget", {"cache_budget_mb": 2.5}),
    Case("dba-budget", "dba", "DBA, a budget and a gate on the KL",
         {"cache_budget_mb": 2.0, "cache_quality_max_mean_kl": 0.0006}),
    Case("bias-gate", "gqa_bias", "GQA with large key biases, a gate on ΔNLL, 4 bits with and without their "
         "defaults", {"cache_quality_max_delta_nll": 0.01, "cache_auto_candidates": PLAIN}),
    Case("gqa-long", "gqa", "GQA, timed at 1900 cached tokens instead of 64",
         {"cache_auto_bench_prompt_len": 1900}),
)  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """The plan, and how long making it and finding it again took."""
    model, tokenizer = load_demo(case.demo), demo_tokenizer(case.demo)
    with tempfile.TemporaryDirectory() as folder:
        settings = CachePolicyFields(**case.settings, cache_plan_path=Path(folder) / "plans.json")
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            plan = choose_cache(
                model, settings, max_seq_len=MAX_SEQ_LEN, measure_all=True,
                calibration_ids=token_ids(tokenizer, held_out_text()).tolist(),
                recall=RecallFormat.of(tokenizer),
            )  # fmt: skip
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
            f"\nChosen: `{plan.spec}`, {plan.nbytes:,} bytes: {plan.row(plan.spec).reason}. Measuring everything "
            f"took {first:.1f} s, finding the plan again {1e3 * second:.0f} ms.\n"
        )
        parts.append(f"![quality against bytes](policy-{case.name}.png)\n")
    key = plan.key
    loads = [found["load"] for found in results.values() if found["load"] is not None]
    busy = (
        f" Load average at the end of each choice: {', '.join(f'{x:.1f}' for x in loads)}."
        if loads
        else ""
    )
    parts.append(
        f"Measured on {key.device}, backend {key.versions['backend']}, torch {key.versions['torch']}; "
        f"{key.batch_size} × {key.max_seq_len} tokens, on {plan.text}. Every candidate is measured for the table; a "
        f"generator measures only what fits, and times only what passes.{busy} Step times are only as good as the "
        "machine is quiet: beyond its number of processors in load, read the bytes and the quality, not the times.\n"
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
    """Measures, unless told otherwise, and writes page and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-only", action="store_true", help="from the results there are")
    if not parser.parse_args().page_only:
        measured = {}
        for case in CASES:
            measured[case.name] = measure(case)
            RESULTS.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n", "utf-8")
    results = json.loads(RESULTS.read_text("utf-8"))
    for case in (case for case in CASES if case.name in results):
        rows = CachePlan.model_validate(results[case.name]["plan"]).rows
        picture = DOCS / f"policy-{case.name}.png"
        save_plot(rows, CachePolicyFields(**case.settings), picture, case.words)
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{page(results)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
