"""decode_attention: every option alone and with every other, against dense float64 attention."""

import dataclasses
import itertools

import pytest
import torch
from support import cases, dense
from support.cases import OPTIONS, rows
from support.tolerances import relative_l2

from caramba_fast.ops import append_, decode_attention, merge_state, use_backend

EVERYTHING = [option for option in OPTIONS if option != "window"]
PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if pair != ("window", "window_with_sinks")  # one option of the op, two names here
]


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


# -- against float64 ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("options", [(), *((one,) for one in OPTIONS), *PAIRS], ids="+".join)
def test_options_alone_and_in_pairs(options, tokens):
    case = cases.build(options, tokens=tokens).append(append_)
    cases.check(case.attend(decode_attention), case.expected())


@pytest.mark.parametrize("window", ["window", "window_with_sinks"])
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dims", [
    {"k": 64, "v": 64}, {"k": 80, "v": 80}, {"k": 112, "v": 96}, {"k": 8, "v": 32}, {"k": 16, "v": 16},
], ids=str)  # fmt: skip
def test_all_options_at_once_for_every_lane(dims, tokens, window):
    options = [o for o in OPTIONS if not o.startswith("window") or o == window]
    case = cases.build(options, tokens=tokens, dims=dims, heads=9, kv_heads=3).append(append_)
    cases.check(case.attend(decode_attention), case.expected())


def test_all_options_at_once_for_every_kind(kind):
    case = cases.build(EVERYTHING, tokens=3, kinds=(kind, kind)).append(append_)
    cases.check(case.attend(decode_attention), case.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_options_at_once_for_half_precision_queries(dtype):
    case = cases.build(EVERYTHING, tokens=3).append(append_)
    case.queries = {name: q.to(dtype) for name, q in case.queries.items()}
    cases.check(case.attend(decode_attention), case.expected())


# -- who sees what ------------------------------------------------------------------------------

MASKS = ("pages", "leftpad", "query_lens", "tail", "sinks", "window", "window_with_sinks")


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("options", [
    pair for n in (1, 2, 3) for pair in itertools.combinations(MASKS, n) if pair[-2:] != MASKS[-2:]
], ids="+".join)  # fmt: skip
def test_zero_queries_give_the_plain_mean_over_what_is_allowed(options, tokens):
    """Random data hides a mask that is off by one; equal weights do not.

    A value is its position; what is read from the tail has 1000 added, and from the sinks 500.
    """
    case = cases.build(options, tokens=tokens, kinds=("fp32", "fp32"))
    case.streams["v"].given[:] = torch.arange(45.0)[:, None]
    case.append(append_)
    view = case.streams["v"].view
    for buffer, mark in ((view.tail, 1000), (view.sink, 500)):
        if buffer is not None:
            buffer.add_(mark)
    case.queries["k"].zero_()
    out, lse = case.attend(decode_attention)
    for b, length in enumerate(case.lengths):
        real = tokens if case.query_lens is None else case.query_lens[b]
        for t in range(tokens):
            numbers = [] if t >= real else allowed(case, options, b, length - real + t)
            mean = sum(numbers) / len(numbers) if numbers else 0.0
            torch.testing.assert_close(out[b, :, t], torch.full((4, 32), mean))
            count = torch.tensor(float(len(numbers))).log().expand(4)
            torch.testing.assert_close(lse[b, :, t], count)


def allowed(case, options, b, position):
    """The numbers a query at ``position`` of row b averages, in the words of the documentation."""
    pad, found = case.leftpad[b], []
    for j in range(pad, position + 1):
        hidden = ("window" in options and position - j > 9) or (
            "window_with_sinks" in options and position - j > 4 and j - pad >= 5
        )
        if hidden:
            continue
        if "sinks" in options and j - pad < 3:
            found.append(j + 500)
        else:
            found.append(j + 1000 if "tail" in options and position - j < 6 else j)
    return found


@pytest.mark.parametrize("garbage", [-1, -7, 10**6, 2**31 - 1])
def test_unused_entries_of_a_block_table_hold_anything(garbage):
    case = cases.build(["pages", "rotate_k", "query_lens"], tokens=3).append(append_)
    expected = case.attend(decode_attention)
    case.table[case.table == -1] = garbage
    for found, wanted in zip(case.attend(decode_attention), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("options", [(), ("rotate_k", "rotate_v"), EVERYTHING], ids=len)
def test_several_tokens_at_once_equal_single_steps(options):
    options = [option for option in options if option != "query_lens"]
    case = cases.build(options, tokens=6).append(append_)
    whole = case.attend(decode_attention)
    queries = dict(case.queries)
    for t in range(6):
        case.queries = {name: q[:, :, t : t + 1] for name, q in queries.items()}
        step = case.attend(decode_attention, cache_seqlens=case.seqlens - 5 + t)
        for a, b in zip(whole, step, strict=True):
            assert relative_l2(a[:, :, t : t + 1], b) <= 1e-6


@pytest.mark.parametrize("cut", [1, 2, 5, 13, 17])
@pytest.mark.parametrize("options", [(), ("rotate_v",), EVERYTHING], ids=len)
def test_merging_a_split_of_the_cache_gives_the_whole(options, cut):
    """The newest ``cut`` tokens by a window, the others by a shorter length."""
    left_out = ("query_lens", "window", "window_with_sinks")
    case = cases.build([o for o in options if o not in left_out], residual_len=1).append(append_)
    whole = case.attend(decode_attention)
    late = case.attend(decode_attention, window_size=(cut - 1, 0))
    once = dict.fromkeys(("s_aux", "null_k", "null_v"))
    early = case.attend(decode_attention, cache_seqlens=case.seqlens - cut, residual_len=0, **once)
    for a, b in zip(merge_state(*early, *late), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- empty ranges -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [(), ("tail", "sinks", "rotate_k", "rotate_v", "pages")], ids=len
)
def test_a_row_without_keys_gives_zero_and_minus_infinity(options):
    case = cases.build(options, tokens=2, lengths=(45, 0)).append(append_)
    out, lse = case.attend(decode_attention)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    cases.check((out, lse), case.expected())


def test_a_row_of_nothing_but_padding_gives_zero_and_minus_infinity():
    case = cases.build(["tail", "sinks", "leftpad"], lengths=(45, 4)).append(append_)
    out, lse = case.attend(decode_attention)
    assert case.leftpad == [2, 4] and (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    cases.check((out, lse), case.expected())


def test_a_row_without_keys_has_the_sink_logit_alone():
    case = cases.build(["s_aux", "tail"], tokens=2, lengths=(45, 0)).append(append_)
    out, lse = case.attend(decode_attention)
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[1], case.options["s_aux"][:, None].expand(-1, 2))


def test_a_row_without_keys_sees_the_null_key_alone():
    case = cases.build(["null", "rotate_v"], lengths=(45, 0)).append(append_)
    out, _ = case.attend(decode_attention)
    torch.testing.assert_close(out[1, :, 0], case.null["v"].repeat_interleave(2, 0))


def test_queries_past_query_lens_give_zero_and_minus_infinity_whatever_the_options():
    case = cases.build(EVERYTHING, tokens=3).append(append_)
    case.query_lens = [0, 3]
    out, lse = case.attend(decode_attention)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    cases.check((out, lse), case.expected())


# -- tracing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [("rotate_k", "pages", "query_lens"), EVERYTHING], ids=len)
def test_opcheck_with_options(options):
    case = cases.build(options, tokens=2).append(append_)
    for stream in case.streams.values():  # opcheck compares whole tensors: no NaN may be left
        for buffer in (stream.view.tail, stream.view.sink, stream.view.scales):
            if buffer is not None:
                buffer.nan_to_num_()
    args, keywords = case.flat()
    torch.library.opcheck(torch.ops.caramba_fast.decode_attention.default, args, keywords)


def test_compiles_in_one_graph_with_options():
    case = cases.build(EVERYTHING, tokens=2).append(append_)
    with use_backend("auto"):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda: case.attend(decode_attention), fullgraph=True, backend="aot_eager"
        )
        for found, wanted in zip(compiled(), case.attend(decode_attention), strict=True):
            assert torch.equal(found, wanted)


# -- bad input ----------------------------------------------------------------------------------


def without(part):
    return lambda case: {
        "views": {"v": dataclasses.replace(case.streams["v"].view, **{part: None})}
    }


def odd_pages(case):
    def cut(view):
        return dataclasses.replace(view, codes=view.codes[:, :, :24], scales=view.scales[:, :, :24])

    return {"views": {name: cut(stream.view) for name, stream in case.streams.items()}}


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: {"query_lens": torch.tensor([1, 2])}, r"query_lens is \(2,\) torch.int64; \(2,\) int32"),
    (lambda c: {"query_lens": rows(1)}, r"query_lens is \(1,\)"),
    (lambda c: {"cache_leftpad": rows(1, 2, 3)}, r"cache_leftpad is \(3,\)"),
    (lambda c: {"cache_seqlens": None}, "cache_seqlens"),
    (lambda c: {"cache_seqlens": [3, 4]}, "cache_seqlens"),
    (lambda c: {"block_table": c.table.long()}, "block_table is .*int64; .* int32 is needed"),
    (lambda c: {"block_table": c.table[:1]}, "block_table is .*; .* is needed"),
    (lambda c: {"block_table": c.table[0]}, "block_table is .*; .* is needed"),
    (lambda c: {"block_table": c.table[:, :0]}, "block_table is .*; .* is needed"),
    (odd_pages, "pages have 24 slots; a multiple of 32 is needed"),
    (lambda c: {"s_aux": torch.randn(2)}, r"s_aux is \(2,\); one logit a query head, \(4,\), is needed"),
    (lambda c: {"null_k": None}, "null keys and values go together; missing null_k"),
    (lambda c: {"null_v": None}, "null keys and values go together; missing null_v"),
    (lambda c: {"null_k": torch.randn(2, 16)}, r"null_k is \(2, 16\); \(2, 32\) is needed"),
    (lambda c: {"null_k": torch.randn(4, 32)}, r"null_k is \(4, 32\); \(2, 32\) is needed"),
    (lambda c: {"null_v": torch.randn(2, 16)}, r"null_v is \(2, 16\); \(2, 32\) is needed"),
    (without("tail"), "tail buffers differ between streams"),
    (without("sink"), "sink buffers differ between streams"),
    (lambda c: {"residual_len": -1}, "residual_len is -1"),
    (lambda c: {"residual_len": 13}, "T=2 query tokens and residual_len=13 need a tail of 14"),
    (lambda c: {"num_sink_tokens": -1}, "num_sink_tokens is -1"),
    (lambda c: {"num_splits": -2}, "num_splits is -2"),
    (lambda c: {"window_size": (3,)}, r"window_size is \(3,\)"),
    (lambda c: {"q_chunk": 4}, "decode_attention has no option q_chunk"),
    (lambda c: {"k_mean": torch.zeros(2, 32)}, "decode_attention has no option k_mean"),
])  # fmt: skip
def test_contradictory_options_are_named(change, message):
    case = cases.build(EVERYTHING, tokens=2).append(append_)
    with pytest.raises((TypeError, ValueError), match=message):
        case.attend(decode_attention, **change(case))


def test_more_tokens_than_a_decode_step_takes_are_refused():
    case = cases.build(tokens=33).append(append_)
    with pytest.raises(ValueError, match="T=33 tokens; up to 32 are allowed"):
        case.attend(decode_attention)


def test_an_error_lists_every_reason():
    case = cases.build(["pages", "tail", "null"], tokens=12).append(append_)
    view = case.streams["k"].view
    with pytest.raises(ValueError, match="cannot run for 7 reasons") as error:
        case.attend(
            decode_attention, views={"k": dataclasses.replace(view, tail=None)},
            null_v=None, s_aux=torch.zeros(3), block_table=case.table.long(), softcap=-1.0,
            query_lens=rows(1),
        )  # fmt: skip
    for reason in (
        "tail buffers differ", "residual_len", "missing null_v", "s_aux",
        "block_table", "softcap", "query_lens",
    ):  # fmt: skip
        assert reason in str(error.value)


def test_a_window_that_reaches_to_the_right_changes_nothing():
    case = cases.build(["tail"], tokens=4).append(append_)
    for a, b in zip(
        case.attend(decode_attention, window_size=(5, 0)),
        case.attend(decode_attention, window_size=(5, 3)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_the_dense_oracle_needs_every_option():
    """Each option changes the answer, so that agreement means something."""
    plain = cases.build(EVERYTHING, tokens=2).append(append_)
    whole, _ = plain.expected()
    for change in (
        dict(leftpad=[0, 0]), dict(query_lens=None), dict(residual_len=0), dict(sink_len=0),
        dict(null={}), dict(options={**plain.options, "s_aux": torch.zeros(4)}),
        dict(options={**plain.options, "num_sink_tokens": 0}),
    ):  # fmt: skip
        other, _ = dataclasses.replace(plain, **change).expected()
        assert not torch.allclose(whole, other)
    for name, stream in plain.streams.items():
        view = dataclasses.replace(stream.view, rotate=False)
        changed = {**plain.streams, name: dataclasses.replace(stream, view=view)}
        other, _ = dataclasses.replace(plain, streams=changed).expected()
        assert not torch.allclose(whole, other)
    assert dense.hadamard_matrix(80).shape == (80, 80)
