"""The benchmarks behind docs/inference.md: that they run, count right, and that the page is what they say."""

import json
from pathlib import Path

import pytest
import torch

from caramba_fast.bench.generation import (
    generation,
    generation_overhead,
    jackknife,
    speculation,
    speculation_forced,
    speculation_prompts,
)
from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages import generation_page, sections, speculation_page
from caramba_fast.models import demo_tokenizer, load_demo

PAGE = sections.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model():
    return load_demo()


def test_a_part_is_replaced_and_the_rest_stays():
    start, end = sections.comments("x")
    page = f"before\n{start}\nold\n{end}\nafter\n"
    assert sections.replaced(page, "x", ["new"]) == f"before\n{start}\n\nnew\n\n{end}\nafter\n"
    assert sections.replaced(sections.replaced(page, "x", ["a"]), "x", ["b"]).count(end) == 1
    for broken in ("", start, page + start):
        with pytest.raises(ValueError, match="measured: x"):
            sections.replaced(broken, "x", [])


def test_the_page_is_what_the_results_say():
    paths = {part: sections.RESULTS / name for part, name in generation.FILES.items()}
    parts = generation_page.parts(paths)
    parts["speculation"] = speculation_page.lines(sections.RESULTS / "speculation.csv")
    for name, lines in parts.items():
        assert sections.replaced(PAGE, name, lines) == PAGE, name


def test_intervals():
    assert jackknife.ratio_interval([(1, 4)] * 5) == (0.25, 0.0)
    acceptance, half = jackknife.ratio_interval([(0, 4), (4, 4)] * 50)
    assert acceptance == 0.5 and half == pytest.approx(1.96 * 0.05, rel=0.02)
    apart = jackknife.points_apart([(3, 4, 2, 4)] * 3)
    assert (apart["points"], apart["half_width"], apart["fp16"]) == (25.0, 0.0, 50.0)


@pytest.mark.parametrize(
    ("points", "half", "said"), [(0.5, 0.4, "is within"), (-2.0, 0.5, "**not**"), (0.5, 2.0, "cannot")]
)  # fmt: skip
def test_what_a_difference_says(points, half, said):
    assert said in speculation_page._judged({"points": points, "half_width": half}, 1.0)


def test_a_draft_of_first_layers_shares_the_weights(model):
    small = speculation.first_layers(model, 2)
    assert len(small.model.layers) == 2
    shared = [x.model.layers[1].mlp.up_proj.weight.data_ptr() for x in (small, model)]
    assert shared[0] == shared[1]
    whole = speculation.first_layers(model, 4)
    ids = torch.tensor([[5, 9, 2, 300]])
    assert torch.equal(whole.forward(ids), model.forward(ids))


@pytest.mark.parametrize("kind", speculation_prompts.KINDS)
def test_prompts_differ(kind):
    found = speculation_prompts.prompts(kind, demo_tokenizer(), 20)
    assert len({tuple(prompt) for prompt in found}) == 20
    assert all(32 < len(prompt) < 1024 - speculation.NEW_TOKENS for prompt in found)


def test_what_is_looked_up_is_what_followed():
    text = torch.tensor([[7, 8, 9] * 40])
    found = speculation_forced._looked_up(text, 16)
    following = text[:, speculation_forced.SKIPPED + 1 :]
    assert torch.equal(found[:, :-1].long().argmax(-1), following) and found.any(-1).all()


def test_generation(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generation_overhead, "WARM_UP", 2)
    monkeypatch.setattr(generation_overhead, "STEPS", 2)
    monkeypatch.setattr(generation_overhead, "PROFILED", 2)
    arguments = ["--rounds", "2", "--overhead-rounds", "2", "--lengths", "32", "--texts", "20"]
    assert generation.main([*arguments, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "one token more, behind" in said and "not forward" in said
    steps = read(tmp_path / generation.FILES["steps"])
    assert {(row["what"], row["cache"]) for row in steps} == {
        (what, cache) for what in ("step", "text") for cache in ("none", "fp16", "q4")
    }
    for row in read(tmp_path / generation.FILES["overhead"]):
        assert 0 < float(row["share"]) < 1 and float(row["rest_us"]) > 0
    for row in read(tmp_path / generation.FILES["bytes"]):
        if (row["what"], row["kind"]) == ("example", "bf16"):
            assert row["formula_kv_heads"] == row["formula_d_model"] == row["nbytes"]
    assert json.loads((tmp_path / "overhead.json").read_text())["profile"]


def test_without_a_cache_the_text_is_the_same(model):
    prompt = generation.tokens()[:8]
    from caramba_fast.infer import generate

    cached = generate(
        model, [prompt], max_new_tokens=6, temperature=0, cache_kind="fp32", ignore_eos=True
    )
    assert torch.equal(generation._write_without_cache(model, prompt, 6), cached)


def test_clocks_leave_everything_as_it_was(model):
    before = model.forward
    with generation_overhead.clocks(model):
        assert model.forward is not before
    assert model.forward == before


def test_speculation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speculation, "CACHES", ("fp16", "q4"))
    monkeypatch.setattr(speculation_forced, "WINDOWS", 2)
    out = tmp_path / "found.csv"
    arguments = [
        "--kinds",
        "recall",
        "--rounds",
        "2",
        "--prompts",
        "1",
        "--new-tokens",
        "6",
        "--positions",
        "8",
    ]
    assert speculation.main([*arguments, "--out", str(out)]) == 0
    rows = read(out)
    assert len(rows) == 2 * 2 * 4
    for row in rows:
        assert int(row["accepted"]) <= int(row["drafted"])
        assert 1 <= float(row["tokens_per_pass"]) <= int(row["spec_k"]) + 1
        if row["mode"] == "greedy":
            assert row["same_as_plain"] == row["prompts"]
    about = json.loads(Path(out).with_suffix(".json").read_text())
    assert {x["draft"] for x in about["runs"]} == {x["draft"] for x in about["forced"]}
    assert "Acceptance" in capsys.readouterr().out.title()
