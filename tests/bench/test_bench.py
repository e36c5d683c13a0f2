"""The benchmark judges rightly: its grids, its oracle, its predictions, its clock. Nothing is timed for speed."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import dense

from caramba_fast.bench.generation import decode_model
from caramba_fast.bench.kernels import (
    comparators,
    external,
    measure,
    oracle,
    predict,
    registry,
    run,
    timing,
    workloads,
)
from caramba_fast.bench.kernels.comparators import Implementation
from caramba_fast.bench.kernels.registry import Case
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.table import COLUMNS, read
from caramba_fast.bench.pages import gpu_page, real_decode_page, report, sections
from caramba_fast.ops import decode_attention, use_backend
from caramba_fast.ops.view import Lanes

CPU = torch.device("cpu")
SMALL = Case("decode_attention", ("q8_0",), 2, 4, 2, 64, 128, tokens=3, dtype="fp32")


# -- grids --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "device"), [("core", "cuda"), ("full", "cuda"), ("cpu", "cpu")])
def test_names_tell_the_cases_of_a_grid_apart(grid, device):
    listed = [(case.name, case.kinds) for case in registry.cases(grid, device)]
    assert len(set(listed)) == len(listed)


def test_the_core_grid_comes_first_and_says_why():
    core = registry.cuda_core()
    assert len(core) == 24 and all(case.goal for case in core)
    assert tuple(registry.cases("full", "cuda")[:24]) == core
    decode = {case.name for case in registry.cuda_rest()} | {case.name for case in core}
    assert len(decode) == 3 * 5 * 3 * 4


def test_a_grid_of_the_other_device_is_refused():
    with pytest.raises(ValueError, match="for cuda"):
        registry.cases("core", "cpu")
    with pytest.raises(ValueError, match="for the CPU"):
        registry.cases("cpu", "cuda")


@pytest.mark.parametrize("dims", [(64, ()), (80, ()), (96, ()), (64, (8, 32))])
def test_bytes_are_those_of_the_stored_tensors(kind, dims):
    case = replace(SMALL, dim=dims[0], key_dims=dims[1])
    views = [workloads.stored(torch.randn(2, 2, 128, dim), kind, case.lanes) for dim in case.dims]
    held = sum(v.codes.nbytes + (0 if v.scales is None else v.scales.nbytes) for v in views)
    assert case.moved_bytes(kind) == held


@pytest.mark.parametrize("layout", ["q8", "q4"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_oracle_reads_keys_by_channel_and_their_ring(layout, tokens):
    case = replace(SMALL, kinds=(layout,), tokens=tokens)
    given = [torch.randn(2, 2, 128, 64) for _ in range(2)]
    views = workloads.streams_of(given, layout, case)
    held = sum(x.nbytes for v in views for x in (v.codes, v.scales) if x is not None)
    assert case.moved_bytes(layout) == held
    q, lengths = torch.randn(2, 4, tokens, 64), torch.full((2,), 128, dtype=torch.int32)
    with use_backend("reference"):
        out = decode_attention(q, *views, lengths, n_kv_heads=2)
    assert oracle.error(out, [q], views, kv_heads=2) < 1e-5
    torn = [replace(view, tail=view.tail + 0.5) for view in views]
    assert (oracle.error(out, [q], torn, kv_heads=2) > 1e-3) == (tokens > 1)


def test_half_of_the_bytes_of_keys_are_divided():
    torch.manual_seed(0)
    view = workloads.stored(torch.randn(1, 8, 128, 128), "q4_channel", Lanes.of(8, 128, 128))
    assert view.scales is not None and view.fit == "mse" and view.query_rms is not None
    lending = (view.scales[..., :128].view(torch.int16) < 0).float().mean()
    assert 0.2 < lending < 0.3  # of the two channels of a byte one lends at most


# -- the oracle ---------------------------------------------------------------------------------


def test_the_oracle_agrees_with_dense_attention_and_sees_a_wrong_result(kind):
    views = [workloads.stored(torch.randn(2, 2, 40, 64), kind, SMALL.lanes) for _ in range(2)]
    q = torch.randn(2, 4, 3, 64)
    k, v = (dense.by_head(dense.decoded(x.codes, x.scales, x.kind), 2, 64) for x in views)
    for window in (0, 7):
        reach = (window - 1, 0) if window else (-1, -1)
        out, _ = dense.attend(q, k, v, [40, 40], window=reach)
        error = oracle.error(out, [q], views, kv_heads=2, window=window)
        assert error < 1e-12
        wrong = out.clone()
        wrong[1, 3, 2] += 0.1
        assert oracle.error(wrong, [q], views, kv_heads=2, window=window) > 1e-3


def test_every_op_is_right_by_the_oracle():
    for case in registry.tiny():
        for measured in workloads.workload(case, CPU).errors.values():
            found, allowed = measured()
            assert found <= allowed, case.name


def test_a_wrong_kernel_is_reported_and_not_timed(monkeypatch, capsys, tmp_path):
    right = workloads.OPS["decode_attention"]
    monkeypatch.setitem(workloads.OPS, "decode_attention", lambda *a, **o: right(*a, **o) * 1.1)
    monkeypatch.setattr(run, "cases", lambda *_: [SMALL])
    assert run.main(["--grid", "tiny", "--out", str(tmp_path / "a.csv")]) == 1
    assert "wrong: error 0.1" in capsys.readouterr().err
    ours = next(row for row in read(tmp_path / "a.csv") if row["implementation"] == "caramba")
    assert ours["note"].startswith("wrong") and not ours["median_us"]


# -- comparators --------------------------------------------------------------------------------


@pytest.mark.parametrize("key_dims", [(), (8, 32)])
@pytest.mark.parametrize("window", [0, 40])
def test_peers_compute_the_same_attention(key_dims, window):
    op = "decoupled_decode_attention" if key_dims else "decode_attention"
    case = replace(SMALL, op=op, kinds=("fp32", "q8_0"), tokens=1, key_dims=key_dims, window=window)
    work = workloads.workload(case, CPU)
    expected = work.ours[0].calls[0]()
    assert {"sdpa fp32", "grouped matmul bf16"} <= {peer.name for peer in work.peers}
    for peer in work.peers:
        if peer.name != "QuantizedCache q4":
            loose = 0.05 if "bf16" in peer.name or "q8" in peer.name else 0.01
            assert oracle.relative_l2(peer.calls[0](), expected.double()) < loose, peer.name


def test_an_absent_peer_says_so():
    peers = comparators.Peers(SMALL, *torch.randn(3, 1, 2, 8, 4), 1)
    peers.try_adding("x", "no_such_package_at_all", lambda _: None)
    assert peers.absent == {"x": "not installed: no_such_package_at_all"}


# -- predictions --------------------------------------------------------------------------------


def test_predictions_are_written_down():
    """If this fails, kernels or grid changed: ``make bench-predictions``, before measuring."""
    assert predict.PREDICTIONS.read_text() == predict.page()
    parts = {gpu_page.PART: gpu_page.lines_of(), gpu_page.MODEL_PART: gpu_page.model_lines()}
    for name, lines in parts.items():
        start, end = sections.comments(name)
        part = gpu_page.PAGE.read_text("utf-8").split(start)[1].split(end)[0]
        assert part.strip() == "\n".join(lines).strip()


def test_the_page_of_gpus_says_what_was_not_measured(tmp_path):
    measured = tmp_path / "cuda.csv"
    case, kind = predict.PREDICTIONS.read_text().splitlines()[1].split(",")[:2]
    measured.write_text(
        "case,kind,implementation,backend,median_us,vs_sdpa,device\n"
        f"{case},{kind},caramba,triton,321.04,1.503,a card\n"
        f"{case},,sdpa flash,,482.5,1.0,a card\n"
    )
    lines = gpu_page.lines_of(measured=measured)
    assert lines[0] == "Measured on a card."
    assert lines[4].split(" | ")[1:4] == ["482.5", "321.0 (1.50×)", "not measured"]
    assert all(line.count("not measured") in (3, 5, 6) for line in lines[5:])
    nothing = gpu_page.lines_of(measured=tmp_path / "none.csv")
    assert nothing[0] == "No GPU has measured any of these." and "321.0" not in "".join(nothing)


def test_nothing_is_predicted_below_its_floor():
    with predict.PREDICTIONS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["predicted_us"]:
                assert float(row["predicted_us"]) > float(row["predicted_floor_us"])
                assert 0 < float(row["predicted_share"]) < 1


# -- runs ---------------------------------------------------------------------------------------


def test_a_run_stops_in_time_and_goes_on_later(monkeypatch, capsys, tmp_path):
    listed = [replace(SMALL, kv=kv, dtype="fp32") for kv in (128, 256)]
    monkeypatch.setattr(run, "cases", lambda *_: listed)
    path = tmp_path / "a.csv"
    command = ["--grid", "tiny", "--out", str(path)]
    assert run.main([*command, "--time-limit", "0"]) == 0
    assert "2 of 2 cases left out" in capsys.readouterr().out
    assert list(read(path)) == []
    monkeypatch.setattr(run, "cases", lambda *_: listed[:1])
    run.main(command)
    monkeypatch.setattr(run, "cases", lambda *_: listed)
    run.main([*command, "--resume"])
    assert "1 of 2 cases were measured before" in capsys.readouterr().out
    rows = read(path)
    assert tuple(rows[0]) == COLUMNS and {row["case"] for row in rows} == {c.name for c in listed}
    ours = [row for row in rows if row["implementation"] == "caramba"]
    assert all(float(row["share"]) > 0 and float(row["vs_sdpa"]) > 0 for row in ours)
    assert json.loads(path.with_suffix(".json").read_text())["torch"] == torch.__version__
    assert "CUDA: [GPUs](gpu.md)." in report.report([path])


def test_slow_ones_sit_out_rounds_evenly():
    fast = Implementation("fast", (lambda: time.sleep(0.002),), 1)
    slow = Implementation("slow", (lambda: time.sleep(0.12),), 1)
    samples = timing.interleaved([fast, slow], CPU, rounds=9, budget_s=0.5)
    assert len(samples[fast]) == 9
    turns = sorted(samples[slow])
    assert timing.LEAST <= len(turns) < 9 and turns[0] < 3 and turns[-1] > 5
    assert timing.ratio(samples[slow], samples[fast]) > 2


def test_figures_take_the_best_rival():
    entries = {
        name: Implementation(name, (), 100, kind, ours=name == "caramba")
        for name, kind in (
            ("caramba", "fp16"),
            ("sdpa fp32", ""),
            ("grouped matmul bf16", ""),
            ("probe", ""),
        )
    }
    times = {"caramba": 1.0, "sdpa fp32": 8.0, "grouped matmul bf16": 4.0, "probe": 0.5}
    samples = {entries[name]: dict.fromkeys(range(5), x) for name, x in times.items()}
    row = measure.figures(samples, own=False)["caramba", "fp16"]
    assert (row["vs_sdpa"], row["vs_best"], row["best"]) == (8.0, 4.0, "grouped matmul bf16")
    assert row["share"] == 0.5


def test_shards_cover_the_work_once():
    items = list(range(10))
    parts = [Shard.parse(f"{i}/3").of(items) for i in range(3)]
    assert sorted(x for part in parts for x in part) == items
    with pytest.raises(ValueError, match="0 <= I < N"):
        Shard.parse("3/3")


# -- the picture --------------------------------------------------------------------------------


def test_roofline_needs_one_token_decode_rows(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from caramba_fast.bench.pages import roofline

    rows = [
        {**dict.fromkeys(COLUMNS, ""), "op": "decode_attention", "implementation": "caramba", "kind": kind,
         "batch": "1", "kv": kv, "tokens": "1", "window": "0", "share": "0.5", "predicted_share": "0.6"}
        for kind in ("fp16", "q4_0") for kv in ("128", "4096")
    ]  # fmt: skip
    assert roofline.curves(rows)["q4_0", "1"] == [(128, 0.5, 0.6), (4096, 0.5, 0.6)]
    roofline.plot(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no decode attention"):
        roofline.plot([], tmp_path / "b.png")


# -- a whole model, and peers from elsewhere ------------------------------------------------------


def test_a_lengthened_cache_repeats_the_prompt_and_takes_steps():
    setting = decode_model.Setting(64, 2, 300)
    of = decode_model.model(64)
    steps = {kind: decode_model.Steps(of, setting, kind) for kind in ("fp16", "q4:plain,rotate")}
    for kind, entry in steps.items():
        cache = entry.generator.cache
        assert cache is not None and cache.row_lengths == [300, 300], kind
        for layer in cache:
            for stream in layer.streams.values():
                for x in (stream.codes, stream.scales):
                    assert x is None or torch.equal(x[:, :, 172:300], x[:, :, 44:172])
        assert entry.take(2) > 0 and cache.row_lengths == [302, 302]
    assert steps["q4:plain,rotate"].generator.cache[0].v.config.rotate


def test_decode_steps_are_measured_in_groups_that_fit(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(decode_model, "MOST_BYTES", 0)
    monkeypatch.setattr(decode_model, "MOST_STEPS", 1)
    monkeypatch.setattr(decode_model, "PROMPT", 64)
    path = tmp_path / decode_model.FILE
    command = ["--head-dims", "64", "--batches", "1", "--contexts", "128", "--rounds", "3",
               "--kinds", "fp16", "q8", "q4:plain", "--out", str(path)]  # fmt: skip
    assert decode_model.main(command) == 0
    assert "0 of 1" not in capsys.readouterr().out
    rows = read(path)
    assert tuple(rows[0]) == decode_model.COLUMNS
    assert [row["kind"] for row in rows] == ["fp16", "q8", "q4:plain"]
    assert rows[0]["vs_fp16"] == "1.0" and all(float(row["tokens_per_s"]) > 0 for row in rows)
    assert (
        int(rows[2]["stored_bytes"]) < int(rows[1]["stored_bytes"]) < int(rows[0]["stored_bytes"])
    )
    assert decode_model.main([*command, "--time-limit", "-1"]) == 0
    assert "1 of 1 settings left out" in capsys.readouterr().out


def test_the_page_joins_peers_and_decode_steps_that_lie_beside_it(tmp_path):
    ours = {**dict.fromkeys(COLUMNS, ""), "case": "x", "op": "decode_attention", "implementation": "caramba",
            "kind": "q4_0", "batch": "1", "heads": "32", "kv_heads": "8", "dim": "128", "kv": "4096", "tokens": "1",
            "window": "0", "threads": "2", "median_us": "100", "device": "A CPU", "backend": "cpp"}  # fmt: skip
    path = tmp_path / "cpu.csv"
    write_rows(path, [ours])
    assert "ggml" not in report.report([path])
    peer = {"peer": "ggml", "commit": "abc", "kind": "q4_0", "batch": "1", "kv": "4096", "threads": "2",
            "median_ms": "3.0", "machine": "A CPU", "date": "2026-01-01"}  # fmt: skip
    write_rows(tmp_path / external.FILE, [peer, {**peer, "threads": "1"}])
    write_rows(tmp_path / decode_model.FILE, [{
        **dict.fromkeys(decode_model.COLUMNS, "1"), "head_dim": "64", "batch": "8", "context": "1024", "kind": kind,
        "tokens_per_s": speed, "vs_fp16": times,
    } for kind, speed, times in (("fp16", "50", "1"), ("q4", "60", "1.2"))])  # fmt: skip
    page = report.report([path])
    assert "| ggml | q4_0 | 1 | 4096 | 2 | 3.000 | 0.100 | 30.0 |" in page
    assert "| ggml | q4_0 | 1 | 4096 | 1 | 3.000 |  |  |" in page  # ours was not measured
    assert "| 64 | 8 | 1024 | 50.0 (1.00×) | 60.0 (1.20×) |" in page


def test_a_time_sampled_beside_a_peer_comes_first_and_another_machine_never():
    peer = {"kind": "q4_0", "batch": "1", "kv": "4096", "threads": "2", "machine": "A CPU"}
    ours = {
        **external.SHAPE,
        **peer,
        "op": "decode_attention",
        "implementation": "caramba",
        "median_us": "100",
    }
    assert external.ours_ms(peer, [{**ours, "device": "A CPU"}]) == 0.1
    assert external.ours_ms(peer, [{**ours, "device": "B CPU"}]) is None
    assert external.ours_ms({**peer, "ours_ms": "0.2"}, [{**ours, "device": "A CPU"}]) == 0.2
    with pytest.raises(ValueError, match="lacks peer, commit"):
        external.section([peer], [])


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_the_table_of_the_readme_is_that_of_the_results():
    text = real_decode_page.README.read_text(encoding="utf-8")
    lines = real_decode_page.headline()
    assert sections.replaced(text, real_decode_page.PART, lines) == text, "make bench-real"
    with pytest.raises(ValueError, match="the page needs one"):
        sections.replaced("# Title", real_decode_page.PART, [])


def test_the_page_names_every_case_in_which_ours_is_slower():
    rows = [
        {"case": case, "backend": backend, "kind": kind, "vs_best": ratio, "best": "grouped matmul"}
        for case, backend, kind, ratio in (
            ("a", "cpp", "q8", "0.864"), ("a", "cpp", "q4", "1.02"), ("a", "cpp", "nf4", "0.60"),
            ("a", "", "sdpa", "0.1"), ("b", "cpp", "q8", "1.5"), ("c", "cpp", "q8", ""),
        )
    ]  # fmt: skip
    assert report.behind(rows)[-1] == "- a: q8 0.86×, nf4 0.60× of grouped matmul"
    assert len(report.behind(rows)) == 4 and report.behind(rows[4:]) == []


def test_a_footnote_says_in_how_many_cases_a_program_did_not_run():
    rows = [
        {"name": name, "note": note}
        for name, note in (("a", "does not run here: x"), ("a", ""), ("b", "does not run here: y"))
    ]
    assert sections.left_out(rows[1:2], lambda row: row["name"]) == []
    found = sections.left_out(rows, lambda row: row["name"])
    assert found[-1].endswith("measured: a (1 of 2 cases), b.")
