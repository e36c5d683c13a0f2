"""What `bench.kernels.tune` chooses comes back in launches on the same GPU, and nowhere else."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.triton_cases import attend, build, check

from caramba_fast.bench.kernels import predict, tune, variants
from caramba_fast.kernels import splits, splits_launch, tiles_layout, tuned
from caramba_fast.kernels.tiles_layout import Settings

CHOSEN = {
    "kind": "q4_0", "streams": "q8_0/q4_0", "dim": 32, "query_rows": 16, "rows": 16, "tile": 64, "num_warps": 2,
    "num_stages": 2, "max_registers": "", "narrow": True, "chosen": True, "device": "some GPU",
}  # fmt: skip
TABLE = [
    {**CHOSEN, "part": "settings"},
    {**CHOSEN, "part": "settings", "tile": 32, "chosen": False},
    {
        **CHOSEN,
        "part": "splits",
        "program_overhead": 4.5,
        "merge_overhead": 0.05,
        "together_overhead": 0.5,
    },
    {**CHOSEN, "part": "resident", "resident": 3},
    {**CHOSEN, "part": "settings", "max_registers": 168, "dim": 64},
    {**CHOSEN, "part": "settings", "tile": 32, "device": "another GPU"},
]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Names a table of rows, on a GPU that is not there."""

    def use(rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / "tune.csv"
        names = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        monkeypatch.setenv(tuned.VARIABLE, str(path))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
        tuned._table.cache_clear()
        return path

    yield use
    tuned._table.cache_clear()


def test_a_table_says_settings_costs_and_residency(use):
    use(TABLE)
    gpu = torch.device("cuda")
    found = tuned.tuned("q8_0/q4_0", 32, 16, gpu)
    assert found == (Settings(16, 64, 2, 2, True), splits.Overheads(4.5, 0.05, 0.5), 3)
    assert tuned.tuned("q8_0/q4_0", 64, 16, gpu).settings == Settings(16, 64, 2, 2, True, 168)
    nothing = tuned.Tuned()
    assert tuned.tuned("q8_0/q8_0", 32, 16, gpu) == nothing
    assert tuned.tuned("q8_0/q4_0", 32, 32, gpu) == nothing
    assert tuned.tuned("q8_0/q4_0", 32, 16, torch.device("cpu")) == nothing


@pytest.mark.parametrize("rows", [
    [{**CHOSEN, "part": "settings", "tile": "wide"}], [{**CHOSEN, "part": "colour"}],
    [{key: x for key, x in CHOSEN.items() if key != "streams"} | {"part": "settings"}], [{"a": 1}],
], ids=["a word", "part", "no streams", "another table"])  # fmt: skip
def test_what_is_no_such_table_is_refused(rows, use):
    path = use(rows)
    with pytest.raises(ValueError, match=rf"CARAMBA_FAST_TUNED is '{path}', which is no table of"):
        tuned.tuned("q8_0/q4_0", 32, 16, torch.device("cuda"))
    path.unlink()
    tuned._table.cache_clear()
    with pytest.raises(ValueError, match="No such file"):
        tuned.tuned("q8_0/q4_0", 32, 16, torch.device("cuda"))


def test_without_the_variable_nothing_is_read(monkeypatch):
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    assert tuned.tuned("q8_0/q4_0", 32, 16, torch.device("cuda")) == tuned.Tuned()


@pytest.mark.parametrize("num_splits", [0, -1])
def test_launches_use_what_was_tuned(num_splits, monkeypatch):
    """A shorter tile than the page is taken; a longer one would reach into another page, and is not."""
    launched: list[Any] = []
    start = splits_launch.start

    def noted(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        launched.append((kernel.__name__, grid, args, options))
        start(kernel, grid, *args, **options)

    from caramba_fast.kernels import balanced_launch

    found = tuned.Tuned(
        Settings(16, 64, 2, 2, max_registers=168), splits.Overheads(1.0, 0.0, 0.5), 7
    )
    for module in (splits_launch, balanced_launch):
        monkeypatch.setattr(module, "start", noted)
    monkeypatch.setattr(splits_launch, "tuned", lambda *_: found)
    monkeypatch.setattr(splits, "SHORTEST", 32)
    case = build(heads=2, lengths=(200, 31), slots=256)
    case.queries["k"] = case.queries["k"].half()
    check(case, num_splits=num_splits)
    name, grid, args, options = launched[-2]
    assert (args[-1].tile, options) == (64, {"num_warps": 2, "num_stages": 2, "maxnreg": 168})
    if num_splits:
        assert (name, grid) == ("balanced_kernel", (7 * splits.ASSUMED_PROCESSORS,))
    else:
        room = splits.Room(splits.ASSUMED_PROCESSORS, 7)
        assert grid[0] == splits.plan(256, 64, 4, room, 0, found.overheads)[0] == 4
    launched.clear()
    paged = build(["pages"], heads=2, lengths=(20, 31))
    paged.queries["k"] = paged.queries["k"].half()
    attend(paged, num_splits=num_splits)
    assert launched[-2][2][-1].tile == 32


@pytest.mark.parametrize("kinds, dim, rows, expected", [
    (("q4_channel", "q4_0"), 128, 16, Settings(16, 128, 4, 3)),
    (("q4_channel", "q4_0"), 128, 32, Settings(32, 128, 4, 3)),
    (("q8_channel", "q8_0"), 128, 16, Settings(16, 128, 4, 2)),
    (("q8_channel", "q8_0"), 128, 32, Settings(32, 128, 4, 2)),
    (("q8_channel", "q8_0"), 64, 16, Settings(16, 128, 4, 3, narrow=True)),
    (("q8_channel", "q8_0"), 256, 32, Settings(16, 64, 4, 2)),
    (("q8_0", "q8_0"), 128, 16, Settings(16, 128, 4, 3)),
])  # fmt: skip
def test_settings_of_sm_90_before_triton_3_9(kinds, dim, rows, expected, monkeypatch):
    """As an H200 was fastest; other generations, and keys by token, have what they had."""
    monkeypatch.setattr(tiles_layout, "LEAST_ROWS", 16)
    streams = [variants._stream(kind, dim, 1, "fp16", 32) for kind in kinds]
    assert tiles_layout.settings(streams, rows, 4096, major=9) == expected
    other = tiles_layout.settings(streams, rows, 4096)
    assert tiles_layout.settings(streams, rows, 4096, major=8) == other
    assert other.rows == 16 and other.max_registers is None
    monkeypatch.setattr(tiles_layout, "LEAST_ROWS", 8)
    later = tiles_layout.settings(streams, rows, 4096)
    assert tiles_layout.settings(streams, rows, 4096, major=9) == later


@pytest.mark.parametrize(("kinds", "dim", "rows", "warps"), [
    (("q4_channel", "q4_0"), 128, 4, 1), (("q8_channel", "nf4"), 64, 8, 1), (("q4_0", "q8_0"), 32, 1, 1),
    (("q4_channel", "q4_0"), 128, 9, 4), (("q4_channel", "q4_0"), 256, 4, 4), (("q8_0", "q4_0"), 32, 1, 4),
    (("fp16", "q4_0"), 128, 4, 4), (("q4_channel", "q4_channel"), 128, 4, 4),
])  # fmt: skip
def test_programs_of_few_rows_are_one_warp_where_values_are_whole_words(kinds, dim, rows, warps):
    streams = [variants._stream(kind, dim, 1, "fp16", 32) for kind in kinds]
    for major in (8, 9, 10):
        found = tiles_layout.settings(streams, rows, 4096, major)
        assert found.num_warps == warps
        assert warps > 1 or (found.rows, found.tile, found.narrow) == (8, 32, dim <= 64)
    assert tiles_layout.settings(streams, rows, 4096, warp=False).num_warps == 4
    assert tiles_layout.settings(streams, rows, 4096 + 16).num_warps == 4
    limits = (predict.WARP_ROWS, predict.WARP_WIDTH)  # a page is predicted without Triton
    assert limits == (tiles_layout.WARP_ROWS, tiles_layout.WARP_WIDTH)
    wide = [variants._stream(kind, dim, 1, "fp32", 32) for kind in kinds]
    assert tiles_layout.settings(wide, rows, 4096).num_warps == 4


@pytest.mark.parametrize(
    "overheads", [splits.Overheads(10.0, 0.22, 1.0), splits.Overheads(2.0, 0.04, 0.6)]
)
def test_costs_are_found_again_in_times_that_follow_the_model(overheads):
    tiles, programs, room = 256, 64, splits.Room(132, 2, 64)
    seconds = {}
    for n in tune.SPLITS:
        work, waves, used = splits.load(tiles, programs, n, room, overheads.together)
        seconds[n] = 2e-6 * (work + waves * overheads.program + used * overheads.merge)
    found = tune.fitted(seconds, tiles, programs, room)
    assert found is not None
    assert found.program == pytest.approx(overheads.program, rel=1e-3)
    assert found.merge == pytest.approx(overheads.merge, rel=1e-2)
    assert found.together == pytest.approx(overheads.together, abs=0.01)


def test_times_without_a_cost_of_tiles_say_nothing():
    """Longer splits that take less: no number of splits would be the best of such a model."""
    seconds = {n: 1e-6 * -(-64 * n // 264) * (300 - 256 / n) for n in (1, 2, 4, 8, 16, 32, 64)}
    assert tune.fitted(seconds, 256, 64, splits.Room(132, 2)) is None


def test_a_table_that_tune_wrote_can_be_read(tmp_path, monkeypatch):
    """On a CPU, interpreted: settings, numbers of splits and residencies, each with its time."""
    path = tmp_path / "tune.csv"
    assert tune.main(["--device", "cpu", "--tiny", "--out", str(path)]) == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["part"] for row in rows} == set(tuned.PARTS)
    assert {row["num_splits"] for row in rows if row["part"] == "splits"} == {"0", "1", "2", "4"}
    assert {row["resident"] for row in rows if row["part"] == "resident"} == {"", "1", "2"}
    assert all(row["median_us"] and not row["note"] for row in rows)
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: rows[0]["device"])
    found = tuned.tuned(rows[0]["streams"], 32, 8, torch.device("cuda"))
    chosen = next(r for r in rows if r["part"] == "settings" and r["chosen"] == "True")
    assert found.settings is not None and found.settings.tile == int(chosen["tile"])


def test_a_point_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    points = [tune.Point(kind, 32, 8) for kind in ("q8_0", "q4_0")]
    monkeypatch.setattr(tune, "points", lambda _: points)
    tuned_at = []

    def rows(self: tune.Tuning) -> list[Any]:
        tuned_at.append(self.point.kind)
        if self.point.kind == "q8_0":
            raise ValueError("min() of nothing")
        return []

    monkeypatch.setattr(tune.Tuning, "rows", rows)
    assert tune.main(["--device", "cpu", "--tiny"]) == 1
    assert tuned_at == ["q8_0", "q4_0"] and "min() of nothing" in capsys.readouterr().out
    cases = []
    monkeypatch.setattr(tune, "workload", lambda case, *_, **__: cases.append(case) or 1 / 0)
    assert tune.main(["--device", "cpu", "--tiny", "--compile-only", "0/1"]) == 1
    assert {case.batch for case in cases} == {1}
    with pytest.raises(ZeroDivisionError):
        tune.tune(points[0], torch.device("cpu"), tiny=False, shard=tune.Shard())
    assert (cases[-1].batch, cases[-1].kv) == (1, 4096)
