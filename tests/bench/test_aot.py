"""Every kernel variant compiles for every target, under the oldest and the newest Triton, as well as it did.

The compilers run in processes of their own, both at once: under pytest the kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.emulated import pinned

from caramba_fast.bench.kernels import aot, binary, cards, loop
from caramba_fast.bench.kernels.variants import variants

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "bench" / "results" / "aot.csv"
#: Constraints that pin a Triton, and where `make test` puts it if it is not the installed one.
TRITONS = {
    "constraints-oldest.txt": ROOT / "build" / "triton-oldest",
    "constraints.txt": None,
}

#: Of the record, one part in so many is compiled again.
PARTS = 32
SAMPLE = int(aot.sources(), 16) % PARTS

GOOD = aot.Row(
    triton="0",
    target="sm_90",
    op="decode_attention",
    kind="q4_0",
    dtype="fp16",
    block=32,
    fit="",
    options="D 128",
    num_warps=4,
    registers=40,
    spills=0,
    shared_bytes=1024,
    instructions=100,
    instructions_per_value=3.0,
    loop_per_token=30.0,
    matrix=8,
    narrowest_load=8,
    typical_load=16,
    programs=3,
    barriers=12,
    fences=4,
    shuffles=34,
    narrow_shared=0,
    allocations=0,
)
RECORD = {aot.key(GOOD): {name: str(value) for name, value in asdict(GOOD).items()}}


def start_aot(
    *arguments: str, interpret: str | None = None, overlay: Path | None = None
) -> subprocess.Popen[str]:
    changes = {"TRITON_INTERPRET": interpret, "PYTHONPATH": overlay and str(overlay)}
    environment = {name: value for name, value in os.environ.items() if name not in changes}
    environment.update({name: value for name, value in changes.items() if value is not None})
    command = [sys.executable, "-m", "caramba_fast.bench.kernels.aot", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


# -- the gate -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and messages of a run with each Triton."""
    folder = tmp_path_factory.mktemp("aot")
    started = {}
    for name, overlay in TRITONS.items():
        assert overlay is None or (overlay / "triton").is_dir(), f"make {overlay}/.done"
        out = folder / name.replace(".txt", ".csv")
        arguments = ("--against", str(RECORDED), "--out", str(out), "--shard", f"{SAMPLE}/{PARTS}")
        started[name] = start_aot(*arguments, overlay=overlay)
    messages = {name: process.communicate()[1] for name, process in started.items()}
    return {name: (started[name].returncode, text) for name, text in messages.items()}


def test_the_record_is_of_these_kernels_and_has_no_problem():
    """All variants and targets, compiled by ``make aot``."""
    rows = [aot.Row.read(row) for row in aot.read_csv(RECORDED)]
    stale = {row.source for row in rows} - {aot.sources()}
    assert not stale, "kernels changed since bench/results/aot.csv was made: make aot"
    assert [problem for row in rows for problem in aot.problems(row)] == []


@pytest.mark.parametrize("constraints", TRITONS)
def test_a_part_of_the_record_is_compiled_again(compilers, constraints):
    """Which part depends on the kernels."""
    status, messages = compilers[constraints]
    assert status == 0, messages
    count = len(range(SAMPLE, len(variants()) * len(aot.TARGETS), PARTS))
    assert f"{count} kernels compiled, 0 problems" in messages


def test_comments_do_not_make_a_record_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "__file__", str(tmp_path / "bench" / "kernels" / "aot.py"))
    monkeypatch.setattr(aot, "SOURCES", ("*.py",))
    found = []
    for text in (
        "def f():\n    'a'\n    return 1\n",
        "def f():\n    return 1  # b\n",
        "def f():\n    return 2\n",
    ):
        (tmp_path / "x.py").write_text(text)
        aot.sources.cache_clear()
        found.append(aot.sources())
    aot.sources.cache_clear()
    assert found[0] == found[1] != found[2]


def test_the_record_holds_every_variant_and_target_of_both_tritons_once():
    found = [aot.identity(row) for row in aot.read_csv(RECORDED)]
    wanted = {
        aot.identity({"triton": pinned(name), "target": target, **vars(variant)})
        for name in TRITONS
        for target in aot.TARGETS
        for variant in variants()
    }
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_the_table_stays_small():
    assert len(variants()) <= 120


# -- what the gate catches ----------------------------------------------------------------------


def test_a_good_row_passes():
    assert aot.problems(GOOD, RECORD) == []
    assert aot.problems(replace(GOOD, loop_per_token=29.0), RECORD) == []
    assert aot.problems(replace(GOOD, kind="fp16", narrowest_load=4)) == []


def test_a_few_bytes_may_spill_where_a_card_was_faster_with_them():
    kept = replace(GOOD, target="sm_90", op="decode_attention", kind="q8_channel/q8_0", spills=16)
    assert aot.problems(kept) == []
    for row in (
        replace(kept, spills=20),
        replace(kept, target="sm_100"),
        replace(kept, kind="q8_0"),
    ):
        assert "spills registers" in aot.problems(row)[0]


BAD = {
    "spills": replace(GOOD, spills=4),
    "232449 bytes of shared memory": replace(GOOD, shared_bytes=227 * 1024 + 1),
    "65537 bytes of shared memory": replace(GOOD, target="gfx942", shared_bytes=64 * 1024 + 1),
    "no matrix instruction": replace(GOOD, matrix=0),
    "loads K or V 4 bytes": replace(GOOD, narrowest_load=4),
    "loads K or V 2 bytes": replace(GOOD, kind="q8_0/fp16", narrowest_load=2),
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_row_is_caught(words):
    (problem,) = aot.problems(BAD[words])
    assert words in problem
    assert BAD[words].target in problem


@pytest.mark.parametrize(("words", "changes"), [
    ("takes 30.1 instructions a token in its main loop, 30 recorded", {"loop_per_token": 30.1}),
    ("has 13 barriers in its main loop, 12 recorded", {"barriers": 13}),
    ("has 5 fences in its main loop, 4 recorded", {"fences": 5}),
    ("has 35 shuffles in its main loop, 34 recorded", {"shuffles": 35}),
    ("by one or two bytes a thread 1 times in its main loop, 0 recorded", {"narrow_shared": 1}),
    ("takes shared memory 2 times within loops, 0 recorded", {"allocations": 2}),
    ("runs 2 programs an SM at once, 3 recorded", {"programs": 2}),
    ("is not recorded", {"options": "D 96"}),
    ("is not recorded", {"triton": "1"}),
])  # fmt: skip
def test_a_row_worse_than_the_record_is_caught(words, changes):
    (problem,) = aot.problems(replace(GOOD, **changes), RECORD)
    assert words in problem


def test_a_bad_row_fails_the_command(tmp_path, monkeypatch):
    record = tmp_path / "aot.csv"
    monkeypatch.setattr(aot.triton.knobs.runtime, "interpret", False)
    for row, status in ((GOOD, 0), (replace(GOOD, spills=4), 1)):
        monkeypatch.setattr(aot, "rows", lambda *_, row=GOOD: iter([row]))
        aot.main(["--out", str(record), "--targets", "sm_90"])
        monkeypatch.setattr(aot, "rows", lambda *_, row=row: iter([row]))
        assert aot.main(["--against", str(record)]) == status
        assert aot.main([]) == 0


def test_interpreted_kernels_are_refused():
    process = start_aot("--targets", "sm_90", interpret="1")
    assert "TRITON_INTERPRET" in process.communicate()[1]
    assert process.returncode == 2


# -- what is measured ---------------------------------------------------------------------------

SASS = """
  REG:168 STACK:0 SHARED:0 LOCAL:16 CONSTANT[0]:1120 TEXTURE:0 SURFACE:0 SAMPLER:0
        /*0000*/                   LDG.E R2, [R2.64] ;              /* 0x0 */
        /*0010*/                   LDG.E.64 R4, [R2.64] ;           /* 0x0 */
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64] ;
        /*0030*/                   HMMA.16816.F32 R4, R4, R8, R12 ; /* 0x0 */
        /*0040*/                   LDG.E.U16 R2, [R2.64] ;          /* 0x0 */
        /*0050*/              @!P0 BRA 0x20 ;                       /* 0x0 */
        /*0060*/                   HGMMA.64x16x16.F32 R4, R4, gdesc[UR4] ;
        /*0070*/               @P0 BRA 0x60 ;                       /* 0x0 */
        /*0080*/                   EXIT ;                           /* 0x0 */
        /*0090*/                   BRA 0x90 ;                       /* 0x0 */
        /*00a0*/                   NOP ;                            /* 0x0 */
"""
AMD = """
.LBB0_0:
\tv_mov_b32_e32 v0, 0
.LBB0_1:                               ; =>This Inner Loop Header: Depth=1
\tglobal_load_dwordx2 v[4:5], v[2:3], off
\tbuffer_load_ushort v6, v7, s[4:7], 0 offen
\tv_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
.Lfunc_end0:
  - .vgpr_count:     72
    .vgpr_spill_count: 1
    .sgpr_spill_count: 2
"""


def test_the_main_loop_of_sass():
    found = binary.nvidia(SASS, 64)
    assert (found.registers, found.spills, found.shared_bytes, len(found.lines)) == (168, 16, 64, 9)
    assert loop.main_loop(found) == loop.Loop(instructions=4, matrix=1, loads=(16, 2))


def test_the_main_loop_of_amd_assembly():
    found = binary.amd(AMD, 64)
    assert (found.registers, found.spills, len(found.lines)) == (72, 3, 6)
    assert loop.main_loop(found) == loop.Loop(instructions=4, matrix=1, loads=(8, 2))


def test_a_longer_loop_with_narrow_loads_alone_is_not_the_main_one():
    """On AMD, where no copy in the background says which loop is the codes'."""
    start, end = AMD.index(".LBB0_1:"), AMD.index("\ts_endpgm")
    tail = (
        AMD[start:end]
        .replace("LBB0_1", "LBB0_2")
        .replace("global_load_dwordx2", "global_load_ushort")
    )
    tail = tail.replace("\ts_cbranch", "\tv_mov_b32 v8, v9\n\ts_cbranch")
    found = loop.main_loop(binary.amd(AMD[:end] + tail + AMD[end:], 64))
    assert found == loop.Loop(instructions=4, matrix=1, loads=(8, 2))


@pytest.mark.parametrize(("line", "column"), [
    ("BAR.SYNC.DEFER_BLOCKING 0x0", "barriers"), ("s_barrier", "barriers"),
    ("MEMBAR.ALL.CTA", "fences"), ("FENCE.VIEW.ASYNC.S", "fences"),
    ("SHFL.BFLY PT, R5, R4, 0x2, 0x1f", "shuffles"), ("ds_bpermute_b32 v1, v2, v3", "shuffles"),
    ("LDS.U16 R3, [R4]", "narrow_shared"), ("STS.U8 [R4], R3", "narrow_shared"),
    ("ds_read_u16 v1, v2", "narrow_shared"), ("ds_write_b8 v1, v2", "narrow_shared"),
    ("LDS.128 R4, [R8]", None), ("STS.64 [R8], R4", None), ("ds_read_b128 v[0:3], v4", None),
    ("WARPSYNC 0xffffffff", None), ("LDG.E.U16 R2, [R2.64]", None),
])  # fmt: skip
def test_what_costs_more_than_a_slot(line, column):
    found = [name for name, form in loop.COSTLY.items() if form.search(line)]
    assert found == ([] if column is None else [column])


def test_what_is_costly_is_counted_within_the_main_loop():
    extra = "        /*0048*/                   BAR.SYNC 0x0 ;\n"
    within = SASS.replace("        /*0050*/", f"{extra}        /*0050*/")
    behind = SASS.replace("        /*0080*/", f"{extra.replace('0048', '0078')}        /*0080*/")
    counts = [
        loop.main_loop(binary.nvidia(x, 0)).costly["barriers"] for x in (SASS, within, behind)
    ]
    assert counts == [0, 1, 0]


def test_shared_memory_taken_within_loops():
    ir = """
  tt.func public @kernel() {
    %0 = ttg.local_alloc : () -> !ttg.memdesc<2x64xf16>
    %1 = scf.for %i = %a to %b step %c -> (tensor<1xf32>) : i32 {
      %2 = ttg.local_alloc %x : (tensor<16x64xf16>) -> !ttg.memdesc<16x64xf16>
      scf.if %p {
        %3 = ttg.local_alloc %y : (tensor<16x64xf16>) -> !ttg.memdesc<16x64xf16>
      }
    }
    %4 = ttg.local_alloc %z : (tensor<16x64xf16>) -> !ttg.memdesc<16x64xf16>
  }
"""
    assert loop.allocations(ir) == 2
    both = """
    %1 = scf.while (%i = %a) : (i32) -> i32 {
      %2 = ttg.local_alloc : () -> !ttg.memdesc<2x64xf16>
      scf.condition(%p) %i : i32
    } do {
    ^bb0(%i: i32):
      %3 = ttg.local_alloc : () -> !ttg.memdesc<2x64xf16>
      scf.yield %i : i32
    }
    %4 = ttg.local_alloc : () -> !ttg.memdesc<2x64xf16>
"""
    assert loop.allocations(both) == 2


@pytest.mark.parametrize(("target", "registers", "shared", "programs"), [
    ("sm_90", 168, 40_000, 3), ("sm_90", 168, 100_000, 2), ("sm_80", 128, 90_000, 1),
    ("sm_89", 40, 1024, 12), ("gfx942", 40, 1024, None),
])  # fmt: skip
def test_programs_an_sm_runs_at_once(target, registers, shared, programs):
    assert aot._programs(target, registers, shared, 4) == programs


def test_a_kernel_without_matrix_instructions_has_no_main_loop():
    found = binary.nvidia(SASS.replace("HMMA", "FFMA").replace("HGMMA", "FADD"), 0)
    assert loop.main_loop(found) == loop.Loop(instructions=0, matrix=0, loads=())


@pytest.mark.parametrize("name", [
    "HMMA.16816.F32", "IMMA.16832.S8.S8", "HGMMA.64x16x16.F32", "UTCHMMA gdesc[UR4]",
    "v_mfma_f32_16x16x16_f16", "v_smfmac_f32_16x16x32_f16",
])  # fmt: skip
def test_matrix_instructions(name):
    assert loop.MATRIX.search(name)


@pytest.mark.parametrize(("loads", "needed", "narrowest", "typical"), [
    ((16, 16, 8, 2), 32, 16, 16),
    ((16, 16, 8, 2), 40, 8, 16),
    ((16, 8, 8, 8, 2), 40, 8, 8),
    ((4, 4, 4, 4, 8), 16, 4, 8),  # the scales' load is the widest
    ((), 16, 0, 0),
])  # fmt: skip
def test_load_widths(loads, needed, narrowest, typical):
    cover = loop.Loop(100, 1, loads).cover(needed)
    assert (min(cover, default=0), loop.typical(cover)) == (narrowest, typical)


@pytest.mark.parametrize(("kind", "budget"), [("fp16", 124), ("q8_0", 66), ("q4_0", 35)])
def test_the_instruction_budget_of_an_h200(kind, budget):
    """At the 4.3 TB/s a copy reaches there: K and V of 128 values, with a scale for every 32."""
    card = replace(cards.CARDS["h200"], bandwidth=4.3e12)
    (variant,) = (
        v
        for v in variants()
        if (v.op, v.options, v.kind, v.dtype) == ("decode_attention", "D 128", kind, "fp16")
    )
    assert int(card.budget(variant.token_bytes)) == budget
    assert card.share(variant.token_bytes, budget) == 1.0
    assert card.share(variant.token_bytes, 2 * budget) == pytest.approx(0.5, abs=0.01)


def test_shares_are_those_of_the_targets_cards():
    found = cards.shares("sm_80", 144, 40.0)
    assert {name for name, share in found.items() if share} == {"a100"}
    found = cards.shares("sm_89", 144, 40.0)
    assert {name for name, share in found.items() if share} == {"rtx4090", "l4"}
    assert set(cards.shares("gfx942", 144, 40.0).values()) == {None}
    assert set(cards.CARDS) <= {field.name for field in fields(aot.Row)}
