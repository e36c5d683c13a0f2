"""Decode attention under a balanced schedule: the same results, equal shares, and no length on the host."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from support import cases
from support.launches import Launches
from support.triton_cases import EVERYTHING, attend, build, check

from caramba_fast import sharing
from caramba_fast.kernels import launch
from caramba_fast.ops import append_, use_backend
from caramba_fast.ops.attention_call import BALANCED

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, under the interpreter
    pytest.mark.skipif(
        "os.environ.get('TRITON_INTERPRET') != '1'", reason="the cases are built on the CPU"
    ),
]

CHANNEL = {"kinds": ("q4_channel", "q4_0"), "slots": 512}
#: Rows that differ: one long among short ones, rows without tokens in front, between and behind.
RAGGED = {
    "one long": (3, 500, 1, 40, 33),
    "empty rows": (0, 70, 0, 0, 200, 31, 0),
    "one row": (300,),
    "equal rows": (128, 128, 128),
}


@pytest.fixture(autouse=True)
def many_programs(monkeypatch):
    """As many as cut every batch here."""
    from caramba_fast.kernels import splits

    monkeypatch.setattr(splits, "ASSUMED_PROCESSORS", 12)
    splits.processors.cache_clear()
    yield
    splits.processors.cache_clear()


@pytest.mark.parametrize("layer", [{"slots": 512}, CHANNEL], ids=["by token", "by channel"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_rows_of_different_lengths(lengths, layer):
    check(build(("rotate_v",), lengths=lengths, heads=2, **layer), num_splits=BALANCED)


@pytest.mark.parametrize(
    "layer", [{"slots": 256}, {**CHANNEL, "slots": 256}], ids=["by token", "by channel"]
)
@pytest.mark.parametrize("options", [
    ("pages",), ("leftpad", "query_lens"), ("tail", "sinks"), ("window",), ("window_with_sinks", "pages"),
    ("softcap", "null", "s_aux"), EVERYTHING,
], ids="+".join)  # fmt: skip
def test_options(options, layer):
    check(build(options, tokens=3, heads=2, lengths=(9, 200, 45), **layer), num_splits=BALANCED)


@pytest.mark.parametrize("options", [("rotate_k", "leftpad"), EVERYTHING], ids=len)
def test_two_keys(options):
    layer = {"decoupled": True, "tokens": 2, "slots": 256, "lengths": (9, 200, 45)}
    check(build(options, **layer), num_splits=BALANCED)
    check(build(options, **layer, kinds=("q4_channel", "q8_channel", "q4_0")), num_splits=BALANCED)


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(6, 2, 3), (3, 1, 17), (4, 1, 16)])
def test_row_groups(heads, kv_heads, tokens):
    """More query rows than one program takes."""
    layer = {"heads": heads, "kv_heads": kv_heads, "tokens": tokens, "ring": 32}
    check(build(**layer, lengths=(45, 250, 20), slots=256), num_splits=BALANCED)
    check(build(**layer, lengths=(45, 250, 20), **CHANNEL), num_splits=BALANCED)


def test_more_rows_than_are_looked_at_together():
    lengths = [5] * 130 + [100, 0, 7]
    check(build(heads=1, kv_heads=1, lengths=lengths, slots=128), num_splits=BALANCED)


@pytest.mark.parametrize("options", [(), ("pages", "tail", "window"), ("leftpad", "sinks", "window_with_sinks")],
                         ids="+".join)  # fmt: skip
def test_zero_queries_give_the_plain_mean_over_what_is_allowed(options):
    case = build(
        options, tokens=3, kinds=("fp32", "fp32"), heads=2, lengths=(9, 200, 45), slots=256
    )
    case.streams["v"].given[:] = torch.arange(200.0)[:, None]
    with use_backend("reference"):
        case.append(append_)
    case.queries["k"].zero_()
    out, lse = attend(case, num_splits=BALANCED)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def merging_costs(monkeypatch: pytest.MonkeyPatch, tiles: float) -> None:
    from caramba_fast.kernels import splits, splits_launch

    monkeypatch.setattr(
        splits_launch, "assumed_overheads", lambda *_: splits.Overheads(10.0, tiles, 0.5)
    )


# -- shares -------------------------------------------------------------------------------------


def shares(
    monkeypatch: pytest.MonkeyPatch, case: cases.Case, **more: Any
) -> tuple[Counter[int], set[Any]]:
    """Tiles of the codes that each program reads, and (row, lane, tile) of all of them."""
    from triton.runtime import interpreter

    from caramba_fast.kernels import splits, tiles_kernel

    read, found = Counter[int](), set[Any]()
    original = tiles_kernel._attend

    def noted(
        q, q_geo, k, g, v, table, result, rows, split, span, limits, slots, softcap, source, *rest
    ):
        if source == splits.CODES:
            begin, end = (int(x.handle.data.item()) for x in split[:2])
            program = interpreter.interpreter_builder.grid_idx[0]
            read[program] += end - begin
            row = int(k[0].handle.data.reshape(-1)[0])
            tiles = {(row, tile) for tile in range(begin, end)}
            assert not tiles & found, "a tile that two programs read"
            found.update(tiles)
        return original(
            q, q_geo, k, g, v, table, result, rows, split, span, limits, slots, softcap, source, *rest
        )  # fmt: skip

    monkeypatch.setattr(tiles_kernel, "_attend", noted)
    check(case, **more)
    return read, found


@pytest.mark.parametrize(
    "lengths", [(8, 2000, 40, 90, 1), (600, 0, 610, 590), (3, 3, 2048)], ids=str
)
def test_no_program_reads_more_than_a_tile_beyond_the_mean(lengths, monkeypatch):
    """By shape alone a row of 2000 tokens among short ones is read by as few programs as any of them."""
    merging_costs(monkeypatch, 0.0)
    case = build(heads=2, lengths=lengths, slots=2048)
    read, tiles = shares(monkeypatch, case, num_splits=BALANCED)
    programs = 24
    assert len(read) <= programs and sum(read.values()) == len(tiles)
    tile = 32  # of float32 queries
    wanted = sum(2 * -(-length // tile) for length in lengths)
    assert len(tiles) == wanted
    assert max(read.values()) <= wanted / programs + 1


def test_a_long_row_is_cut_into_as_many_pieces_as_pay(monkeypatch):
    """Merging costs: 64 tiles of one line are not cut into 24 where one merged piece costs as much as a tile."""
    case = build(heads=1, kv_heads=1, lengths=(2048,), slots=2048)
    merging_costs(monkeypatch, 1.0)
    read, _ = shares(monkeypatch, case, num_splits=BALANCED)
    assert max(read.values()) == 8 and len(read) == 8


# -- what does not change -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [("tail", "sinks", "rotate_k", "window"), ("pages", "leftpad"), ()], ids=len
)
def test_a_launch_depends_on_shapes_and_never_on_lengths(options, monkeypatch):
    """So that one CUDA graph serves a batch whatever its rows hold."""
    from caramba_fast.kernels import balanced_launch, splits_launch

    case = build(options, slots=1024, lengths=(40, 3, 25), heads=2)
    seen = []
    for lengths in ((3, 3, 3), (900, 2, 1000), (0, 0, 0)):
        noted = Launches()
        for module, name in (
            (splits_launch, "prepare_kernel"), (balanced_launch, "schedule_kernel"),
            (balanced_launch, "balanced_kernel"), (splits_launch, "merge_kernel"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, noted)
        attend(case, cache_seqlens=cases.rows(*lengths), num_splits=BALANCED)
        seen.append(noted.seen)
    assert len(seen[0]) >= 3 and seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("num_splits", [0, 3])
def test_without_it_a_row_has_the_same_bits_whatever_the_others_hold(num_splits):
    case = build(heads=2, lengths=(200, 256, 40), slots=256)
    alone = attend(case, num_splits=num_splits)
    for lengths in ((200, 0, 1), (200, 17, 256)):
        for found, one in zip(
            attend(case, cache_seqlens=cases.rows(*lengths), num_splits=num_splits),
            alone,
            strict=True,
        ):
            assert torch.equal(found[0], one[0])


def test_the_same_batch_has_the_same_bits_again():
    case = build(heads=2, lengths=(200, 256, 40), slots=256)
    for found, one in zip(
        attend(case, num_splits=BALANCED), attend(case, num_splits=BALANCED), strict=True
    ):
        assert torch.equal(found, one)


def test_a_prompt_takes_the_option_as_well():
    """Its blocks of queries fill a GPU by themselves, and are scheduled as ever."""
    case = build(tokens=5, lengths=(45, 18))
    for found, one in zip(
        attend(case, extends=True, num_splits=BALANCED), attend(case, extends=True), strict=True
    ):
        assert torch.equal(found, one)


def test_keys_of_two_threads_never_have_the_same_number() -> None:
    """A key's hash may run Python, and let the other thread in."""
    together = threading.Barrier(2, timeout=5)

    class Key:
        met = False

        def __init__(self, name: int) -> None:
            self.name = name

        def __hash__(self) -> int:
            if not self.met:
                self.met = True
                together.wait()
            return hash(self.name)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Key) and other.name == self.name

    keys = [Key(1), Key(2)]

    def look(key: Key) -> None:
        with sharing.shared({}):
            launch.once(key, lambda: torch.zeros(1))

    threads = [threading.Thread(target=look, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sharing.shared({}):
        found = [launch.once(key, lambda n=n: torch.tensor(n)) for n, key in enumerate(keys)]
    assert [int(x) for x in found] == [0, 1]
