"""The benchmark of HTTP's cost: all get the same answers, its figures count right, the page is what the CSV says."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
pytest.importorskip("httpx")

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages import http_page, sections
from caramba_fast.bench.serving import over_http
from caramba_fast.bench.serving.over_http import Taken


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_engine_and_server_answer_the_same_load_alike(tmp_path):
    out = tmp_path / "http.csv"
    options = ["--model", "demo", "--requests", "3", "--rounds", "1", "--out", str(out)]
    assert over_http.main(options) == 0
    rows = {row["system"]: row for row in read(out)}
    assert list(rows) == list(http_page.WORDS)
    assert len({row["tokens"] for row in rows.values()}) == 1
    assert [row["other_texts"] for row in rows.values()] == ["0", "0", "0"]
    assert all(float(row["cpu_ms_per_token"]) > 0 for row in rows.values())


def test_ratios_are_medians_over_rounds():
    def taken(seconds: float, cpu: float, *texts: str) -> Taken:
        return Taken(seconds, cpu, 100, [0.1, 0.3], list(texts))

    found = {
        "engine": [taken(10, 8, "a", "b"), taken(20, 8, "a", "b"), taken(10, 8, "a", "b")],
        "http, streamed": [taken(11, 9, "a", "b"), taken(20, 8, "a", "c"), taken(50, 12, "a", "b")],
    }
    engine, streamed = over_http.rows_of(found)
    assert (engine["vs_engine"], engine["cpu_vs_engine"], engine["tokens_per_s"]) == (1, 1, 10)
    assert (streamed["vs_engine"], streamed["cpu_vs_engine"]) == (round(10 / 11, 3), 1.125)
    assert (streamed["other_texts"], streamed["ttft_p50_ms"]) == (1, 200.0)


def test_the_page_is_what_the_results_say():
    results = sections.RESULTS / http_page.FILE
    text = http_page.PAGE.read_text("utf-8")
    start, end = sections.comments(http_page.PART)
    assert text.split(start)[1].split(end)[0].split("\n")[2:-2] == http_page.lines_of(results)
