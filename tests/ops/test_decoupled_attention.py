"""Decoupled attention: two key streams of their own formats and scales, one softmax."""

import itertools

import pytest
import torch
from support import cases, dense
from support.cases import OPTIONS, rows
from support.tolerances import relative_l2

from caramba_fast.ops import (
    append_,
    decode_attention,
    decoupled_append_,
    decoupled_decode_attention,
    decoupled_extend_attention,
    merge_state,
    use_backend,
)

DIMS = {"k_sem": 8, "k_geo": 16, "v": 32}
KINDS = ("q8_0", "q4_0", "nf4")
EVERYTHING = [option for option in OPTIONS if option != "window"]
#: Every option with the two or three that could go wrong together with it.
REDUCED = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if {"tail", "rotate_k", "leftpad", "null"} & set(pair) and len({"window"} & set(pair)) == 0
]


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def build(options=(), **changes):
    return cases.build(options, **{"dims": DIMS, "kinds": KINDS, **changes})


@pytest.mark.parametrize("options", [(), *((one,) for one in OPTIONS), *REDUCED], ids="+".join)
def test_options_alone_and_in_pairs(options):
    case = build(options, tokens=3).append(decoupled_append_)
    cases.check(case.attend(decoupled_decode_attention), case.expected())


@pytest.mark.parametrize("dims", [
    {"k_sem": 8, "k_geo": 32, "v": 64}, {"k_sem": 32, "k_geo": 64, "v": 128},
    {"k_sem": 16, "k_geo": 16, "v": 48}, {"k_sem": 80, "k_geo": 8, "v": 16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 6])
def test_all_options_at_once_for_every_width(dims, tokens):
    case = build(EVERYTHING, dims=dims, tokens=tokens, heads=9, kv_heads=3)
    cases.check(case.append(decoupled_append_).attend(decoupled_decode_attention), case.expected())


@pytest.mark.parametrize("options", [(), EVERYTHING], ids=len)
def test_sixteen_narrow_heads_fill_four_lanes(options):
    case = build(options, heads=16, kv_heads=16, tokens=2).append(decoupled_append_)
    assert [s.view.codes.shape[1] for s in case.streams.values()] == [4, 4, 4]
    assert [s.view.lane_dim for s in case.streams.values()] == [32, 64, 128]
    cases.check(case.attend(decoupled_decode_attention), case.expected())


@pytest.mark.parametrize("kinds", itertools.product(["fp32", "bf16", "q8_0", "nf4"], repeat=2))
def test_each_key_stream_has_its_own_kind(kinds):
    case = build(["rotate_k"], kinds=(*kinds, "q4_0")).append(decoupled_append_)
    cases.check(case.attend(decoupled_decode_attention), case.expected())


def test_each_product_has_its_own_scale():
    case = build(tokens=2).append(decoupled_append_)
    for scales in ({"sem_scale": 0.0}, {"geo_scale": 0.0}, {"sem_scale": 0.7, "geo_scale": -0.2}):
        case.options = scales
        cases.check(case.attend(decoupled_decode_attention), case.expected())


def test_it_is_attention_over_the_scaled_keys_side_by_side():
    """In fp32, standard attention over [k_sem, k_geo] with the scales in the queries."""
    dims = {"k_sem": 32, "k_geo": 32, "v": 64}
    case = build(dims=dims, kinds=("fp32",) * 3, tokens=3).append(decoupled_append_)
    joined = cases.build(dims={"k": 64, "v": 64}, kinds=("fp32", "fp32"), tokens=3)
    sem, geo, v = (stream.given for stream in case.streams.values())
    joined.streams["k"].given = torch.cat((sem, geo), -1)
    joined.streams["v"].given = v
    joined.queries["k"] = torch.cat([q * q.shape[-1] ** -0.5 for q in case.queries.values()], -1)
    joined.options = {"softmax_scale": 1.0}
    found = case.attend(decoupled_decode_attention)
    for a, b in zip(found, joined.append(append_).attend(decode_attention), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [("rotate_k", "leftpad"), ("rotate_v",), ("rotate_k", "rotate_v", "leftpad")],
    ids=len,
)
def test_the_rotation_is_exact_in_both_key_streams(options):
    case = build(options, kinds=("fp32",) * 3, tokens=2).append(decoupled_append_)
    sem, geo, v = (stream.given for stream in case.streams.values())
    scaled = [q.double() * q.shape[-1] ** -0.5 for q in case.queries.values()]
    expected, _ = dense.attend(
        torch.cat(scaled, -1), torch.cat((sem, geo), -1), v, case.lengths, scale=1.0,
        leftpad=case.leftpad,
    )  # fmt: skip
    assert relative_l2(case.attend(decoupled_decode_attention)[0], expected) <= 1e-5


def test_several_tokens_at_once_equal_single_steps():
    case = build([o for o in EVERYTHING if o != "query_lens"], tokens=6).append(decoupled_append_)
    whole = case.attend(decoupled_decode_attention)
    queries = dict(case.queries)
    for t in range(6):
        case.queries = {name: q[:, :, t : t + 1] for name, q in queries.items()}
        step = case.attend(decoupled_decode_attention, cache_seqlens=case.seqlens - 5 + t)
        for a, b in zip(whole, step, strict=True):
            assert relative_l2(a[:, :, t : t + 1], b) <= 1e-6


def test_merging_a_split_gives_the_whole():
    case = build(["rotate_k", "rotate_v", "tail"], residual_len=4).append(decoupled_append_)
    whole = case.attend(decoupled_decode_attention)
    late = case.attend(decoupled_decode_attention, window_size=(9, 0))
    early = case.attend(decoupled_decode_attention, cache_seqlens=case.seqlens - 10, residual_len=0)
    for a, b in zip(merge_state(*early, *late), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [(), ("s_aux",), ("null",)], ids=str)
def test_a_row_without_keys(options):
    case = build((*options, "sinks"), lengths=(45, 0)).append(decoupled_append_)
    out, lse = case.attend(decoupled_decode_attention)
    cases.check((out, lse), case.expected())
    assert ("null" in options) != bool((out[1] == 0).all())
    assert bool((lse[1] == -torch.inf).all()) == (not options)


@pytest.mark.parametrize(("op", "tokens"), [("decode", 2), ("extend", 40)])
def test_opcheck(op, tokens):
    case = build(["rotate_k", "pages", "query_lens", "null", "s_aux", "window"], tokens=tokens)
    case.append(decoupled_append_)
    for stream in case.streams.values():
        stream.view.scales.nan_to_num_()
    overload = getattr(torch.ops.caramba_fast, f"decoupled_{op}_attention").default
    args, keywords = case.flat()
    torch.library.opcheck(overload, args, keywords)


def test_compiles_in_one_graph():
    case = build(EVERYTHING, tokens=2).append(decoupled_append_)
    with use_backend("auto"):
        torch._dynamo.reset()
        for op in (decoupled_decode_attention, decoupled_extend_attention):
            compiled = torch.compile(
                lambda op=op: case.attend(op), fullgraph=True, backend="aot_eager"
            )
            for found, wanted in zip(compiled(), case.attend(op), strict=True):
                assert torch.equal(found, wanted)


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: {"null_k_sem": None}, "null keys and values go together; missing null_k_sem"),
    (lambda c: {"null_k_geo": torch.randn(2, 8)}, r"null_k_geo is \(2, 8\); \(2, 16\) is needed"),
    (lambda c: {"null_v": torch.randn(2, 8)}, r"null_v is \(2, 8\); \(2, 32\) is needed"),
    (lambda c: {"softmax_scale": 1.0}, "has no option softmax_scale"),
    (lambda c: {"s_aux": torch.randn(3)}, r"s_aux is \(3,\)"),
    (lambda c: {"query_lens": rows(1, 1, 1)}, r"query_lens is \(3,\)"),
    (lambda c: {"views": {"k_geo": narrow(c)}}, "k_geo's .* lanes of .* hold something else"),
    (lambda c: {"views": {"k_geo": no_tail(c)}}, "tail buffers differ between streams"),
])  # fmt: skip
def test_contradictory_options_are_named(change, message):
    case = build(EVERYTHING, tokens=2).append(decoupled_append_)
    with pytest.raises((TypeError, ValueError), match=message):
        case.attend(decoupled_decode_attention, **change(case))


def narrow(case):
    view = case.streams["k_sem"].view
    return cases.KVView(view.codes, view.scales, view.kind)


def no_tail(case):
    view = case.streams["k_geo"].view
    return cases.KVView(view.codes, view.scales, view.kind, None, view.sink, view.rotate)


@pytest.mark.parametrize(("change", "message"), [
    (dict(q_geo=torch.randn(2, 4, 2, 16)), "one B, H_q, T and dtype for all queries"),
    (dict(q_geo=torch.randn(2, 4, 1, 16).half()), "one B, H_q, T and dtype for all queries"),
    (dict(q_sem=torch.randn(2, 4, 1, 16)), "hold something else"),
    (dict(q_sem=None), "q for k_sem is a NoneType"),
])  # fmt: skip
def test_queries_that_do_not_fit_are_named(change, message):
    case = build().append(decoupled_append_)
    queries = {"q_sem": case.queries["k_sem"], "q_geo": case.queries["k_geo"], **change}
    views = [stream.view for stream in case.streams.values()]
    with pytest.raises((TypeError, ValueError), match=message):
        decoupled_decode_attention(*queries.values(), *views, case.seqlens, n_kv_heads=2)
