"""The parts of the inference page on the savings and costs of a cache, from the results of `generation`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import table
from caramba_fast.formats import FORMATS

Rows = Sequence[Mapping[str, str]]
MIB = 2**20
BLOCK = 32


def parts(paths: Mapping[str, Path]) -> dict[str, list[str]]:
    """Lines of every part of the page for which there are results."""
    made = {"kinds": kinds()}
    for part, make in (("steps", steps), ("overhead", overhead)):
        rows = read(paths[part])
        made[part] = make(rows, paths[part]) if rows else ["Not measured."]
    sizes = read(paths["bytes"])
    made["bytes"] = demo_bytes(sizes) if sizes else ["Not measured."]
    made["decoupled"] = decoupled(sizes) if sizes else ["Not measured."]
    return made


def kinds() -> list[str]:
    """Bytes of a cached number by kind, scales included."""
    body = [
        (f"`{row.name}`", f"{row.bytes_per_vector(BLOCK, BLOCK) / BLOCK:g}",
         f"{2 / (row.bytes_per_vector(BLOCK, BLOCK) / BLOCK):.2f}×")
        for row in FORMATS.values()
    ]  # fmt: skip
    return table(("kind", "bytes a number", "smaller than fp16"), body)


def _where(rows: Rows, path: Path) -> str:
    load = json.loads(path.with_suffix(".json").read_text("utf-8"))["load"]
    first = rows[0]
    return (
        f"GQA demo model, {first['device']}, {first['threads']} thread(s), torch {first['torch']}, commit "
        f"{first['commit']}, load average {load:.1f}."
    )


def steps(rows: Rows, path: Path) -> list[str]:
    """Speed without a cache and with one."""
    lines = [_where(rows, path)]
    titles = {
        "step": ("one token more, behind", "Medians of single steps, in turn:"),
        "text": ("a whole text of", "Whole texts from a prompt of 16 tokens, prompt included:"),
    }
    for what, (heading, title) in titles.items():
        chosen = [row for row in rows if row["what"] == what]
        caches = list(dict.fromkeys(row["cache"] for row in chosen))
        found = {(row["length"], row["cache"]): row for row in chosen}
        body = []
        for length in dict.fromkeys(row["length"] for row in chosen):
            cells = [f"{float(found[length, cache]['tokens_per_s']):,.1f}" for cache in caches]
            cells += [
                f"{float(found[length, cache]['times_no_cache']):.1f}×" for cache in caches[1:]
            ]
            body.append((f"{length} tokens", *cells))
        if body:
            names = ["no cache" if cache == "none" else cache for cache in caches]
            headings = (
                heading,
                *(f"{name}, tokens/s" for name in names),
                *(f"{n} / no cache" for n in names[1:]),
            )
            lines += ["", title, "", *table(headings, body)]
    best = max(
        (row for row in rows if row["what"] == "step"), key=lambda row: float(row["times_no_cache"])
    )
    return [*lines, "", f"The most that a cache saved is a factor of {float(best['times_no_cache']):.0f}, at "
            f"{best['length']} tokens."]  # fmt: skip


def demo_bytes(rows: Rows) -> list[str]:
    """The formulas beside the real sizes."""
    titles = {"demo": "the GQA demo model", "example": "16 layers, 6 kv heads of 64"}
    body = []
    for row in rows:
        if row["what"] in titles:
            grown = float(row["allocated"])
            body.append((
                titles[row["what"]], f"{row['batch']} × {row['tokens']}", row["kind"],
                *(f"{float(row[name]) / MIB:.2f}" for name in ("formula_d_model", "formula_kv_heads", "nbytes")),
                f"{grown / MIB:.2f}" if grown else "not known",
            ))  # fmt: skip
    headings = (
        "cache of", "rows × tokens", "kind", "4·B·S·L·d_model", "2·L·S·kv_heads·head_dim·bytes", "`nbytes`",
        "process grew by",
    )  # fmt: skip
    return ["In MiB.", "", *table(headings, body, left=3)]


def decoupled(rows: Rows) -> list[str]:
    """One layer of standard attention and the decoupled one that replaces it."""
    base = next(
        float(r["bytes_per_token"]) for r in rows if (r["what"], r["kind"]) == ("standard", "fp16")
    )
    titles = {"standard": "K and V, 2048 wide", "decoupled": "semantic 128, geometric 256, V 256"}
    body = [
        (title, row["kind"], f"{float(row['bytes_per_token']):,.0f}",
         f"{base / float(row['bytes_per_token']):.1f}×")
        for what, title in titles.items()
        for row in rows
        if row["what"] == what
    ]  # fmt: skip
    return table(("one layer", "kind", "bytes a token", "smaller"), body, left=2)


def overhead(rows: Rows, path: Path) -> list[str]:
    """Shares of a step outside the forward pass."""
    body = []
    for row in rows:
        step, forward, drawing, rest = (
            float(row[f"{name}_us"]) for name in ("step", "forward", "drawing", "rest")
        )
        body.append((
            row["cache"], row["mode"], row["batch"], f"{step:,.0f}", f"{forward:,.0f}", f"{drawing:,.0f}",
            f"{rest:,.0f}", f"{float(row['share']):.1%}",
        ))  # fmt: skip
    headings = (
        "cache",
        "sampling",
        "rows",
        "step, µs",
        "forward, µs",
        "drawing, µs",
        "rest, µs",
        "not forward",
    )
    return [_where(rows, path), "", *table(headings, body, left=2), "", _verdict(rows)]


def _verdict(rows: Rows) -> str:
    def worst(name: str, chosen: Sequence[Mapping[str, Any]]) -> float:
        return max(float(row[name]) for row in chosen)

    rest, all_of_it = worst("share_without_drawing", rows), worst("share", rows)
    return f"Bookkeeping alone is at most {rest:.1%} of a step, together with drawing tokens {all_of_it:.1%}."
