"""The measured part of docs/serving.md, and its worst cases in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import ROOT, table
from caramba_fast.bench.serving.serve_load import CONCURRENCY, LONGEST, MEAN_NEW, MOST_NEW, SHORTEST
from caramba_fast.bench.serving.serve_room import FULL_REQUESTS
from caramba_fast.bench.serving.serve_rows import CLOSED, ENDLESS
from caramba_fast.bench.serving.serve_systems import ENGINE, ENGINE_HF, STATIC, TRANSFORMERS

FILE, PART = "serve.csv", "serving"
PAGE = ROOT.parent / "docs" / "serving.md"
WORDS = {
    STATIC: "static batches (`Generator`)",
    ENGINE: "`Engine`",
    ENGINE_HF: "`Engine` on the transformers model",
    TRANSFORMERS: "continuous batching of transformers",
}
MIB = 2**20
Row = Mapping[str, str]
Rows = list[Row]


def lines_of(path: Path) -> list[str]:
    """The part of the page."""
    rows: Rows = list(read(path))
    if not rows:
        return ["Not measured."]
    closed = [row for row in rows if row["load"] == CLOSED]
    endless = [row for row in rows if row["load"] == ENDLESS]
    opened = [row for row in rows if row["load"] not in (CLOSED, ENDLESS)]
    lines = [_where(rows[0])]
    for part, make in ((closed, _closed), (opened, _opened), (endless, _endless)):
        lines += ["", *make(part)] if part else []
    return [*lines, "", *worst_cases(rows)]


def _where(first: Row) -> str:
    library = first["transformers"] or "not installed"
    return (
        f"GQA demo model in fp32, {first['device']}, {first['threads']} thread(s), torch {first['torch']}, "
        f"transformers {library}, commit {first['commit']}, load average {first['load_average']}. "
        f"Prompts of {SHORTEST} to {LONGEST} tokens of held-out text, evenly distributed; answers geometrically "
        f"distributed with a mean of {MEAN_NEW} tokens, {MOST_NEW} at most; greedy, end-of-sequence ids ignored. At "
        f"most {CONCURRENCY} requests at once. Start-up and warm-up are not counted."
    )


def _closed(rows: Rows) -> list[str]:
    done = [row for row in rows if not row["note"]]
    notes = _notes([row for row in rows if row["note"]])
    if not done:
        return notes
    body = [
        (
            WORDS[row["system"]], row["cache"], _spread(row), _times(row, "vs_static"),
            _times(row, "vs_transformers"), _number(row, "ttft_p50_ms"), _number(row, "ttft_p99_ms"),
            _number(row, "inter_token_p50_ms", 1), _number(row, "inter_token_p99_ms", 1),
            row["preemptions"] or "not told", f"{int(row['cache_bytes']) / MIB:.1f}",
        )
        for row in done
    ]  # fmt: skip
    headings = (
        "", "cache", "tokens/s (p20 to p80)", "/ static", "/ transformers", "first token, ms", "p99",
        "between tokens, ms", "p99", "preemptions", "MiB",
    )  # fmt: skip
    first = done[0]
    return [
        f"**Closed loop**: {CONCURRENCY} clients, each sends its next request when the last is answered; "
        f"{first['requests']} requests, {first['tokens']} tokens in all, from the first request to the last token; "
        f"medians over {first['rounds']} round(s) in which all systems take the same requests in turn. Static "
        "batches are those of the native model; what no static batch has as a cache is compared with static fp16.",
        "", *table(headings, body, left=2), *notes,
    ]  # fmt: skip


def _notes(rows: Rows) -> list[str]:
    """Why some systems have no figures; each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reasons.setdefault((row["system"], row["note"]), []).append(row["cache"])
    return [
        line
        for (system, note), caches in reasons.items()
        for line in ("", f"{WORDS[system]} ({', '.join(caches)}) did not run: {note}.")
    ]


def _opened(rows: Rows) -> list[str]:
    lines = [
        f"**Open loop**: {rows[0]['requests']} requests come at random (Poisson), at stated shares of what `Engine` "
        "answers with q4 while all clients of the closed loop wait. *Waiting* is from arrival to the first work on a "
        "request."
    ]
    for load in dict.fromkeys(row["load"] for row in rows):
        some = [row for row in rows if row["load"] == load]
        body = [
            (
                WORDS[row["system"]], row["cache"], _number(row, "tokens_per_s"), _number(row, "ttft_p50_ms"),
                _number(row, "ttft_p99_ms"), _number(row, "inter_token_p50_ms", 1),
                _number(row, "inter_token_p99_ms", 1), _number(row, "queue_p50_ms"),
                _number(row, "queue_p99_ms"), row["running"],
            )
            for row in some
        ]  # fmt: skip
        headings = (
            "", "cache", "tokens/s", "first token, ms", "p99", "between tokens, ms", "p99", "waiting, ms", "p99",
            "at once, mean",
        )  # fmt: skip
        title = f"{load}, {float(some[0]['requests_per_s']):.1f} requests/s:"
        lines += ["", title, "", *table(headings, body, left=2)]
    return lines


def _endless(rows: Rows) -> list[str]:
    body = [
        (
            row["cache"], row["pages"], f"{int(row['cache_bytes']) / MIB:.2f}", _number(row, "running", 1),
            _times(row, "vs_fp16"), row["most_before_preemption"], _times(row, "most_vs_fp16"), row["preemptions"],
        )
        for row in rows
    ]  # fmt: skip
    headings = ("cache", "pages", "MiB", "at once, mean", "/ fp16", "most", "/ fp16", "preemptions")
    return [
        f"**Requests at once** in the bytes of {FULL_REQUESTS} requests of full length in fp16. Requests are in "
        "endless supply, and nothing but pages limits how many run. Counted is how many are under way after each "
        f"step, over {rows[0]['rounds']} load(s): the mean once as many end as begin, and the most before a request "
        "had to give its pages back. The scheduler begins with a request only if its prompt fits and a page is left "
        "for each that runs; the last column counts how often pages had to be given back all the same. The arithmetic "
        "of the model is left out of this count.",
        "", *table(headings, body),
    ]  # fmt: skip


def _number(row: Row, name: str, digits: int = 0) -> str:
    return f"{float(row[name]):,.{digits}f}" if row[name] else ""


def _spread(row: Row) -> str:
    low, high = _number(row, "tokens_per_s_p20"), _number(row, "tokens_per_s_p80")
    return f"{_number(row, 'tokens_per_s')} ({low} to {high})"


def _times(row: Row, name: str) -> str:
    return f"{float(row[name]):.2f}×" if row[name] else ""


def worst_cases(rows: Rows) -> list[str]:
    """The smallest measured value of a comparison, and where it occurs."""
    return [f"- {what}: {_worst(cases)}" for what, cases in _cases(rows)]


def _worst(cases: list[tuple[float, str]]) -> str:
    if not cases:
        return "not measured."
    worst, where = min(cases)
    return f"at least {worst:.2f}× ({where})."


def _cases(rows: Rows) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    """Each comparison with all its figures, as (figure, where)."""
    closed = [row for row in rows if row["load"] == CLOSED and not row["note"]]
    for system, column, what in (
        (ENGINE, "vs_static", STATIC), (ENGINE, "vs_transformers", TRANSFORMERS),
        (ENGINE_HF, "vs_transformers", TRANSFORMERS),
    ):  # fmt: skip
        mine = [row for row in closed if row["system"] == system and row[column]]
        cases = [(float(row[column]), row["cache"]) for row in mine]
        yield f"{WORDS[system]} against {WORDS[what]}", cases
    packed = [r for r in rows if r["load"] == ENDLESS and r["cache"] == "q4" and r["vs_fp16"]]
    yield (
        "requests at once in the same bytes, q4 against fp16",
        [(float(r["vs_fp16"]), "the mean") for r in packed],
    )
