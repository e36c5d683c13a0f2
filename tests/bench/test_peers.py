"""The comparison with other programs judges rightly; each computes the same attention. Nothing is timed for speed."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from caramba_fast.bench.pages import peers_page
from caramba_fast.bench.pages.sections import RESULTS, comments
from caramba_fast.bench.peers import ggml_library, groups, measure, onnx_sessions, run, trial
from caramba_fast.bench.peers.own import Own
from caramba_fast.bench.peers.problem import GRIDS, Problem, Shape
from caramba_fast.bench.peers.session import Session, System
from caramba_fast.bench.peers.systems import BASELINES, OURS, systems
from caramba_fast.bench.peers.torch_sessions import Torch

SMALL = Shape(2, 4, 2, 32, 96)
SEVERAL = Shape(1, 14, 2, 64, 96, tokens=8)
LISTED = systems()


def exact(problem: Problem, causal: bool = True) -> torch.Tensor:
    """Attention in float64, head by head."""
    shape, out = problem.shape, torch.empty(problem.q.shape, dtype=torch.float64)
    for row in range(shape.batch):
        for head in range(shape.heads):
            kv = head * shape.kv_heads // shape.heads
            for token in range(shape.tokens):
                seen = problem.past + token + 1 if causal else shape.kv
                k, v = (x[row, kv, :seen].double() for x in (problem.k, problem.v))
                scores = k @ problem.q[row, head, token].double() / math.sqrt(shape.dim)
                out[row, head, token] = scores.softmax(0) @ v
    return out


# -- what is asked ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, SEVERAL], ids=str)
def test_an_error_is_of_the_whole_step(shape):
    problem = Problem(shape)
    assert problem.error(exact(problem)) < 1e-12
    assert problem.error(torch.zeros_like(problem.q)) == 1.0
    if shape.tokens > 1:
        assert problem.error(exact(problem, causal=False)) > 0.02


@pytest.mark.parametrize("name", GRIDS)
def test_shapes_of_a_grid_have_names_of_their_own(name):
    names = [shape.name for shape in GRIDS[name]()]
    assert names and len(set(names)) == len(names)


def test_the_full_grid_has_every_length_batch_and_head_size():
    listed = list(GRIDS["full"]())
    one = [(s.kv, s.batch, s.tokens, s.dim) for s in listed if s.threads == 1]
    assert len(set(one)) == 3 * 2 * 2 * 2
    assert {s.threads for s in listed} == {1, 2}


# -- systems ------------------------------------------------------------------------------------


def test_systems_have_names_of_their_own_and_something_to_be_compared_with():
    assert len({system.title for system in LISTED}) == len(LISTED)
    ours = {system.kind: system.bits for system in LISTED if system.ours}
    for system in LISTED:
        assert BASELINES[system.bits] in ours
        assert 0 < system.allowed < 1, "an answer of zeros would pass"
    assert {"OpenVINO", "ONNX Runtime", "ggml", "torch", OURS} == {s.name for s in LISTED}


@pytest.mark.parametrize("shape", [SMALL, SEVERAL], ids=str)
@pytest.mark.parametrize("system", LISTED, ids=lambda system: system.title)
def test_a_system_computes_this_attention(system, shape):
    reason = system.reason(shape) or (trial.outcome(system, shape) if system.trial else "")
    if reason:
        pytest.skip(f"{system.title}: {reason}")
    problem = Problem(shape)
    session = system.build(problem)
    for _ in range(2):
        session.step()
        assert problem.error(session.output()) <= system.allowed
        assert session.output().shape == problem.q.shape
        # Codes, and scales that are no more than they; a tail comes on top.
        least = shape.values * system.bits / 8
        assert least <= session.stored <= (8 if system.ours else 2) * least
        session.rest()
        session.step()  # makes the cache longer where it grows
        session.rewind()
    if system.name == "OpenVINO":
        assert session.note.startswith(("fused", "paged")), session.note
        assert "holds" not in session.note, session.note
    session.close()


def test_rows_of_several_tokens_are_more_than_onnx_runtime_takes():
    """Its kernel refuses several new tokens of several rows behind a past: the row of such a shape says so."""
    system = next(s for s in LISTED if s.title == "ONNX Runtime fp32")
    if reason := system.reason(SMALL):
        pytest.skip(f"{system.title}: {reason}")
    found = measure.opened(system, Problem(replace(SMALL, tokens=4)))
    assert isinstance(found, str) and "batch_size must be 1" in found


class Forgetful(Own):
    """Attends without appending."""

    def step(self) -> None:
        self.out = self.cache.attend(self.problem.q)


class Unmasked(Torch):
    """Lets new tokens look at one another."""

    def __init__(self, problem, **settings):
        super().__init__(problem, **settings)
        self.mask = None


def test_a_step_that_leaves_something_out_is_wrong():
    system = next(s for s in LISTED if s.title == "caramba fp16")
    session = Forgetful(Problem(SMALL), spec="fp16")
    session.step()
    row, right = measure._checked(system, session)
    assert not right and row["note"].startswith("wrong")
    session = Unmasked(Problem(SEVERAL), call="sdpa", dtype=torch.float32)
    session.step()
    assert not measure._checked(system, session)[1]


# -- the clock ----------------------------------------------------------------------------------


class Counting(Session):
    """Growing; notes how long it has become."""

    grows = True

    def __init__(self) -> None:
        super().__init__(Problem(SMALL))
        self.taken, self.longest, self.rewound, self.rested = 1, 1, 0, 0

    def step(self) -> None:
        self.taken += 1
        self.longest = max(self.longest, self.taken)

    def output(self):
        raise AssertionError("not asked for while it is timed")

    stored = 0

    def rewind(self) -> None:
        self.taken, self.rewound = 0, self.rewound + 1

    def rest(self) -> None:
        self.rested += 1


def test_a_cache_that_grows_is_taken_back_before_it_is_too_long():
    session = Counting()
    sampler = measure.sampler(session, fits=5)
    for _ in range(4):
        sampler.sample()
    assert session.longest == 5 and session.rewound >= 4 and session.rested == 6


def test_one_that_does_not_grow_is_left_alone():
    session = Counting()
    session.grows = False
    measure.sampler(session, fits=5).sample()
    assert session.rewound == 0 and session.longest > 50, "a sample is many such steps"


# -- memory -------------------------------------------------------------------------------------


def test_everything_is_measured_together_where_it_fits():
    together, left = groups.groups(SMALL, LISTED)
    assert together == [LISTED] and not left


@pytest.mark.parametrize("gib", [1.0, 3.0, 6.0])
def test_what_does_not_fit_is_measured_in_parts_or_named(gib):
    shape, most = Shape(8, 32, 8, 128, 32768), gib * 2**30
    together, left = groups.groups(shape, LISTED, most)
    assert {s for group in together for s in group} | set(left) == set(LISTED)
    assert not {s for group in together for s in group} & set(left)
    for group in together:
        assert groups.needed(shape, group) <= most
        assert {groups.width(s) for s in group} == {groups.width(s) for s in group if s.ours}
    assert all("GiB" in why for why in left.values())
    assert bool(together) == (gib > 1)


# -- what cannot run ----------------------------------------------------------------------------


def failing(_problem):
    raise KeyError("its own reason")


def test_a_peer_that_raises_anything_has_a_reason_and_ours_does_not():
    peer = System("peer", "x", 16, 0.1, failing)
    assert measure.opened(peer, Problem(SMALL)) == "does not run here: 'its own reason'"
    with pytest.raises(KeyError):
        measure.opened(replace(peer, ours=True), Problem(SMALL))


def test_a_package_that_is_not_there_is_named():
    peer = System("peer", "x", 16, 0.1, failing, ("no_such_package",))
    assert "no_such_package" in str(measure.opened(peer, Problem(SMALL)))


def test_ggml_that_is_not_built_is_named(monkeypatch):
    monkeypatch.setattr(ggml_library, "CPU", Path("nowhere/libggml-cpu.so"))
    assert "libggml-cpu.so" in ggml_library.missing() and ggml_library.version() == ""


def test_a_crash_ends_the_trial_alone(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -SEGV $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(trial.sys, "executable", str(python))
    trial._tried.cache_clear()
    system = replace(LISTED[0], trial=True, ours=False)
    try:
        assert "signal 11" in str(measure.opened(system, Problem(SMALL)))
    finally:
        trial._tried.cache_clear()


def test_a_trial_that_goes_well_says_nothing():
    trial._tried.cache_clear()
    assert trial.outcome(LISTED[0], replace(SMALL, kv=10_000)) == ""


# -- constant scales ----------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "kind"), [(8, "int8"), (4, "int4")])
def test_constant_scales_are_better_than_those_of_the_largest_value(bits, kind):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 200, 32)
    x[..., 5] *= 20
    found = onnx_sessions.channel_scales(x, bits)
    assert found.shape == (3, 32) and (found[:, 5] > 5 * found[:, 4]).all()

    def error(scale):
        codes = torch.from_numpy(onnx_sessions.cached(x, kind, scale))
        if bits == 4:
            codes = torch.stack((codes % 16, codes // 16), -1).flatten(-2).to(torch.int8) - 8
        assert codes.shape == x.shape and codes.min() >= -(2 ** (bits - 1))
        return float((codes * scale[:, None] - x).norm() / x.norm())

    largest = x.abs().amax((0, 2)) / (2 ** (bits - 1) - 1)
    assert error(found) <= error(largest) * (1.02 if bits == 8 else 0.95)
    assert error(found) < (0.01 if bits == 8 else 0.15)


# -- the command and the page -------------------------------------------------------------------


def test_the_command_measures_the_tiny_grid(tmp_path, capsys):
    out = tmp_path / "peers.csv"
    assert run.main(["--grid", "tiny", "--systems", "torch", "--out", str(out)]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == run.COLUMNS
    asked = [s for s in LISTED if s.name in ("torch", OURS)]
    assert len(rows) == len(asked) * len(GRIDS["tiny"]())
    for row in rows:
        assert row["median_us"] and row["error"] and row["vs_ours"] and row["probe_gb_per_s"]
    ours = [row for row in rows if row["system"] == OURS and row["kind"] == row["ours"]]
    assert len(ours) == 6 and {float(row["vs_ours"]) for row in ours} == {1.0}
    assert json.loads(out.with_suffix(".json").read_text())["grid"] == "tiny"
    assert "torch sdpa fp32" in capsys.readouterr().out


def test_a_wrong_answer_is_told_and_not_timed(monkeypatch, capsys):
    zero = System("peer", "zero", 16, 1e-3, lambda problem: Forgetful(problem, spec="fp16"))
    ours = [s for s in LISTED if s.ours]
    monkeypatch.setattr(run, "systems", lambda: [*ours, zero])
    assert run.main(["--grid", "tiny"]) == 1
    said = capsys.readouterr()
    lines = [row.split("|") for row in said.out.splitlines() if "peer zero" in row]
    assert said.err.count("wrong") == len(lines) == len(GRIDS["tiny"]())
    assert all(not cells[3].strip() and "wrong" in cells[-2] for cells in lines)


def test_a_part_of_the_grid_is_not_published(capsys):
    assert run.main(["--quick", "--publish"]) == 2
    assert run.main(["--systems", "ggml", "--publish"]) == 2
    assert "not published" in capsys.readouterr().err


def invented(path: Path) -> list[dict[str, str]]:
    base = dict.fromkeys(run.COLUMNS, "") | {
        "batch": "1", "heads": "32", "kv_heads": "8", "dim": "128", "tokens": "1", "threads": "1",
        "device": "a machine", "torch": "2", "commit": "abc", "probe_gb_per_s": "20.0",
    }  # fmt: skip
    rows = []
    for kv, times in (("4096", "3.0"), ("512", "2.0")):
        ours = {"system": OURS, "kind": "q4", "bits": "4", "ours": "q4", "vs_ours": "1.0"}
        rows.append({**base, **ours, "kv": kv, "median_us": "100.0"})
        peer = {"system": "ggml", "kind": "q4_0", "bits": "4", "ours": "q4", "vs_ours": times}
        rows.append({**base, **peer, "kv": kv, "median_us": "250.0"})
        gone = {"system": "other", "kind": "u4", "bits": "4", "note": "not installed: other"}
        rows.append({**base, **gone, "kv": kv})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, run.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_the_page_has_every_row_and_names_who_is_left_out(tmp_path):
    rows = invented(tmp_path / "peers.csv")
    page = "\n".join(peers_page.lines_of(tmp_path / "peers.csv"))
    assert page.count("### ") == 3 and "4096 tokens cached, 1 row" in page
    assert "| ggml q4_0 | 4 | 0.250 | 3.00 × q4 |" in page
    assert "| ggml q4_0 | 4 | `q4` | 2 | 2.00× | 2.50× | 3.00× |" in page
    assert page.count("other u4") == 1 and page.endswith(
        "could not run where this was measured: other u4."
    )
    assert "| caramba q4 | 4 | 0.100 |  |" in page
    facts = {"measured": 2, "shapes": 30, "peers": {"ggml": "0.25"}}
    (tmp_path / "peers.json").write_text(json.dumps(facts))
    origin = peers_page.lines_of(tmp_path / "peers.csv")[0]
    assert "a machine; ggml 0.25; torch 2" in origin and "2 of 30 shapes" in origin
    found = peers_page.curves(rows, ("4",))
    assert found == {
        "caramba q4": [(512, 1.0), (4096, 1.0)],
        "ggml q4_0": [(512, 2.0), (4096, 3.0)],
    }
    peers_page.plot(tmp_path / "peers.csv", tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 5000


def test_the_page_is_that_of_the_results():
    start, end = comments(peers_page.PART)
    part = peers_page.PAGE.read_text("utf-8").split(start)[1].split(end)[0]
    assert part.strip() == "\n".join(peers_page.lines_of(RESULTS / peers_page.FILE)).strip()


def test_nothing_of_the_peers_is_imported_before_it_is_asked_for():
    """The package and its other benchmarks work without them."""
    code = (
        "import sys, caramba_fast.bench.peers.run\n"
        "print(*sorted({'openvino', 'onnxruntime', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
