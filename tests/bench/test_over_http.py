"""The benchmark of HTTP's cost: all get the same answers, its figures count right, the page is what the CSV says."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
pytest.importorskip("httpx")

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages import http_page, sections
from caramba_fast.bench.serving import http_servers, over_http
from caramba_fast.bench.serving.over_http import Taken
from caramba_fast.bench.serving.serve_load import Item
from caramba_fast.models import demo_tokenizer


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_engine_and_server_answer_the_same_load_alike(tmp_path):
    out = tmp_path / "http.csv"
    options = [
        "--model",
        "demo",
        "--requests",
        "3",
        "--rounds",
        "1",
        "--dtype",
        "float32",
        "--out",
        str(out),
    ]
    assert over_http.main(options) == 0
    rows = {row["system"]: row for row in read(out)}
    assert tuple(rows) == over_http.OURS
    assert len({row["tokens"] for row in rows.values()}) == 1
    assert [row["other_texts"] for row in rows.values()] == ["0", "0", "0"]
    assert all(float(row["cpu_ms_per_token"]) > 0 for row in rows.values())
    assert all(0 < float(row["between_steps"]) < 1 for row in rows.values())


def test_ratios_are_medians_over_rounds():
    def taken(seconds: float, cpu: float, *texts: str) -> Taken:
        return Taken(seconds, cpu, 100, [0.1, 0.3], list(texts), 0.9 * seconds)

    found = {
        "engine": [taken(10, 8, "a", "b"), taken(20, 8, "a", "b"), taken(10, 8, "a", "b")],
        "http, streamed": [taken(11, 9, "a", "b"), taken(20, 8, "a", "c"), taken(50, 12, "a", "b")],
    }
    engine, streamed = over_http.rows_of(found)
    assert (engine["vs_engine"], engine["cpu_vs_engine"], engine["tokens_per_s"]) == (1, 1, 10)
    assert (streamed["vs_engine"], streamed["cpu_vs_engine"]) == (round(10 / 11, 3), 1.125)
    assert streamed["between_steps"] == 0.1
    assert (streamed["other_texts"], streamed["ttft_p50_ms"]) == (1, 200.0)


def test_other_servers_are_asked_for_the_same_and_say_why_they_cannot_run(tmp_path, monkeypatch):
    item, tokenizer = Item([1, 2], 7), demo_tokenizer()
    asked = [
        http_servers.ours(tmp_path, "q8", "float32").body(item, "1", tokenizer),
        http_servers.llama_server(tmp_path / "m.gguf", "q8").body(item, "1", tokenizer),
        http_servers.transformers_serve(tmp_path, "float32").body(item, "1", tokenizer),
    ]
    assert [body["max_tokens"] for body in asked] == [7, 7, 7]
    assert asked[0]["prompt"] == asked[1]["prompt"] == [1, 2] and not asked[1]["cache_prompt"]
    assert asked[2]["prompt"] == tokenizer.decode([1, 2])
    monkeypatch.setattr(http_servers, "LLAMA_SERVER", http_servers.ROOT / "nowhere")
    assert "nowhere is not built" in str(
        http_servers.llama_server(tmp_path / "m.gguf", "q8").why_not
    )
    monkeypatch.setattr(http_servers, "LLAMA_SERVER", http_servers.ROOT / "pyproject.toml")
    assert "m.gguf is not there" in str(
        http_servers.llama_server(tmp_path / "m.gguf", "q8").why_not
    )
    (tmp_path / "m.gguf").touch()
    assert "no cache like nf4" in str(http_servers.llama_server(tmp_path / "m.gguf", "nf4").why_not)


def test_a_server_that_ends_at_once_is_named(tmp_path):
    server = http_servers.Server("mine", (sys.executable, "-c", "pass"))
    with pytest.raises(RuntimeError, match="mine did not start"), server.running():
        pass


def test_the_page_is_what_the_results_say():
    results = sections.RESULTS / http_page.FILE
    text = http_page.PAGE.read_text("utf-8")
    start, end = sections.comments(http_page.PART)
    assert text.split(start)[1].split(end)[0].split("\n")[2:-2] == http_page.lines_of(results)
