"""The part of docs/serving.md on the overhead of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import ROOT, table
from caramba_fast.bench.serving.serve_load import CONCURRENCY, LONGEST, MEAN_NEW, SHORTEST

FILE, PART = "serve_http.csv", "serving over http"
PAGE = ROOT.parent / "docs" / "serving.md"
WORDS = {
    "engine": "`Engine`, called directly", "http, streamed": "over HTTP, streamed",
    "http, whole": "over HTTP, whole answers",
    "transformers serve, streamed": "`transformers serve`, continuous batching, pages of its dtype",
    "llama.cpp's server, streamed": "llama.cpp's server, Q4_0 weights, the like cache",
}  # fmt: skip
#: Said of the engine's weights.
PACKED = " (ours [packed](inference.md#packed-weights))"


def lines_of(path: Path) -> list[str]:
    """The part of the page."""
    rows = list(read(path)) if path.exists() else []
    if not rows:
        return ["Not measured."]
    first = rows[0]
    where = (
        f"{first['model']} in {first['dtype']}{PACKED if first['packed'] == 'True' else ''}, cache {first['cache']}, "
        f"{first['device']}, {first['threads']} thread(s), torch {first['torch']}, commit {first['commit']}, load "
        f"average {first['load_average']}. {CONCURRENCY} clients in a closed loop, {first['requests']} requests of "
        f"{SHORTEST} to {LONGEST} tokens, answers of {MEAN_NEW} in the mean, {first['tokens']} tokens in all; medians "
        f"over {first['rounds']} round(s) in which all take the same requests in turn. Servers and clients are "
        "processes of their own. Tokens/s depend on what else the machine does (the load average), and clients share "
        "its cores with the model; processor time depends on that much less, and clients do not count in it. The time "
        "between steps is the share in which the engine computes nothing: what HTTP, the event loop and waiting for "
        "clients cost it. Greedy answers can differ where rounding depends on which requests a pass has. Prompts of "
        "earlier rounds are not reused, but transformers' server is not told so, and may."
    )
    body = [
        (
            WORDS[row["system"]] + _run(row, first),
            f"{row['tokens_per_s']} ({row['tokens_per_s_p20']} to {row['tokens_per_s_p80']})",
            f"{float(row['vs_engine']):.3f}×", row["cpu_ms_per_token"], f"{float(row['cpu_vs_engine']):.3f}×",
            f"{100 * float(row['between_steps']):.1f}%" if row["between_steps"] else "not told",
            row["ttft_p50_ms"] if "whole" not in row["system"] else "", row["other_texts"],
        )
        for row in rows
    ]  # fmt: skip
    heads = (
        "", "tokens/s (p20 to p80)", "/ engine", "processor ms a token", "/ engine", "time between steps",
        "first token, ms", "answers with other text",
    )  # fmt: skip
    return [where, "", *table(heads, body)]


def _run(row: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Note for a row of another run than the first: which run, and that it is compared with the engine of that run."""
    if row["commit"] == first["commit"]:
        return ""
    return f" (a run of {row['requests']} requests, beside its own engine, commit {row['commit']})"
