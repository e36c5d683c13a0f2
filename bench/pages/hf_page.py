"""The table of `hf_decode` in docs/huggingface.md, and its worst cases in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import ROOT, table

FILE, PART = "hf_decode.csv", "hf decode"
PAGE = ROOT.parent / "docs" / "huggingface.md"
OURS, THEIRS = ("q8", "q4", "nf4", "bf16"), ("quanto4", "hqq4", "hqq8", "fp8")
#: The context at which a model runs at its own speed, with almost no cache.
SHORT, LONG = "64", 8192
MIB = 2**20
Rows = list[Mapping[str, str]]
Found = dict[tuple[str, str, str, str], Mapping[str, str]]


def lines_of(path: Path) -> list[str]:
    """The part of the page."""
    rows: Rows = list(read(path))
    if not rows:
        return ["Not measured."]
    found = {(r["kv_heads"], r["dtype"], r["context"], r["cache"]): r for r in rows}
    settings = list(dict.fromkeys((row["kv_heads"], row["dtype"]) for row in rows))
    first = rows[0]
    lines = [
        f"Llama of 8 layers, hidden size 512, 8 heads of 64, batch 1; {first['device']}, {first['threads']} thread(s), "
        f"torch {first['torch']}, transformers {first['transformers']}, commit {first['commit']}. Tokens/s with "
        "DynamicCache; the others as multiples of it (medians over rounds in which all take their steps in turn). "
        "quanto4, hqq4, hqq8 and fp8 are transformers' own quantized caches."
    ]
    for kv_heads, dtype in settings:
        lines += ["", f"{kv_heads} kv heads, {dtype}:", "", *_speed(rows, found, kv_heads, dtype)]
    lines += ["", "MiB held for 8192 tokens:", "", *_sizes(rows, found, settings)]
    return [*lines, "", *worst_cases(found)]


def _contexts(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["context"] for row in rows))


def _caches(rows: Rows) -> list[str]:
    there = {row["cache"] for row in rows}
    return [name for name in (*OURS, *THEIRS) if name in there]


def _speed(rows: Rows, found: Found, kv_heads: str, dtype: str) -> list[str]:
    body = []
    for context in _contexts(rows):
        base = found.get((kv_heads, dtype, context, "dynamic"))
        if base is None:
            continue
        cells = [found.get((kv_heads, dtype, context, name)) for name in _caches(rows)]
        ratios = ["" if c is None else f"{float(c['vs_dynamic']):.2f}×" for c in cells]
        body.append((context, f"{float(base['tokens_per_s']):.0f}", *ratios))
    return table(("context", "DynamicCache, tokens/s", *_caches(rows)), body)


def _sizes(rows: Rows, found: Found, settings: list[tuple[str, str]]) -> list[str]:
    names = ["dynamic", *_caches(rows)]
    body = []
    for kv_heads, dtype in settings:
        cells = [found.get((kv_heads, dtype, str(LONG), name)) for name in names]
        sizes = ["" if c is None else f"{int(c['cache_bytes']) / MIB:.1f}" for c in cells]
        body.append((f"{kv_heads} kv heads, {dtype}", *sizes))
    return table(("", "DynamicCache", *names[1:]), body)


def worst_cases(found: Found) -> list[str]:
    """The smallest figure of each comparison, and where it occurs."""
    return [
        f"- {what}: at least {worst:.2f}× ({where})."
        for what, cases in _cases(found)
        if cases
        for worst, where in [min(cases)]
    ]


def _cases(found: Found) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    """Each comparison with all its figures, as (figure, where)."""
    ratios = {key: float(row["vs_dynamic"]) for key, row in found.items()}
    packed = {key: value for key, value in ratios.items() if key[3] in ("q8", "q4")}
    yield (
        "q8 and q4 against DynamicCache from 512 tokens on",
        [(v, _where(k)) for k, v in packed.items() if k[2] != SHORT],
    )  # fmt: skip
    yield (
        f"q8 and q4 against DynamicCache from {LONG} tokens on",
        [(v, _where(k)) for k, v in packed.items() if int(k[2]) >= LONG],
    )  # fmt: skip
    yield (
        f"q8 and q4 against DynamicCache in bf16 with 8 kv heads at {LONG} tokens",
        [(v, _where(k)) for k, v in packed.items() if k[:3] == ("8", "bfloat16", str(LONG))],
    )  # fmt: skip
    for kv_heads in ("8", "2"):
        yield (
            f"q8 and q4 against every quantized cache of transformers at {LONG} tokens, {kv_heads} kv heads",
            [
                (value / ratios[(*key[:3], name)], f"{_where(key)}, against {name}")
                for key, value in packed.items() if key[0] == kv_heads and int(key[2]) == LONG
                for name in THEIRS if (*key[:3], name) in ratios
            ],
        )  # fmt: skip
    yield (
        f"q8 and q4 at {LONG} tokens against the same model's own speed, DynamicCache at {SHORT} tokens",
        [
            (_speed_of(row) / _speed_of(found[(*key[:2], SHORT, "dynamic")]), _where(key))
            for key, row in found.items()
            if key in packed and int(key[2]) == LONG and (*key[:2], SHORT, "dynamic") in found
        ],
    )  # fmt: skip
    yield (
        f"q8 and q4 against DynamicCache at {SHORT} tokens",
        [(v, _where(k)) for k, v in packed.items() if k[2] == SHORT],
    )  # fmt: skip


def _speed_of(row: Mapping[str, str]) -> float:
    return 1 / float(row["median_ms"])


def _where(key: tuple[str, str, str, str]) -> str:
    kv_heads, dtype, context, cache = key
    return f"{cache}, {kv_heads} kv heads, {dtype}, {context} tokens"
