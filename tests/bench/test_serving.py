"""The benchmark of serving: its load is the fixed one, its figures count right, and the page is what the CSV says."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from caramba_fast.bench import out
from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages import sections, serve_page
from caramba_fast.bench.serving import serve, serve_load, serve_room, serve_rows, serve_systems
from caramba_fast.bench.serving.serve_load import Clients, Item, Record, Run
from caramba_fast.cli.app import app
from caramba_fast.models import demo_tokenizer, held_out_text, load_demo

FEW = [Item([5, 6, 7], 3), Item([9] * 40, 1), Item([2, 3], 5), Item([4] * 9, 2)]


@pytest.fixture(scope="module")
def text():
    return demo_tokenizer().encode(held_out_text()).ids


@pytest.fixture(scope="module")
def model():
    return load_demo()


# -- the load ---------------------------------------------------------------------------------


def test_the_load_is_the_one_that_was_fixed(text):
    items = serve_load.load(text, 4000)
    prompts = np.array([len(item.prompt) for item in items])
    new = np.array([item.new_tokens for item in items])
    assert prompts.min() == 16 and prompts.max() == 512
    assert prompts.mean() == pytest.approx(264, abs=8)
    assert np.histogram(prompts, bins=4, range=(16, 512))[0] == pytest.approx([1000] * 4, abs=120)
    assert new.min() == 1 and new.max() <= 512
    assert new.mean() == pytest.approx(64, abs=4)
    assert np.median(new) == pytest.approx(64 * np.log(2), abs=4)  # of a geometric distribution


def test_prompts_are_stretches_of_the_text(text):
    whole = " ".join(map(str, text))
    assert all(" ".join(map(str, item.prompt)) in whole for item in serve_load.load(text, 20))


def test_the_load_is_the_same_every_time(text):
    items = serve_load.load(text, 30)
    assert items == serve_load.load(text, 40)[:30] == list(islice(serve_load.supply(text), 30))
    assert items != serve_load.load(text, 30, seed=1)
    with pytest.raises(ValueError, match="512 or more"):
        serve_load.load(text[:100], 1)


def test_arrivals_are_poisson():
    times = np.array(serve_load.arrivals(4000, 8.0))
    gaps = np.diff(times, prepend=0.0)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.08)
    assert list(times) == serve_load.arrivals(4000, 8.0)


# -- clients and figures ----------------------------------------------------------------------


def test_a_closed_loop_keeps_its_places_taken():
    clients = Clients(FEW, places=2)
    assert clients.due() == [0, 1] and clients.due() == []
    clients.got(1, [clients.began + 1.0])
    assert clients.due() == [2]
    assert clients.records[2].arrived == clients.began + 1.0
    assert clients.next_s is None
    with pytest.raises(RuntimeError, match="got 2 tokens, 1 were wanted"):
        clients.got(1, [clients.began + 2.0])


def test_an_open_loop_does_not_wait_for_answers():
    clients = Clients(FEW, [0.0, 0.0, 60.0, 70.0], places=1)
    assert clients.due() == [0, 1]
    assert 59.0 < clients.next_s <= 60.0
    assert not clients.is_over


def test_figures_of_a_run():
    records = [Record(10.0, 10.5, [11.0, 11.5, 12.0]), Record(10.0, 11.0, [14.0])]
    run = Run(records, 10.0, 2)
    assert (run.tokens, run.seconds, run.rate, run.requests_per_s) == (4, 4.0, 1.0, 0.5)
    assert run.ttft() == [1.0, 4.0] and run.queue() == [0.5, 1.0] and run.gaps() == [0.5, 0.5]
    assert run.running == (1.5 + 3.0) / 4.0 and run.full_requests_per_s == 0.5
    last = Record(
        12.0, 12.0, [13.0]
    )  # two places: the third request is sent when the first is answered
    assert Run([*records, last], 10.0).full_requests_per_s == 1 / 2.0


def test_rows_compare_round_by_round():
    def runs(*seconds):
        return [Run([Record(0.0, 0.0, [s / 2, s])], 0.0) for s in seconds]

    found = {
        ("static", "fp16"): runs(1.0, 2.0, 4.0),
        ("engine", "q4"): runs(0.5, 0.5, 1.0),
        ("transformers", "fp32"): runs(2.0, 2.0, 2.0),
    }
    rows = {r["system"]: r for r in serve_rows.rows_of("closed", found, dict.fromkeys(found, 7))}
    assert rows["engine"]["vs_static"] == 4.0  # 2, 4 and 4
    assert rows["engine"]["vs_transformers"] == 4.0
    assert rows["transformers"]["vs_static"] == 1.0
    assert rows["engine"]["tokens_per_s"] == 4.0 and rows["engine"]["preemptions"] == ""


# -- systems ----------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [None, [0.0, 0.0, 0.01, 0.02]], ids=["closed", "open"])
@pytest.mark.parametrize("name", [serve_systems.STATIC, serve_systems.ENGINE])
def test_every_request_gets_the_tokens_it_asked_for(model, name, times):
    size = serve_systems.fp16_bytes(model, 2)
    system = serve._made(name, "q4", model, size)
    run = system.run(FEW, times)
    assert [len(record.tokens) for record in run.records] == [item.new_tokens for item in FEW]
    assert all(r.arrived <= r.started <= r.tokens[0] <= r.tokens[-1] for r in run.records)
    assert all(wait >= 0 for wait in run.queue()) and run.preemptions == 0
    if name == serve_systems.ENGINE:
        assert 0.9 * size < system.cache_bytes <= size


def test_transformers_answers_the_same_requests(model):
    if not hasattr(pytest.importorskip("transformers"), "ContinuousBatchingConfig"):
        pytest.skip("this transformers cannot be told how much memory it has")
    size = serve_systems.fp16_bytes(model, 4)
    system = serve_systems.Transformers(serve_systems.hf_model(), size)
    assert system.cache == "fp32" and system.cache_bytes == size
    run = system.run(FEW)
    assert [len(record.tokens) for record in run.records] == [item.new_tokens for item in FEW]
    assert run.preemptions is None and all(wait >= 0 for wait in run.queue())


def test_a_system_that_does_not_run_has_a_line_with_the_reason(model, monkeypatch):
    def refuse(*_):
        raise TypeError("it has no such thing")

    monkeypatch.setattr(serve, "Batching", refuse)
    found, left_out = serve.systems(model, [serve_systems.STATIC, serve_systems.ENGINE], ["q4"])
    assert [system.name for system in found] == [serve_systems.STATIC]
    assert [(row["system"], row["note"]) for row in left_out] == [
        ("engine", "it has no such thing")
    ]


def test_more_requests_run_at_once_in_four_bits(model, text):
    size = serve_systems.fp16_bytes(model, 1)
    kinds = ("fp16", "q4:plain", "q4")
    few, plain, many = (serve_room.room(model, kind, size, text, 0, steps=40) for kind in kinds)
    assert few.cache_bytes == size and plain.pages > 3.4 * few.pages
    assert plain.mean > 2 * few.mean and few.most >= 1
    # By channel each request has a ring of 32 tokens in fp16 beside its pages.
    assert many.pages > 2.2 * few.pages and many.mean > 2 * few.mean
    assert many.cache_bytes <= size


def test_requests_at_once_are_those_of_the_model_itself(model, text, monkeypatch):
    """Leaving the model's arithmetic out changes nothing."""
    size = serve_systems.fp16_bytes(model, 1)
    silent = serve_room.room(model, "q4", size, text, 1, steps=12)
    monkeypatch.setattr(serve_room, "Silent", lambda model: model)
    assert serve_room.room(model, "q4", size, text, 1, steps=12) == silent


# -- the command and the page -----------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "serve.csv"
    arguments = (
        "--systems static engine --caches fp16 q4 --requests 4 --open-requests 2 --rounds 1 --rates 0.8 --supplies 1 "
        "--steps 12"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "load", lambda text, count: FEW[:count])
        assert serve.main([*arguments.split(), "--out", str(path)]) == 0
    return path


def test_the_command_writes_a_line_for_everything(results):
    rows = read(results)
    found = [(row["load"], row["system"], row["cache"]) for row in rows]
    kinds = ("fp16", "q4")
    pairs = [(system, cache) for system in ("static", "engine") for cache in kinds]
    assert found == [
        *(("endless", "engine", cache) for cache in kinds),
        *(("closed", *pair) for pair in pairs),
        *(("80%", *pair) for pair in pairs),
    ]
    for row in rows:
        assert row["device"] and row["torch"] and row["threads"] and int(row["cache_bytes"])
    closed = [row for row in rows if row["load"] == "closed"]
    assert all(float(row["tokens_per_s"]) and float(row["vs_static"]) for row in closed)
    assert len({row["tokens"] for row in closed}) == 1


def test_the_page_of_a_run(results):
    lines = serve_page.lines_of(results)
    page = "\n".join(lines)
    assert "**Closed loop**" in page and "**Open loop**" in page and "**Requests at once**" in page
    assert "against continuous batching of transformers: not measured" in page
    assert serve_page.lines_of(Path("nowhere.csv")) == ["Not measured."]


def line(**given):
    return {**dict.fromkeys(serve_rows.COLUMNS, ""), "load": "closed", **given}


def test_the_worst_case_is_told():
    rows = [
        line(system="engine", cache="fp16", vs_static="3.1"),
        line(system="engine", cache="q4", vs_static="2.499"),
    ]
    first = serve_page.worst_cases(rows)[0]
    assert first.startswith("- `Engine` against static batches (`Generator`): ")
    assert first.endswith("): at least 2.50× (q4).")
    assert serve_page.worst_cases(rows)[-1].endswith(": not measured.")


def test_what_did_not_run_says_why(tmp_path):
    rows = [
        line(system=serve_systems.ENGINE_HF, cache=c, note="no such thing") for c in ("fp16", "q4")
    ]
    out.write_table(tmp_path / "serve.csv", serve_rows.COLUMNS, rows)
    page = "\n".join(serve_page.lines_of(tmp_path / "serve.csv"))
    assert "`Engine` on the transformers model (fp16, q4) did not run: no such thing." in page


def test_the_page_is_what_the_results_say():
    page = serve_page.PAGE.read_text(encoding="utf-8")
    lines = serve_page.lines_of(sections.RESULTS / serve_page.FILE)
    assert sections.replaced(page, serve_page.PART, lines) == page


def test_no_figures_by_hand():
    page = serve_page.PAGE.read_text(encoding="utf-8")
    outside = re.sub(
        r"<!-- measured: (.*?) -->.*?<!-- measured: end of \1 -->", "", page, flags=re.DOTALL
    )
    assert not re.search(r"\d+(\.\d+)?\s?(×|ms|µs|tokens/s)", outside)


def test_the_command_line_has_it():
    done = CliRunner().invoke(app, ["bench", "serve", "--help"])
    assert done.exit_code == 0 and "--supplies" in done.output
