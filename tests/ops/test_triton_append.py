"""The Triton kernels of append_ and decoupled_append_ against the reference, bit for bit.

Every buffer is filled with noise before and compared whole after, so a write that goes anywhere else shows.
On the CPU they run interpreted; ``--device cuda`` compiles them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cases, dense
from support.append_layers import OPS, SLOTS, both, buffers, differing, layer, placed
from support.blocks import same_bits
from support.tolerances import relative_l2
from torch import Tensor

from caramba_fast.ops import (
    KVView,
    decode_attention,
    decoupled_decode_attention,
    use_backend,
)
from caramba_fast.ops.append import append_op, decoupled_append_op
from caramba_fast.ops.registry import DECOUPLED, STANDARD, append_schema

pytest.importorskip("triton")
pytestmark = [  # numpy, under the interpreter: scales beyond fp16, inf * 0
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
ATTENTION = {2: decode_attention, 3: decoupled_decode_attention}
#: Both kinds of code, whole bytes and halves, and both ways to find a scale; then plain values.
MIXES = (("q8_0", "q4_0"), ("nf4", "bf16"), ("fp16", "fp32"))
#: By channel, with a ring that holds a group and more.
CHANNEL = {"kinds": ("q4_channel", "q8_channel"), "ring": 45, "tokens": 34}


@pytest.fixture(autouse=True)
def _device(device: torch.device) -> Iterator[None]:
    """On a GPU the launchers may not wait for it."""
    if device.type == "cuda":
        assert os.environ.get("TRITON_INTERPRET") != "1", "--device cuda must compile the kernels"
    yield


@pytest.fixture
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens are written as a prompt: the interpreter pays for each program."""
    from caramba_fast.kernels import append

    monkeypatch.setattr(append, "PROMPT_TOKENS", 2)


one_tile = pytest.mark.usefixtures("_tiles")


# -- formats and shapes -------------------------------------------------------------------------


@one_tile
@pytest.mark.parametrize("kinds", MIXES, ids="/".join)
@pytest.mark.parametrize(
    ("heads", "dim"), [(2, 64), (3, 80), (6, 8), (1, 96), (3, 112), (3, 24), (1, 256)]
)
def test_formats_and_lanes(kinds, heads, dim, device):
    """80 and 8 pad the last lane with heads that do not exist."""
    assert not differing(layer(kinds, (dim, dim), heads=heads), device)


@one_tile
@pytest.mark.parametrize("kinds", [("q8_0", "q4_0"), ("nf4", "nf4")], ids="/".join)
@pytest.mark.parametrize(("dim", "block"), [(32, 32), (128, 64), (128, 128)])
def test_least_squares_scales_and_blocks(kinds, dim, block, device):
    assert not differing(layer(kinds, (dim, dim), block=block, fit="mse"), device)


@one_tile
@pytest.mark.parametrize("dim", [48, 80, 5, 1])
@pytest.mark.parametrize("rotate", ["", "k"])
def test_plain_lanes_of_any_width(dim, rotate, device):
    """Without scales the ops take lanes that are no multiple of 32."""
    given = layer(
        ("fp32", "fp16"),
        (dim, dim),
        heads=2,
        sink=4,
        per_lane=1,
        rotate=rotate,
    )
    got, wanted = map(buffers, both(given, device))
    for name, x in wanted.items():
        exact = not rotate or name.startswith("v")
        assert same_bits(got[name], x) if exact else relative_l2(got[name], x) < 1e-3, name


@one_tile
def test_streams_differ_in_everything(device):
    given = layer(("q4_0", "fp16"), (80, 16), heads=2, ring=4)
    given.views["k"] = replace(given.views["k"], fit="mse")
    assert not differing(given, device)


@one_tile
@pytest.mark.parametrize(
    ("kinds", "sides"),
    [(("q8_0", "fp16", "nf4"), {}), (("q4_channel", "q4_channel", "q4_0"), {"ring": 45, "tokens": 34, "sink": 4})],
    ids=["by token", "by channel"],
)  # fmt: skip
def test_one_stream_at_a_time_where_the_scalars_of_three_spill(kinds, sides, device, monkeypatch):
    """As on AMD; elsewhere all of them are one launch."""
    from caramba_fast.kernels import append

    monkeypatch.setattr(torch.version, "hip", "as if")
    launches = []
    whole = append.launch
    monkeypatch.setattr(
        append, "launch", lambda names, *a: (launches.append(names), whole(names, *a))
    )
    given = layer(kinds, (32, 32, 64), pages=[[4, 1], [0, 3]], start=(5, 30), **sides)
    assert not differing(given, device)
    assert launches[-3:] == [("k_sem",), ("k_geo",), ("v",)]


# -- groups of tokens by channel ------------------------------------------------------------------


@one_tile
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 80), (6, 8), (1, 96)])
@pytest.mark.parametrize("tokens", [12, 34])
def test_groups_of_formats_and_lanes(heads, dim, tokens, device):
    """34 tokens take the ring's slots of older ones that are still to be encoded: two launches."""
    given = {**CHANNEL, "tokens": tokens}
    assert not differing(layer(dims=(dim, dim), heads=heads, start=(5, 22), **given), device)


@one_tile
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("tokens", [70, 5])
@pytest.mark.parametrize("start", [(0, 59), (27, 64)])
def test_groups_that_begin_and_end_anywhere(group, tokens, start, device):
    given = layer(
        ("q4_channel", "q4_0"), (64, 64), block=group, start=start, tokens=tokens, ring=75, sink=3,
        cache_leftpad=(1, 9), query_lens=(tokens, tokens - 2),
    )  # fmt: skip
    assert not differing(given, device)


@pytest.mark.parametrize("start", [(31, 63), (30, 95), (31, 64)])
def test_a_step_that_ends_a_group(start, device):
    given = layer(("q8_channel", "q4_0"), (64, 64), start=start, tokens=1, ring=33, sink=2)
    assert not differing(given, device)


@one_tile
@pytest.mark.parametrize("table", [[[3, 1], [4, -1]], [[-1, 2], [5, 7]]])
def test_groups_in_pages(table, device):
    given = layer(start=(30, 62), pages=table, sink=4, cache_leftpad=(31, 20), **CHANNEL)
    got, wanted = map(buffers, both(given, device))
    assert all(same_bits(got[name], wanted[name]) for name in wanted)


@one_tile
def test_groups_of_three_streams_and_of_new_tensors_of_any_strides(device):
    kinds = ("q4_channel", "q8_channel", "q4_0")
    given = layer(kinds, (8, 16, 32), heads=5, ring=40, start=(5, 30), tokens=30, block=32)
    given.new = {name: NEW["tokens before heads"](x) for name, x in given.new.items()}
    assert not differing(given, device)


@one_tile
def test_damage_of_a_group_stays_in_its_channel(device):
    """In new tokens and in those that wait in the ring; in sinks it does not count."""
    given = layer(dims=(64, 64), start=(20, 30), sink=2, **CHANNEL)
    for x in given.new.values():
        for i, bad in enumerate((torch.nan, torch.inf, -torch.inf, 7e4, -0.0)):
            x[:, :, 3 * i, i] = bad
    given.views["k"].tail[0, 0, 3, 20] = torch.nan
    got, wanted = both(given, device)
    for (name, a), b in zip(buffers(got).items(), buffers(wanted).values(), strict=True):
        assert same_bits(a, b), name
    assert got.views["k"].scales[0, 0, 0].isnan().nonzero().flatten().tolist() == [
        *range(4), 20, *range(64, 68), 84,
    ]  # fmt: skip


@one_tile
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 80)])
def test_groups_of_rotated_heads(heads, dim, device):
    """Sums in another order: the ring within rounding, values as near as the reference's."""
    given = layer(dims=(dim, dim), heads=heads, start=(5, 22), rotate="kv", **CHANNEL)
    got, wanted = both(given, device)
    for name in given.views:
        a, b = got.views[name], wanted.views[name]
        assert relative_l2(a.tail, b.tail) <= 1e-4
        values = [dense.decoded(x.codes, x.scales, x.kind)[:, :, :32] for x in (a, b)]
        assert relative_l2(*values) <= 1e-2
        assert same_bits(a.codes[:, :, 64:], given.views[name].codes[:, :, 64:])


NEW: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda x: torch.cat((x, x), -1)[..., 32:],
    "last dimension strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one row repeated": lambda x: x[:1].expand(2, -1, -1, -1),
}


@one_tile
@pytest.mark.parametrize("layout", NEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_new_tensors_of_any_dtype_and_strides(layout, dtype, device):
    given = layer(heads=2, dtype=dtype)
    given.new = {name: NEW[layout](x) for name, x in given.new.items()}
    assert not differing(given, device)


@one_tile
@pytest.mark.parametrize("fit", ["amax", "mse"])
def test_damage_stays_visible_and_where_it_is(fit, device):
    given = layer(("q4_0", "q8_0"), (64, 64), fit=fit, ring=4)
    for x in given.new.values():
        x[0, 0, 0, 3], x[0, 0, 1, 40], x[1, 0, 2, 63] = torch.nan, torch.inf, -torch.inf
        x[1, 0, 0, :32] = 0
    got, wanted = both(given, device)
    for (name, a), b in zip(buffers(got).items(), buffers(wanted).values(), strict=True):
        assert same_bits(a, b), name
    assert got.views["k"].scales[0, 0, 5:7].isnan().tolist() == [[True, False], [False, True]]


@one_tile
def test_three_streams(device):
    given = layer(
        ("q4_0", "q8_0", "nf4"), (8, 16, 32), heads=5, ring=8, sink=7, cache_leftpad=(4, 0)
    )
    assert not differing(given, device)


# -- places -------------------------------------------------------------------------------------


@one_tile
@pytest.mark.parametrize("start", [(SLOTS - 1, SLOTS), (SLOTS + 9, 0)])
def test_tokens_past_the_capacity_are_dropped(start, device):
    assert not differing(layer(start=start, ring=8), device)


@one_tile
@pytest.mark.parametrize("table", [[[3, 1], [4, -1]], [[-1, 2], [5, 7]]])
@pytest.mark.parametrize("leftpad", [(0, 2), (31, 20)])
def test_pages(table, leftpad, device):
    """Tokens cross from page to page; -1, pages that do not exist and past the table are dropped."""
    given = layer(
        ("q8_0", "bf16"), start=(30, 62), tokens=5, pages=table, sink=4, cache_leftpad=leftpad
    )
    got, wanted = map(buffers, both(given, device))
    assert all(same_bits(got[name], wanted[name]) for name in wanted)


@one_tile
def test_a_block_table_that_is_part_of_another(device):
    given = layer(start=(30, 5), pages=[[3, 1], [4, -1]])
    table = given.place["block_table"]
    wanted = buffers(both(given, device)[1])
    wide = torch.cat((table, torch.full_like(table, -1)), 1)
    for part in (wide[:, :2], wide.T.contiguous().T[:, :2]):
        there = given.to(device)
        there.place["block_table"] = placed(part, device)
        with use_backend("triton"):
            found = buffers(there.append().to(torch.device("cpu")))
        assert all(same_bits(found[name], wanted[name]) for name in wanted)


@one_tile
@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("query_lens", [None, (7, 0), (2, 9)])
def test_tail_and_sinks_of_ragged_rows(tokens, query_lens, device):
    """More tokens than the ring has slots: the newest stay; the first real ones are sinks."""
    place = {} if query_lens is None else {"query_lens": query_lens}
    given = layer(
        ("nf4", "q8_0"),
        tokens=tokens,
        start=(0, 59),
        ring=5,
        sink=3,
        cache_leftpad=(1, 60),
        **place,
    )
    assert not differing(given, device)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_step_of_decoding(tokens, device):
    """As it is launched: a program a token."""
    given = layer(("q4_0", "nf4"), (40, 40), heads=5, tokens=tokens, fit="mse", ring=4)
    assert not differing(given, device)


def test_a_prompt_of_several_programs(device, monkeypatch):
    from caramba_fast.kernels import append

    monkeypatch.setattr(append, "PROMPT_VALUES", 512)
    given = layer(
        ("q8_0", "q4_0"), (96, 32), tokens=41, start=(0,), ring=7, sink=3, query_lens=(37,)
    )
    assert not differing(given, device)


def spread(x: Tensor, axis: int, step: int) -> Tensor:
    """x with ``step`` elements from one index of ``axis`` to the next; what lies between is never touched."""
    strides = [step if i == axis else x.stride(i) for i in range(x.ndim)]
    size = 1 + sum((n - 1) * by for n, by in zip(x.shape, strides, strict=True))
    return torch.empty(size, dtype=x.dtype, device=x.device).as_strided(x.shape, strides).copy_(x)


@one_tile
@pytest.mark.parametrize("part", ["row", "page", "lane", "new row", "new head", "new token"])
def test_more_than_2_to_the_31_elements(part, device):
    """Strides fit into 32 bits, offsets do not. The memory between is reserved, not used."""
    pages = [[4, 1], [0, -1]] if part == "page" else None
    start = (5, 30) if part == "page" else (5, 9, 30)
    given = layer(("q8_0", "fp16"), heads=3, start=start, pages=pages, dtype=torch.float16)
    with use_backend("reference"):
        wanted = buffers(copy.deepcopy(given).append())
    there, step = given.to(device), 2**30 + 64
    if part.startswith("new"):
        axis = ("new row", "new head", "new token").index(part)
        there.new["k"] = spread(there.new["k"], axis, step)
    else:
        axis = 1 if part == "lane" else 0
        view = there.views["k"]
        codes = spread(view.codes, axis, 2**29 + 64 if part == "page" else step)
        there.views["k"] = replace(view, codes=codes)
    with use_backend("triton"):
        there.append()
    found = buffers(there)
    assert all(same_bits(found[name].cpu(), wanted[name]) for name in wanted)


def test_nothing_to_do(device):
    given = layer(query_lens=(0, 0), ring=2).to(device)
    before = {name: x.clone() for name, x in buffers(given).items()}
    with use_backend("triton"):
        given.append()
        stored = [part for v in given.views.values() for part in (v.codes, v.scales)]
        for axis in range(3):
            empty = [x.narrow(axis, 0, 0) for x in given.new.values()]
            append_op(*stored, *empty, given.start[: len(empty[0])], "q8_0", "q4_0")
    assert all(same_bits(x, before[name]) for name, x in buffers(given).items())


def test_slots_apart_are_refused(device):
    given = layer().to(device)
    codes = given.views["k"].codes
    apart = torch.cat((codes, codes), -1)[..., : codes.shape[-1]]
    given.views["k"] = replace(given.views["k"], codes=apart)
    with use_backend("triton"), pytest.raises(NotImplementedError, match="k_codes of strides"):
        given.append()


def test_a_single_slot_or_value_may_have_any_stride(device):
    given = layer(start=(0, 0), tokens=1)
    for name, view in given.views.items():
        parts = {n: getattr(view, n)[:, :, :1] for n in ("codes", "scales")}
        parts["scales"] = parts["scales"].as_strided((2, 1, 1, 1), (SLOTS, SLOTS, 7, 9))
        given.views[name] = replace(view, **parts)
    assert not differing(given, device)


def test_wider_heads_than_can_be_rotated_are_refused(device):
    given = layer(("fp16", "fp16"), (1024, 32), rotate="k").to(device)
    with use_backend("triton"), pytest.raises(NotImplementedError, match="narrower than 1024"):
        given.append()


# -- the rotation -------------------------------------------------------------------------------


@one_tile
@pytest.mark.parametrize("kinds", [("fp32", "fp16"), ("q4_0", "q8_0")], ids="/".join)
@pytest.mark.parametrize(("heads", "dim"), [(4, 8), (2, 40), (3, 80), (1, 96), (1, 128)])
def test_rotation(kinds, heads, dim, device):
    """Sums in another order: values within rounding, codes as near to the values as the reference's."""
    given = layer(
        kinds, (dim, dim), heads=heads, start=(5,), fit="mse", ring=4, sink=9, rotate="kv"
    )
    got, wanted = both(given, device)
    for name in given.views:
        a, b = got.views[name], wanted.views[name]
        for part, rounding in (("tail", 1e-4), ("sink", 1e-4)):
            assert relative_l2(getattr(a, part), getattr(b, part)) <= rounding
        for part in ("codes", "scales", "tail", "sink"):
            assert_only_written(part, a, b, given.views[name])
        values = [dense.decoded(x.codes, x.scales, x.kind)[:, :, 5:8] for x in (a, b)]
        error = relative_l2(*values)
        assert error <= {"fp32": 1e-6, "fp16": 1e-4, "q8_0": 1e-3, "q4_0": 1e-2}[a.kind]


def assert_only_written(part: str, got: KVView, wanted: KVView, before: KVView) -> None:
    """Slots that the reference left alone hold the same bits as before."""
    a, b, c = (getattr(view, part) for view in (got, wanted, before))
    if a is not None:
        alone = (b == c).all(-1)
        assert same_bits(a[alone], c[alone])


@one_tile
def test_damage_of_a_rotated_head_stays_in_it(device):
    given = layer(("q4_0", "fp32"), (80, 80), heads=2, rotate="kv")
    for x in given.new.values():
        x[0, 0, 0, 5], x[1, 1, 2, 79] = torch.nan, torch.inf
    got, _ = both(given, device)
    stored = dense.by_head(dense.decoded(got.views["v"].codes, None, "fp32"), 2, 80)
    assert not stored[0, 0, 5, :64].isfinite().any() and stored[0, 1, 5].isfinite().all()
    assert not stored[1, 1, 32, 64:].isfinite().any() and stored[1, 0, 32].isfinite().all()
    assert got.views["k"].scales[0, 0, 5].isnan().tolist() == [True, True, False, False, False]
    assert got.views["k"].scales[1, 0, 32].isnan().tolist() == [False] * 4 + [True]


# -- read back ----------------------------------------------------------------------------------

STORED = ("pages", "leftpad", "query_lens", "tail", "sinks")


@pytest.mark.parametrize("rotate", [(), ("rotate_k", "rotate_v")], ids=str)
@pytest.mark.parametrize("kinds", [
    ("q4_0", "nf4"), ("q4_0", "q8_0", "nf4"), ("q4_channel", "q4_0"), ("q4_channel", "q8_channel", "nf4"),
], ids="/".join)  # fmt: skip
@pytest.mark.skipif(
    "os.environ.get('TRITON_INTERPRET') != '1'", reason="the cases are built on the CPU"
)
def test_what_append_writes_decode_attention_reads(kinds, rotate):
    """Both ops by Triton against both by the reference; rotation may round a few codes another way."""
    dims = dict(zip(STANDARD if len(kinds) == 2 else DECOUPLED, (32, 16, 32), strict=False))
    given = cases.build(
        (*STORED, *rotate), kinds=kinds, dims=dims, tokens=2, lengths=(150, 70), slots=160
    )
    results = []
    for backend in ("triton", "reference"):
        case = copy.deepcopy(given)
        with use_backend(backend):
            case.append(OPS[len(kinds)])
            results.append(case.attend(ATTENTION[len(kinds)]))
        cases.check(results[-1], case.expected())
    (out, lse), (wanted, wanted_lse) = results
    assert relative_l2(out, wanted) <= (2e-3 if rotate else 2e-6)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-3 if rotate else 1e-5)


# -- what the launchers promise -----------------------------------------------------------------


def test_one_launch_of_the_callers_own_tensors(monkeypatch):
    """Nothing is copied or read, and no number depends on lengths: a CUDA graph can hold it."""
    from caramba_fast.kernels import append

    given = layer(
        ("q4_0", "fp16"), (40, 40), heads=5, tokens=1, ring=4, sink=2, pages=[[3, 1], [4, -1]],
        cache_leftpad=(4, 0), query_lens=(1, 0), rotate="v",
    )  # fmt: skip
    launches: list[tuple[Any, ...]] = []

    class Noted:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: launches.append((grid, args, options))

    monkeypatch.setattr(append, "append_kernel", Noted())
    with use_backend("triton"):
        given.append()
        given.start += 1
        given.append()
    known = [given.start, *given.new.values(), *given.place.values(), *buffers(given).values()]
    places = {x.data_ptr() for x in known}
    (grid, args, options), (grid_later, args_later, options_later) = launches
    passed = [x for part in args if isinstance(part, tuple) for x in part]
    assert {x.data_ptr() for x in passed if isinstance(x, Tensor)} == places
    assert (grid, options) == (grid_later, options_later)
    assert numbers(args) == numbers(args_later)


def numbers(args: Any) -> Any:
    """Arguments without tensors."""
    if isinstance(args, tuple):
        return [numbers(x) for x in args]
    return None if isinstance(args, Tensor) else args


def test_streams_are_those_of_the_ops():
    from caramba_fast.kernels import append, decoupled_append

    assert (append.STREAMS, decoupled_append.STREAMS) == (STANDARD, DECOUPLED)


@pytest.mark.parametrize(
    ("op", "kinds", "dims"),
    [
        (append_op, ("q8_0", "q4_0"), (32, 32)),
        (decoupled_append_op, ("q8_0", "fp16", "nf4"), (8, 16, 8)),
        (append_op, ("q4_channel", "q4_0"), (32, 32)),
        (decoupled_append_op, ("q4_channel", "fp16", "q8_channel"), (8, 16, 8)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_opcheck(op, kinds, dims, device):
    """As an op of its own: on the CPU the dispatcher would choose another implementation."""
    names = STANDARD if len(kinds) == 2 else DECOUPLED
    ring = 33 if "q4_channel" in kinds else 2
    given = layer(kinds, dims, heads=1, tokens=1, start=(31,), ring=ring, query_lens=(1,)).to(
        device
    )
    space = f"test_triton_{op.name}_{'_'.join(kinds)}"
    library = torch.library.Library(space, "DEF")
    library.define(f"append{append_schema(names)}")
    library.impl("append", op.launcher, device.type.upper())
    torch.library.register_fake(f"{space}::append", lambda *a, **o: None, lib=library)
    options: dict[str, Any] = dict(given.place)
    for name, view in given.views.items():
        options |= view.options(name)
    stored = [part for view in given.views.values() for part in (view.codes, view.scales)]
    args = (*stored, *given.new.values(), given.start, *kinds)
    overload = getattr(torch.ops, space).append.default
    torch.library.opcheck(overload, args, options)
