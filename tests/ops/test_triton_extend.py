"""The Triton extend attention against dense float64 attention over the same stored bytes.

Interpreted, as test_triton_decode.py; a block has 64 or 128 queries, a tile 128 tokens or fewer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import cases
from support.cases import OPTIONS, Case, rows
from support.launches import Launches
from support.triton_cases import EVERYTHING, attend, build
from torch.utils._python_dispatch import TorchDispatchMode

from caramba_fast.ops import append_, decode_attention, registry, use_backend

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, under the interpreter
    pytest.mark.skipif(
        "os.environ.get('TRITON_INTERPRET') != '1'", reason="the cases are built on the CPU"
    ),
]
#: Small, for rows are merged one by one; a ring that holds what the queries may read.
LAYER: dict[str, Any] = {
    "tokens": 33, "lengths": (75,), "slots": 96, "heads": 1, "kv_heads": 1, "ring": 64,
}  # fmt: skip
CHANNEL: dict[str, Any] = {**LAYER, "kinds": ("q4_channel", "q4_0"), "slots": 128}


def check(case: Case, **more: Any) -> None:
    found, expected = attend(case, extends=True, **more), case.expected()
    if found[0].dtype == torch.float32:
        cases.check(found, expected)
    else:  # the query is rounded again after a transform: that shows in lse too
        assert found[0].isfinite().all()
        assert cases.relative_l2(found[0], expected[0]) <= cases.RELATIVE_L2[found[0].dtype]
        torch.testing.assert_close(found[1].double(), expected[1], rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize(
    "kinds",
    [
        "fp16/fp16", "q8_0/q8_0", "q4_0/q4_0", "nf4/nf4", "fp32/q4_0", "q4_0/bf16", "bf16/nf4", "nf4/fp32",
        "q4_channel/nf4", "q8_channel/q8_0", "fp16/q4_channel", "q4_channel/q8_channel",
    ],
)  # fmt: skip
def test_mixes_of_kinds(kinds):
    check(build(**{**LAYER, "kinds": kinds.split("/")}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kinds", ["fp16/fp16", "bf16/q8_0", "q4_0/nf4", "q4_channel/q8_0"])
def test_half_precision_queries(dtype, kinds):
    case = build(["rotate_k", "rotate_v"], **{**LAYER, "kinds": kinds.split("/")})
    case.queries = {name: q.to(dtype) for name, q in case.queries.items()}
    check(case)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("kind", ["q4_channel", "q8_channel"])
def test_groups_as_long_as_a_tile(group, kind):
    """With zeros far from the channels' own ranges; some tokens are in codes, some in the ring."""
    layer = {**LAYER, "kinds": (kind, kind), "lengths": (271,), "slots": 384}
    case = build(block=group, **layer)
    for stream in case.streams.values():
        stream.given += 20 * torch.randn(1, stream.given.shape[1], 1, stream.dim)
    with use_backend("reference"):
        case.append(append_)
    case.queries = {name: q / 8 for name, q in case.queries.items()}
    check(case)
    check(case, num_splits=2)


@pytest.mark.parametrize("dims", [
    {"k": 8, "v": 8}, {"k": 80, "v": 80}, {"k": 96, "v": 32}, {"k": 128, "v": 128}, {"k": 256, "v": 256},
], ids=str)  # fmt: skip
def test_head_dims(dims):
    layer = {**LAYER, "tokens": 9, "dims": dims, "heads": 3, "kv_heads": 3}
    check(build(**{**layer, "kinds": ("q4_0", "nf4")}))
    check(build(**{**layer, "kinds": ("q4_channel", "q8_0")}))


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [
    (1, 1, 1), (6, 2, 5), (2, 1, 33), (1, 1, 64), (2, 2, 65), (1, 1, 130),
])  # fmt: skip
def test_query_heads_and_tokens(heads, kv_heads, tokens, monkeypatch):
    """In blocks of 64 queries, and of 128 (from 65 tokens on)."""
    from caramba_fast.kernels import extend_launch

    monkeypatch.setattr(extend_launch, "capability", lambda _: (9, 0))
    lengths = (tokens + 61,) if tokens > 64 else (tokens + 61, tokens)
    check(build(tokens=tokens, heads=heads, kv_heads=kv_heads, lengths=lengths, slots=224))


@pytest.mark.parametrize("slots", [65, 96, 130])
def test_capacities_that_are_no_whole_tiles(slots):
    check(build(**{**LAYER, "slots": slots, "lengths": (65,), "kinds": ("fp16", "nf4")}))


@pytest.mark.parametrize("kinds", [("q4_0", "q8_0"), ("q4_channel", "q4_0")], ids="/".join)
@pytest.mark.parametrize("options", [(), ("pages", "leftpad", "tail")], ids=len)
@pytest.mark.parametrize("major", [8, 9])
def test_a_prefix_of_many_tiles_in_any_number_of_splits(options, kinds, major, monkeypatch):
    """Tiles that are seen whole, and those at both ends that are not, with the tiles of each generation."""
    from caramba_fast.kernels import extend_launch

    monkeypatch.setattr(extend_launch, "capability", lambda _: (major, 0))
    case = build(options, **{**LAYER, "lengths": (516,), "slots": 640, "kinds": kinds})
    for num_splits in (0, 3):
        check(case, num_splits=num_splits)


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [LAYER, CHANNEL], ids=["by token", "by channel"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_alone(option, layer):
    check(build([option], **layer))


@pytest.mark.parametrize("layer", [LAYER, CHANNEL], ids=["by token", "by channel"])
def test_all_options_at_once(layer):
    check(build(EVERYTHING, **{**layer, "lengths": (75, 61), "heads": 3, "kv_heads": 3}))


@pytest.mark.parametrize(
    "kinds", [("q8_0", "q4_0", "nf4"), ("q4_channel", "q8_channel", "q4_0")], ids=len
)
@pytest.mark.parametrize("options", [["null"], EVERYTHING], ids=len)
def test_two_keys(options, kinds):
    check(build(options, decoupled=True, **{**CHANNEL, "heads": 2, "kinds": kinds}))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_above_zero(scale):
    """The largest product is the smallest score, or all are one."""
    case = build(**{**LAYER, "lengths": (300,), "slots": 320})
    case.options["softmax_scale"] = scale
    check(case)


MASKS = ("pages", "leftpad", "query_lens", "tail", "sinks", "window", "window_with_sinks")


@pytest.mark.parametrize("layer", [
    {**LAYER, "kinds": ("fp32", "fp32")}, {**CHANNEL, "kinds": ("q8_channel", "fp32")},
], ids=["by token", "by channel"])  # fmt: skip
@pytest.mark.parametrize("options", [
    (), *((one,) for one in MASKS), ("leftpad", "query_lens", "tail", "sinks", "window_with_sinks"),
    ("pages", "tail", "window"),
], ids="+".join)  # fmt: skip
def test_zero_queries_give_the_plain_mean_over_what_is_allowed(options, layer):
    """Random data hides a mask that is off by one; equal weights do not (values are positions)."""
    case = build(options, **layer)
    case.streams["v"].given[:] = torch.arange(75.0)[:, None]
    with use_backend("reference"):
        case.append(append_)
    case.queries["k"].zero_()
    for found, wanted in zip(attend(case, extends=True), case.expected(), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("query_lens", [[33, 1], [32, 0]], ids=str)
def test_rows_of_a_padded_prompt(query_lens):
    """Also a row without a query."""
    case = build(["query_lens", "leftpad", "s_aux"], **{**LAYER, "lengths": (75, 61)})
    case.query_lens = query_lens
    check(case)


@pytest.mark.parametrize("window", [1, 2, 30])
def test_a_window_that_is_shorter_than_a_tile(window):
    case = build(**{**LAYER, "tokens": 70, "lengths": (300,), "slots": 320})
    case.options["window_size"] = (window - 1, 0)
    check(case)


def test_a_query_that_sees_no_key():
    """More queries than tokens are left of a row's padding: the first of them see nothing."""
    case = build(["leftpad", "window"], **LAYER)
    case.leftpad = [50]
    out, lse = attend(case, extends=True)
    cases.check((out, lse), case.expected())
    assert (lse[0, :, :8] == -torch.inf).all() and lse[0, :, 8:].isfinite().all()


# -- launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ["query_lens", "leftpad", "rotate_k"]], ids=len)
@pytest.mark.parametrize("q_chunk", [1, 25])
def test_more_queries_than_are_taken_at_once(options, q_chunk, monkeypatch):
    from caramba_fast.kernels import extend_launch

    monkeypatch.setattr(extend_launch, "TOKENS_AT_ONCE", 20)
    case = build(options, **{**LAYER, "tokens": 50, "lengths": (75, 61)})
    if case.query_lens:
        case.query_lens = [50, 24]
    check(case, q_chunk=q_chunk)


def test_a_launch_has_no_more_blocks_than_a_grid_takes(monkeypatch):
    from caramba_fast.kernels import extend_launch, splits_launch

    monkeypatch.setattr(extend_launch, "MOST_BLOCKS", 4)
    case = build(**{**LAYER, "tokens": 50, "lengths": (75, 61)})
    check(case, q_chunk=10**6)
    noted = Launches()
    for name in ("partials_kernel", "merge_kernel"):
        monkeypatch.setattr(splits_launch, name, noted)
    attend(case, extends=True, q_chunk=10**6)
    blocks = [grid[1] for grid, *_ in noted.seen if len(grid) == 3]
    assert len(blocks) == 4 and max(blocks) <= 4


class Counter(TorchDispatchMode):
    """Counts what a GPU would launch: kernels that stand in for those of Triton, and torch's operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from caramba_fast.kernels import splits_launch

        self.names: list[str] = []
        for name in ("prepare_kernel", "partials_kernel", "merge_kernel"):
            monkeypatch.setattr(splits_launch, name, {})
            monkeypatch.setattr(splits_launch, name, self.kernel(name))

    def kernel(self, name: str) -> Any:
        note = self.names.append

        class StandIn:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *_, **__: note(name)

        return StandIn()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or "empty" in func.__name__ or "caramba_fast" in str(func)):
            self.names.append(str(func))
        return result


@pytest.mark.parametrize(("tokens", "most"), [(512, 3), (5000, 40)])
def test_launches_of_a_prompt_on_a_prefix_of_32768_tokens(tokens, most, monkeypatch):
    """However long the prefix is, three; a longer prompt takes more, not one a tile or a token."""
    case = cases.build(["rotate_k", "rotate_v"], dims={"k": 128, "v": 128}, kinds=("q4_0", "q4_0"),
                       lengths=[9], slots=40960, heads=32, kv_heads=8, tokens=tokens)  # fmt: skip
    case.lengths = [32768 + tokens]
    with Counter(monkeypatch) as counted:
        attend(case, extends=True)
    assert counted.names.count("partials_kernel") == -(-tokens // 2048)
    assert 3 <= len(counted.names) <= most, counted.names


def test_splits_fill_a_gpu_that_the_blocks_do_not(monkeypatch):
    from caramba_fast.kernels import extend_launch

    plans = []

    class Noted(extend_launch.ExtendCall):
        def plan(self):
            plans.append(super().plan())
            return plans[-1]

    monkeypatch.setattr(extend_launch, "ExtendCall", Noted)
    for heads in (1, extend_launch.processors(torch.device("cpu"))):
        layer = {**LAYER, "heads": heads, "lengths": (600,), "slots": 640}
        attend(build(**layer), extends=True)
    assert plans[0][0] > 1 and plans[1] == (1, 1)


# -- the op -------------------------------------------------------------------------------------


def test_it_is_decode_attention_where_both_apply():
    case = build(EVERYTHING, tokens=7, heads=2)
    with use_backend("triton"):
        found, wanted = attend(case, extends=True), case.attend(decode_attention)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_wider_heads_than_supported_are_refused():
    case = build(dims={"k": 288, "v": 32}, heads=2, lengths=(45,), tokens=40)
    with pytest.raises(NotImplementedError, match="head_dim of k is 288; up to 256"):
        attend(case, extends=True)


@pytest.mark.parametrize("kinds", [("q8_0", "q4_0"), ("q4_channel", "q4_0")], ids="/".join)
def test_opcheck(kinds):
    case = build(["leftpad"], **{**CHANNEL, "kinds": kinds, "tokens": 2})
    for stream in case.streams.values():
        stream.view.scales.nan_to_num_()
        for side in (stream.view.tail, stream.view.sink):
            if side is not None:
                side.nan_to_num_()
    args, keywords = case.flat()
    with use_backend("triton"):
        torch.library.opcheck(
            torch.ops.caramba_fast.extend_attention.default, args, {**keywords, "q_chunk": 16}
        )
    assert rows(1).dtype == torch.int32


@pytest.mark.parametrize("stem", ["extend_attention", "decoupled_extend_attention"])
def test_triton_would_serve_it_on_a_cuda_device(stem):
    found = {status.op: status.runs for status in registry.on_cuda()}
    assert found[stem] == "triton"
