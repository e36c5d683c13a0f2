"""The C++ decode attention against dense float64 attention over the same stored bytes, and the C++ append against
the reference, on every instruction set the machine has.

But for portable code, queries and weights that meet quantized streams are integers of 16 or 8 bits: what that may cost
is written down in `ALLOWED`; everything else is held to fp32.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import cases
from support.cases import OPTIONS, Case
from support.cpp import ALLOWED, DBA, EVERYTHING, appending, attend, build, check
from support.isas import (
    ISA_VARIABLE,
    expected_isas,
    in_subprocess,
    multiplies_integers,
    torch_threads,
)

from caramba_fast.ops import (
    KVView,
    append_,
    decode_attention,
    registry,
    use_backend,
)


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """No skip: without the extension, nothing here may pass."""
    assert registry.load_error() is None, registry.load_error()


# -- formats and shapes -------------------------------------------------------------------------

KINDS = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "nf4")


@pytest.mark.parametrize("v_kind", KINDS)
@pytest.mark.parametrize("k_kind", KINDS)
def test_every_mix_of_kinds(k_kind, v_kind):
    check(build(kinds=(k_kind, v_kind), lengths=(145, 18), slots=160))


@pytest.mark.parametrize("kinds", [
    ("q4_0", "q8_0", "nf4"), ("nf4", "q4_0", "q8_0"), ("fp16", "nf4", "bf16"), ("q8_0", "fp32", "q4_0"),
], ids="/".join)  # fmt: skip
def test_mixes_of_three_kinds(kinds):
    check(build(decoupled=True, kinds=kinds, lengths=(90, 70), slots=128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kinds", [("fp16", "fp16"), ("bf16", "q8_0"), ("q4_0", "nf4")], ids="/".join
)
def test_half_precision_queries(dtype, kinds):
    case = build(["rotate_k", "rotate_v"], kinds=kinds)
    case.queries = {name: q.to(dtype) for name, q in case.queries.items()}
    check(case)


@pytest.mark.parametrize(
    "kinds", [("q4_0", "nf4"), ("q8_0", "q4_0"), ("fp16", "bf16")], ids="/".join
)
@pytest.mark.parametrize("dims", [
    {"k": 8, "v": 8}, {"k": 16, "v": 16}, {"k": 64, "v": 64}, {"k": 80, "v": 80}, {"k": 96, "v": 32},
    {"k": 112, "v": 112}, {"k": 128, "v": 128}, {"k": 192, "v": 128}, {"k": 256, "v": 256},
    {"k": 512, "v": 512},
], ids=str)  # fmt: skip
def test_head_dims(dims, kinds):
    check(build(dims=dims, heads=6, kv_heads=3, lengths=(75,), slots=96, kinds=kinds))


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [
    (1, 1, 1), (6, 2, 3), (7, 1, 1), (4, 2, 16), (2, 1, 32), (3, 1, 17), (12, 2, 5),
])  # fmt: skip
def test_groups_and_query_tokens(heads, kv_heads, tokens):
    check(build(heads=heads, kv_heads=kv_heads, tokens=tokens, lengths=(145, 33), slots=160))


@pytest.mark.parametrize(
    "kinds", [("q4_0", "q8_0"), ("q8_0", "nf4"), ("nf4", "q4_0")], ids="/".join
)
@pytest.mark.parametrize("block", [64, 128])
def test_blocks(block, kinds):
    check(build(dims={"k": 128, "v": 128}, block=block, kinds=kinds, lengths=(75,), slots=96))


@pytest.mark.parametrize("changes", [
    dict(dims={"k": 1024, "v": 1024}, block=128), dict(dims={"k": 256, "v": 256}, block=64),
    dict(dims={"k": 80, "v": 112}, kv_heads=2), dict(decoupled=True, kv_heads=4),
    dict(dims={"k": 1, "v": 1}, kv_heads=32), dict(dims={"k": 2, "v": 4}, kv_heads=16),
    dict(dims={"k": 512, "v": 512}, block=64, kinds=("q4_0", "nf4")),
], ids=str)  # fmt: skip
def test_the_most_rows_and_the_widest_or_most_heads(changes):
    """What the scratch of a thread has to hold."""
    kv_heads = changes.get("kv_heads", 1)
    heads = kv_heads * (8 if kv_heads < 8 else 2)
    check(build(**{"heads": heads, "kv_heads": 1, "tokens": 32, "lengths": (36,), **changes}))


@pytest.mark.parametrize("slots", [33, 64, 130])
def test_capacities_that_are_no_whole_tiles(slots):
    check(build(slots=slots, lengths=(33, 9), kinds=("q4_0", "nf4")))


@pytest.mark.parametrize("kinds", [("q8_0", "q4_0"), ("fp16", "fp16")], ids="/".join)
@pytest.mark.parametrize("lengths", [(128, 0, 1), (15, 16, 17), (63, 64, 65), (2, 127)], ids=str)
def test_lengths_around_a_tile(lengths, kinds):
    check(build(lengths=lengths, slots=128, kinds=kinds), num_splits=3)


@pytest.mark.parametrize("kind", ["fp16", "q8_0", "q4_0"])
def test_a_hundred_thousand_tokens(kind):
    case = build(kinds=(kind, kind), lengths=(100_000,), slots=100_032, heads=2, kv_heads=1)
    expected, lse = case.expected()
    for num_splits in (-1, 0, 7):
        found = attend(case, num_splits=num_splits)
        exact = not multiplies_integers()
        allowed = {"fp16": 2e-5, "q8_0": 1e-4, "q4_0": 1e-4 if exact else 1e-2}[kind]
        assert cases.relative_l2(found[0], expected) <= allowed
        torch.testing.assert_close(found[1].double(), lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [(), ("pages", "leftpad"), ("tail", "sinks", "window")], ids="+".join
)
@pytest.mark.parametrize("kinds", [("q4_0", "nf4"), ("nf4", "q4_0")], ids="/".join)
def test_tokens_of_32_bytes_are_taken_in_pairs(kinds, options):
    """Odd lengths, starts and ends: half a pair may lie behind the last token, or behind the last slot."""
    for lengths, slots in (
        ((1, 2, 3), 32),
        ((63, 64, 65), 96),
        ((97, 127, 33), 128),
        ((51, 7), 51),
    ):
        if slots % 32 and options:
            continue
        dims = {"k": 64, "v": 64}
        check(build(options, dims=dims, kinds=kinds, lengths=lengths, slots=slots, tokens=1))


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_alone(option, decoupled):
    check(build([option], decoupled=decoupled, tokens=3, lengths=(90, 70), slots=128))


TOGETHER = (
    ("tail", "sinks", "window_with_sinks", "leftpad"), ("tail", "window", "query_lens"),
    ("rotate_k", "leftpad", "pages"), ("rotate_k", "softcap", "null"), ("null", "s_aux", "rotate_v"),
    ("rotate_k", "rotate_v", "leftpad"), ("tail", "sinks", "rotate_k", "pages"),
)  # fmt: skip


@pytest.mark.parametrize("kinds", [("q8_0", "q4_0"), ("fp16", "bf16")], ids="/".join)
@pytest.mark.parametrize("options", TOGETHER, ids="+".join)
def test_options_together(options, kinds):
    check(build(options, tokens=5, kinds=kinds, lengths=(145, 88), slots=160))


@pytest.mark.parametrize("dims", [None, {"k": 80, "v": 80}, {"k": 128, "v": 64}], ids=str)
def test_all_options_at_once(dims):
    check(build(EVERYTHING, tokens=3, dims=dims, heads=3, kv_heads=3))


@pytest.mark.parametrize("dims", [DBA, {"k_sem": 16, "k_geo": 16, "v": 48}], ids=str)
def test_all_options_at_once_for_two_keys(dims):
    check(build(EVERYTHING, decoupled=True, tokens=2, dims=dims, heads=3, kv_heads=3))


@pytest.mark.parametrize("window", [0, 1, 31, 62, 63, 64, 65, 127, 128, 144, 145, 500])
@pytest.mark.parametrize("tokens", [1, 4])
def test_windows_around_tiles(window, tokens):
    case = build(tokens=tokens, lengths=(145, 64), slots=160, kinds=("fp32", "fp32"))
    case.options["window_size"] = (window, 0)
    check(case)


MASKS = ("pages", "leftpad", "query_lens", "tail", "sinks", "window", "window_with_sinks")


@pytest.mark.parametrize("options", [
    (), *((one,) for one in MASKS), ("leftpad", "query_lens", "tail", "sinks", "window_with_sinks"),
    ("pages", "leftpad", "window_with_sinks"), ("tail", "window"), ("sinks", "window"),
], ids="+".join)  # fmt: skip
def test_zero_queries_give_the_plain_mean_over_what_is_allowed(options):
    """Random data hides a mask that is off by one; equal weights do not (values are positions)."""
    case = build(options, tokens=3, kinds=("fp32", "fp32"), heads=2)
    case.streams["v"].given[:] = torch.arange(45.0)[:, None]
    with use_backend("reference"):
        case.append(append_)
    case.queries["k"].zero_()
    out, lse = attend(case)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


# -- splits and threads -------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 2, 7, 100])
def test_the_result_does_not_depend_on_the_splits(num_splits):
    check(build(["rotate_k", "rotate_v"], lengths=(250, 3), slots=256), num_splits=num_splits)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_share_any_lengths_and_each_count_repeats_itself(threads):
    case = build(["rotate_v", "s_aux"], lengths=(1800, 3, 0, 900), slots=2048, heads=4)
    with torch_threads(threads):
        check(case)
        first, again = attend(case), attend(case)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_fewer_kv_heads_than_threads_split_the_row():
    case = build(lengths=(4000,), slots=4096, heads=4, kv_heads=1, kinds=("fp16", "fp16"))
    with torch_threads(3):
        check(case)


# -- damage, layouts, misuse --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4", "fp16"])
@pytest.mark.parametrize("stream", ["k", "v"])
def test_a_damaged_token_shows_where_it_is_seen_and_only_there(stream, kind):
    case = build(kinds=(kind, kind), lengths=(70, 66), slots=128, heads=2)
    view = case.streams[stream].view
    damaged = view.codes if view.scales is None else view.scales
    damaged[0, 0, 69] = torch.nan
    out, _ = attend(case)
    assert out[0, :1].isnan().any()
    assert out[1].isfinite().all() and out[0, 1].isfinite().all()
    out, _ = attend(case, cache_seqlens=cases.rows(69, 66))
    assert out.isfinite().all()


def test_infinite_scales_are_not_silently_finite():
    case = build(kinds=("q4_0", "q4_0"), lengths=(20,), heads=2)
    case.streams["v"].view.scales[0, 0, 3] = torch.inf
    out, _ = attend(case)
    assert not out[0, 0].isfinite().all()


@pytest.mark.parametrize("kind", ["q8_0", "nf4"])
def test_negative_scales_that_quantize_never_makes_are_read_as_they_are(kind):
    case = build(kinds=(kind, kind), lengths=(70,), slots=128)
    for stream in case.streams.values():
        stream.view.scales[:, :, ::3] *= -1
    check(case)


def test_queries_of_any_layout():
    case = build(["rotate_k"], tokens=3)
    wanted = attend(case)
    q = case.queries["k"]
    for odd in (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((q, torch.full_like(q, torch.nan)), -1)[..., 0],
        torch.cat((q, torch.full_like(q, torch.nan)), 1)[:, : q.shape[1]],
    ):
        assert not odd.is_contiguous()
        case.queries["k"] = odd
        assert all(torch.equal(a, b) for a, b in zip(attend(case), wanted, strict=True))


def test_rows_far_apart():
    """Offsets beyond 2^31 bytes."""
    case = build(kinds=("q4_0", "q8_0"), heads=2, lengths=(40, 33))
    wanted = attend(case)
    views = {}
    for name, stream in case.streams.items():
        parts = []
        for x in (stream.view.codes, stream.view.scales):
            room = torch.empty(2**31 + x[0].numel(), dtype=x.dtype)  # taken when touched
            parts.append(room.as_strided(x.shape, (2**31, *x.stride()[1:])).copy_(x))
        views[name] = KVView(*parts, stream.view.kind)
    assert all(torch.equal(a, b) for a, b in zip(attend(case, views=views), wanted, strict=True))


def test_lengths_beyond_the_capacity_never_read_beyond_it():
    case = build(kinds=("fp16", "q8_0"), lengths=(64, 64), slots=64)
    out, _ = attend(case, cache_seqlens=cases.rows(10**6, 64))
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4", "fp16"])
@pytest.mark.parametrize("place", [0, 5, 31])
def test_a_damaged_query_shows_and_only_there(place, kind):
    case = build(kinds=(kind, kind), lengths=(70, 66), slots=128, tokens=2)
    case.queries["k"][0, 1, 1, place] = torch.nan
    out, lse = attend(case)
    assert out[0, 1, 1].isnan().all() and lse[0, 1, 1].isnan()
    assert out.isnan().sum() == out.shape[-1] and lse.isnan().sum() == 1


def test_more_real_queries_than_there_are_count_as_all():
    case = build(["tail"], tokens=3, lengths=(45, 18))
    wanted = attend(case)
    for counts in ((4, 3), (3, 2**31 - 1)):
        found = attend(case, query_lens=cases.rows(*counts))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    out, lse = attend(case, query_lens=cases.rows(-1, -(2**31)))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_negative_padding_is_none():
    case = build(["sinks"], lengths=(45, 18))
    found = attend(case, cache_leftpad=cases.rows(-5, -(2**31)))
    assert all(torch.equal(a, b) for a, b in zip(found, attend(case), strict=True))


@pytest.mark.parametrize("options", [("leftpad",), ("leftpad", "query_lens")], ids="+".join)
def test_the_largest_window_and_the_most_kept_tokens_hide_nothing(options):
    case = build(options, tokens=9, lengths=(45, 5), kinds=("fp32", "fp32"))
    wanted = attend(case)
    most = 2**63 - 1
    for option in ({"window_size": (most, 0)}, {"window_size": (0, 0), "num_sink_tokens": most}):
        found = attend(case, **option)
        torch.testing.assert_close(found, wanted)


def test_a_residual_beyond_all_numbers_is_refused():
    args, options = build(["tail"]).flat()
    options["residual_len"] = 2**63 - 1
    with pytest.raises(RuntimeError, match="residual_len needs a tail"):
        torch.ops.caramba_fast.decode_attention(*args, **options)


def test_a_pool_of_no_pages_holds_no_keys():
    args, options = build(["pages"], lengths=(45,)).flat()
    args[1:5] = [x[:0] for x in args[1:5]]
    out, lse = torch.ops.caramba_fast.decode_attention(*args, **options)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_calls_from_many_threads_at_once():
    layers = [build(lengths=(900 + i, 40), slots=1024, kinds=("q8_0", "q8_0")) for i in range(4)]
    wanted = [attend(case) for case in layers]
    with ThreadPoolExecutor(len(layers)) as pool, use_backend("cpp"):
        for _ in range(5):
            found = pool.map(lambda case: case.attend(decode_attention), layers)
            for (out, _), (expected, _) in zip(found, wanted, strict=True):
                assert cases.relative_l2(out, expected) <= ALLOWED["q8_0"]


def misused() -> dict[str, tuple[Any, str]]:
    """Changes of the flat arguments of the op, and what it must say."""

    def apart(args: list[Any], options: dict[str, Any]) -> None:
        args[1] = args[1].transpose(1, 2).contiguous().transpose(1, 2)

    def long_lengths(args: list[Any], options: dict[str, Any]) -> None:
        args[5] = args[5].long()

    def unknown(args: list[Any], options: dict[str, Any]) -> None:
        args[6] = "q5_1"

    def other_kind(args: list[Any], options: dict[str, Any]) -> None:
        args[6] = "fp16"

    def few_rows(args: list[Any], options: dict[str, Any]) -> None:
        args[5] = args[5][:1]

    def heads(args: list[Any], options: dict[str, Any]) -> None:
        options["n_kv_heads"] = 3

    def tokens(args: list[Any], options: dict[str, Any]) -> None:
        args[0] = torch.randn(2, 4, 33, 32)

    def residual(args: list[Any], options: dict[str, Any]) -> None:
        options["residual_len"] = 5

    def scales(args: list[Any], options: dict[str, Any]) -> None:
        args[2] = args[2][:, :, :-1]

    return {
        "slots apart": (apart, "slots of a lane must be contiguous"),
        "int64 lengths": (long_lengths, "cache_seqlens has dtype Long"),
        "an unknown kind": (unknown, "k_kind is 'q5_1'"),
        "codes of another kind": (other_kind, "k_codes"),
        "too few lengths": (few_rows, "cache_seqlens has 1 elements; 2"),
        "heads that do not divide": (heads, "not a multiple of n_kv_heads=3"),
        "too many query tokens": (tokens, "T=33"),
        "a residual without a tail": (residual, "residual_len needs a tail"),
        "scales of other slots": (scales, "codes and scales differ"),
    }


@pytest.mark.parametrize("name", misused())
def test_misuse_of_the_op_raises_and_says_what_is_wrong(name):
    """The public functions check first; the op itself must not read out of bounds either."""
    change, message = misused()[name]
    args, options = build(["rotate_k"], heads=4).flat()
    change(args, options)
    with pytest.raises(RuntimeError, match=message.replace("(", r"\(")):
        torch.ops.caramba_fast.decode_attention(*args, **options)


def test_opcheck():
    case = build(["leftpad"], tokens=2)
    for stream in case.streams.values():
        stream.view.scales.nan_to_num_()
    args, keywords = case.flat()
    with use_backend("cpp"):
        torch.library.opcheck(torch.ops.caramba_fast.decode_attention.default, args, keywords)


# -- prompts ------------------------------------------------------------------------------------

#: What a prompt on a prefix may have; its tail has room for all of its tokens in `LayerCache` alone.
LONG = [option for option in EVERYTHING if option not in ("tail", "query_lens")]


@pytest.mark.parametrize(
    "kinds", [("fp16", "fp32"), ("q8_0", "q8_0"), ("q4_0", "nf4")], ids="/".join
)
@pytest.mark.parametrize("tokens", [33, 64, 100])
@pytest.mark.parametrize("options", [(), ("pages", "leftpad"), ("window",), LONG], ids=len)
def test_a_prompt_on_a_prefix(options, tokens, kinds):
    check(
        build(options, tokens=tokens, lengths=(tokens + 40, tokens + 21), slots=160, kinds=kinds),
        extends=True,
    )


@pytest.mark.parametrize(
    "kinds", [("fp16", "fp32"), ("bf16", "bf16"), ("q8_0", "fp16"), ("fp32", "nf4")], ids="/".join
)
@pytest.mark.parametrize("options", [(), ("pages", "leftpad"), ("window",), LONG], ids=len)
def test_a_prompt_on_a_prefix_by_passes_for_many_queries(options, kinds):
    check(
        build(options, tokens=100, lengths=(140, 121), slots=160, kinds=kinds),
        extends=True, batch_invariant=False,
    )  # fmt: skip


@pytest.mark.parametrize("counts", [[100, 37], [100, 0], [64, 33], [1, 100]], ids=str)
def test_prompts_of_different_lengths(counts):
    for decoupled in (False, True):
        case = build(["rotate_k"], decoupled=decoupled, tokens=100, lengths=(140, 121), slots=160)
        case.query_lens = counts
        check(case, extends=True)


def test_a_piece_of_a_prompt_is_what_a_step_would_be():
    """Chunks of any size give the same numbers, but for where rows are cut for threads."""
    case = build(tokens=100, lengths=(140, 121), slots=160, kinds=("q4_0", "q8_0"))
    whole = attend(case, extends=True, num_splits=1)
    q, lengths = case.queries["k"], case.lengths
    for start, stop in ((0, 7), (30, 50), (99, 100)):
        case.queries = {"k": q[:, :, start:stop]}
        case.lengths = [n - (100 - stop) for n in lengths]
        for a, b in zip(attend(case, num_splits=1), whole, strict=True):
            torch.testing.assert_close(a, b[:, :, start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [(), ("tail", "sinks", "window"), ("pages", "leftpad")], ids=len
)
@pytest.mark.parametrize("kinds", [
    ("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("q8_0", "q4_0"), ("nf4", "q8_0"), ("q4_0", "nf4"),
], ids="/".join)  # fmt: skip
@pytest.mark.parametrize("dim", [64, 80])
def test_a_query_has_the_same_bits_alone_and_among_many(dim, kinds, options):
    """Whatever passes pay off with how many queries."""
    case = build(
        options,
        dims={"k": dim, "v": dim},
        heads=14,
        tokens=8,
        lengths=(145, 75),
        slots=160,
        kinds=kinds,
    )
    found = attend(case, num_splits=1)
    q, lengths = case.queries["k"], case.lengths
    for token in range(8):
        case.queries = {"k": q[:, :, token : token + 1]}
        case.lengths = [n - (7 - token) for n in lengths]
        for alone, among in zip(attend(case, num_splits=1), found, strict=True):
            assert torch.equal(alone[:, :, 0], among[:, :, token])


def test_opcheck_of_a_prompt():
    case = build(["leftpad"], tokens=40, lengths=(90, 70), slots=96)
    for stream in case.streams.values():
        stream.view.scales.nan_to_num_()
    args, keywords = case.flat()
    with use_backend("cpp"):
        torch.library.opcheck(torch.ops.caramba_fast.extend_attention.default, args, keywords)


# -- append -------------------------------------------------------------------------------------


def written(case: Case, backend: str, decoupled: bool) -> list[torch.Tensor]:
    """Every buffer after an append; what nobody wrote is what it was before."""
    with use_backend(backend):
        case.append(appending(decoupled))
    buffers = []
    for stream in case.streams.values():
        view = stream.view
        buffers += [
            x.clone() for x in (view.codes, view.scales, view.tail, view.sink) if x is not None
        ]
    return buffers


@pytest.mark.parametrize(
    "kinds", [("q8_0", "q4_0"), ("nf4", "fp16"), ("bf16", "fp32")], ids="/".join
)
@pytest.mark.parametrize(
    "dims", [{"k": 32, "v": 64}, {"k": 80, "v": 80}, {"k": 8, "v": 8}], ids=str
)
@pytest.mark.parametrize("options", [
    (), ("pages", "leftpad"), ("tail", "sinks", "leftpad"),
], ids="+".join)  # fmt: skip
def test_append_writes_the_bits_of_the_reference(options, dims, kinds):
    torch.manual_seed(3)
    case = cases.build(options, dims=dims, kinds=kinds, kv_heads=3, heads=3, lengths=(45, 18, 64))
    expected = written(case, "reference", False)
    torch.manual_seed(3)
    again = cases.build(options, dims=dims, kinds=kinds, kv_heads=3, heads=3, lengths=(45, 18, 64))
    for found, wanted in zip(written(again, "cpp", False), expected, strict=True):
        assert torch.equal(
            torch.nan_to_num(found.float(), 7.0), torch.nan_to_num(wanted.float(), 7.0)
        )


@pytest.mark.parametrize("decoupled", [False, True])
def test_append_with_everything_reads_back_like_the_reference(decoupled):
    """Rotations add up in another order: a code may differ by one, attention must not."""
    dims = {"dims": DBA, "kinds": ("q8_0", "q4_0", "nf4")} if decoupled else {}
    case = cases.build(EVERYTHING, tokens=3, heads=3, kv_heads=3, **dims)
    with use_backend("cpp"):
        case.append(appending(decoupled))
    check(case)


def test_append_before_the_first_slot_writes_nothing():
    case = cases.build(["tail", "sinks"], lengths=(8,))
    around = {}
    for name, stream in case.streams.items():
        tail = stream.view.tail
        around[name] = torch.full((3, *tail.shape[1:]), 7.0, dtype=tail.dtype)
        stream.view = replace(stream.view, tail=around[name][1:2])
    views, given = zip(*((s.view, s.given) for s in case.streams.values()), strict=True)
    with use_backend("cpp"):
        append_(*views, *given, cases.rows(-20))
    assert all((x == 7).all() for x in around.values())


def test_append_needs_pages_with_slots():
    args, options = build(["pages"], lengths=(45,)).flat_append()
    args[:4] = [x[:, :, :0] for x in args[:4]]
    with pytest.raises(RuntimeError, match="pages have no slots"):
        torch.ops.caramba_fast.append_(*args, **options)


def test_append_with_least_squares_scales():
    torch.manual_seed(5)
    for kind in ("q8_0", "q4_0", "nf4"):
        x = torch.randn(2, 2, 40, 64)
        buffers = []
        for backend in ("reference", "cpp"):
            views = [
                KVView(
                    torch.zeros(2, 2, 64, 64 if kind == "q8_0" else 32,
                                dtype=torch.int8 if kind == "q8_0" else torch.uint8),
                    torch.zeros(2, 2, 64, 2, dtype=torch.float16), kind, fit="mse",
                )
                for _ in range(2)
            ]  # fmt: skip
            with use_backend(backend):
                append_(*views, x, x, cases.rows(3, 20))
            buffers.append([view.codes for view in views])
        differ = sum(int((a != b).sum()) for a, b in zip(*buffers, strict=True))
        assert (
            differ <= 0.002 * buffers[0][0].numel()
        )  # blocks whose two best scales are a rounding apart


# -- anything -----------------------------------------------------------------------------------


@settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.data())
def test_any_shape_kind_and_options(data):
    """Everything at once, as it comes; hypothesis reports the smallest failing case."""
    draw = data.draw
    decoupled = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=2 + decoupled, max_size=2 + decoupled))
    dim = st.sampled_from((8, 16, 32, 64, 80, 96, 128))
    names = ("k_sem", "k_geo", "v") if decoupled else ("k", "v")
    dims = {name: draw(dim) for name in names}
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 5))
    tokens = draw(st.integers(1, 32))
    options = draw(st.lists(st.sampled_from(EVERYTHING), unique=True, max_size=5))
    lengths = draw(st.lists(st.integers(tokens, 250), min_size=1, max_size=3))
    case = build(
        options, decoupled=decoupled, dims=dims, kinds=kinds, kv_heads=kv_heads, heads=heads,
        tokens=tokens, lengths=lengths, slots=256, ring=48,
    )  # fmt: skip
    check(case, num_splits=draw(st.sampled_from((0, 0, 1, 3))))


# -- the other instruction sets -----------------------------------------------------------------

FILES = (
    "extension",
    "cpp_attention",
    "cpp_bounds",
    "cpp_extremes",
    "causal_attention",
    "by_channel",
)


@pytest.mark.skipif(ISA_VARIABLE in os.environ, reason="this run is about one instruction set")
@pytest.mark.parametrize("isa", expected_isas()[:-1])
def test_every_instruction_set(isa):
    """The tests of the C++ kernels with every narrower instruction set; the widest is used unforced.

    A hundred thousand tokens try how a context is split, which is the same for all sets, as is how ops are loaded.
    """
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in FILES]
    same = "hundred_thousand or first_of_a_process or unknown_instruction_set"
    options = ("-q", "-p", "no:cacheprovider", "-k", f"(extension or cpp) and not ({same})")
    result = in_subprocess(isa, "-m", "pytest", *options, *files)
    assert result.returncode == 0, result.stdout + result.stderr
