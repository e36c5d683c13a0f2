"""The part of the inference page on speculation, from the results of `speculation`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import table

CLAIMS = {"q8": 1.0, "q4": 3.0}
WORDS = {
    "code": "code to continue",
    "repeat": "a function that stands there twice",
    "recall": "key-value lines",
}


def lines(path: Path) -> list[str]:
    """Tables from a CSV and the JSON beside it."""
    rows = read(path)
    if not rows:
        return ["Not measured."]
    about = json.loads(path.with_suffix(".json").read_text("utf-8"))
    first = rows[0]
    page = [
        f"The 4-layer GQA demo model on {first['device']}, {first['threads']} thread(s), batch 1, torch "
        f"{first['torch']}, commit {first['commit']}, load average {about['load']:.1f}. A cell reads "
        "*acceptance* (accepted of drafted tokens, ± half the 95% interval), *tokens per pass* of the target, "
        "*speed-up* of the decode steps over plain decoding with the same cache, timed in turn.",
    ]
    for mode, settings in about["modes"].items():
        chosen = [row for row in rows if row["mode"] == mode]
        if not chosen:
            continue
        named = ", ".join(f"`{name}={value}`" for name, value in settings.items())
        counts = (
            f"{chosen[0]['prompts']} prompts a cell, {chosen[0]['new_tokens']} new tokens each, "
            f"{chosen[0]['rounds']} rounds"
        )
        page += ["", f"**{mode.capitalize()}** ({named}; {counts})", "", *_cells(chosen)]
        if mode == "greedy":
            same = sum(int(row["same_as_plain"]) for row in chosen)
            page += [
                "",
                f"{same} of {sum(int(row['prompts']) for row in chosen)} greedy runs gave the very tokens of plain "
                "decoding. Where one differs, two tokens were as good as equally likely: one pass over several "
                "tokens rounds differently than a pass over each.",
            ]
    page += ["", "How a quantized cache of both models moves the acceptance, in points:", ""]
    return [*page, *_moved(about), "", *_verdict(about)]


def _cells(rows: Sequence[Mapping[str, str]]) -> list[str]:
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    body = []
    for prompt, draft in dict.fromkeys((row["prompt"], row["draft"]) for row in rows):
        cells = [
            f"{float(row['acceptance']):.0%} ± {100 * float(row['acceptance_half_width']):.0f}, "
            f"{float(row['tokens_per_pass']):.2f}, {float(row['speedup']):.2f}×"
            for row in rows
            if (row["prompt"], row["draft"]) == (prompt, draft)
        ]
        body.append((WORDS[prompt], draft, *cells))
    return table(("prompt", "draft", *caches), body, left=2)


def _moved(about: Mapping[str, Any]) -> list[str]:
    body = []
    forced = {(x["mode"], x["draft"], x["cache"]): x for x in about["forced"]}
    for run in about["runs"]:
        same = forced.get((run["mode"], run["draft"], run["cache"]))
        body.append((
            run["mode"], run["draft"], run["cache"], f"{run['fp16']:.1f}%", _points(run),
            f"{same['fp16']:.1f}%" if same else "", _points(same) if same else "",
        ))  # fmt: skip
    headings = (
        "mode", "draft", "cache", "whole runs, fp16", "difference", "same text, fp16", "there"
    )  # fmt: skip
    return table(headings, body, left=3)


def _points(found: Mapping[str, Any]) -> str:
    return f"{found['points']:+.2f} ± {found['half_width']:.2f}"


def _verdict(about: Mapping[str, Any]) -> list[str]:
    """Whether the promise holds that q8 stays within 1 point of fp16, and q4 within 3."""
    said = []
    for name, what in (("forced", "on the same text"), ("runs", "in whole runs")):
        for cache, limit in CLAIMS.items():
            found = [x for x in about[name] if x["cache"] == cache]
            if found:
                worst = max(found, key=lambda x: abs(x["points"]) + x["half_width"])
                said.append(f"{what}, {cache} {_judged(worst, limit)}")
    text = "; ".join(said)
    return [text[:1].upper() + text[1:] + "."] if said else []


def _judged(worst: Mapping[str, Any], limit: float) -> str:
    points, half = abs(worst["points"]), worst["half_width"]
    within = f"within {limit:g} point{'s' if limit > 1 else ''} of fp16"
    if points + half <= limit:
        said = f"is {within} everywhere"
    elif points - half > limit:
        said = f"is **not** {within} everywhere"
    else:
        said = f"cannot be told to be {within} everywhere from so many runs"
    return f"{said} (widest: {_points(worst)})"
