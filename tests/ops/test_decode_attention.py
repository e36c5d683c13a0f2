"""The reference decode_attention against dense float64 attention over the same stored bytes."""

import pytest
import torch
from support import dense, stored
from support.tolerances import RELATIVE_L2, relative_l2

from caramba_fast.ops import KVView, decode_attention, merge_state, use_backend
from caramba_fast.ops.view import Lanes


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def case(
    k_kind="q8_0",
    v_kind="q4_0",
    heads=4,
    kv_heads=2,
    dim=64,
    queries=1,
    lengths=(37, 5),
    block=32,
    v_dim=None,
):
    """Queries, poisoned and written K and V, their dequantized values, and lengths."""
    v_dim = v_dim or dim
    lanes = Lanes.of(kv_heads, dim, v_dim)
    batch, slots = len(lengths), 128
    k = stored.poisoned(batch, slots, lanes, dim, k_kind, block)
    v = stored.poisoned(batch, slots, lanes, v_dim, v_kind, block)
    k_new, v_new = (
        torch.randn(batch, kv_heads, slots, dim),
        torch.randn(batch, kv_heads, slots, v_dim),
    )
    stored.write(k, v, k_new, v_new, list(lengths))
    q = torch.randn(batch, heads, queries, dim)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    return q, k, v, stored.values(k, lanes), stored.values(v, lanes), seqlens, kv_heads


def check(
    q,
    k,
    v,
    k_values,
    v_values,
    seqlens,
    kv_heads,
    dtype=torch.float32,
    window=(-1, -1),
    leftpad=None,
    **same,
):
    q = q.to(dtype)
    pad = None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32)
    options = {"softmax_scale" if name == "scale" else name: value for name, value in same.items()}
    out, lse = decode_attention(
        q, k, v, seqlens, n_kv_heads=kv_heads, window_size=window, cache_leftpad=pad,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    expected, expected_lse = dense.attend(
        q, k_values, v_values, seqlens.tolist(), window=window, leftpad=leftpad, **same
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.isfinite().all()
    assert relative_l2(out, expected) <= RELATIVE_L2[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("v_kind", ["fp32", "fp16", "bf16", "q8_0", "q4_0", "nf4"])
def test_every_mix_of_kinds(kind, v_kind):
    check(*case(k_kind=kind, v_kind=v_kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_query_dtypes(dtype):
    check(*case(), dtype=dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 3), (12, 4)])
@pytest.mark.parametrize("dim", [8, 16, 64, 80, 96, 112, 128, 256])
def test_head_dims_and_groups(heads, kv_heads, dim):
    check(*case(heads=heads, kv_heads=kv_heads, dim=dim))


def test_value_width_may_differ_from_key_width():
    check(*case(dim=32, v_dim=96))


@pytest.mark.parametrize("queries", [1, 2, 7, 16, 32])
def test_several_query_tokens_are_causal_among_themselves(queries):
    check(*case(queries=queries, lengths=(37, 40)))


@pytest.mark.parametrize(
    "window", [(0, 0), (3, 0), (10, 0), (100, 0), (5, -1), (-1, 0), (-1, 3), (4, 4)]
)
@pytest.mark.parametrize("queries", [1, 4])
def test_windows(window, queries):
    check(*case(queries=queries), window=window)


@pytest.mark.parametrize("leftpad", [[0, 0], [3, 4], [36, 0], [37, 5]])
def test_left_padding(leftpad):
    check(*case(queries=2), leftpad=leftpad)


def test_options_together():
    check(
        *case(queries=3, lengths=(50, 20)), window=(12, 0), leftpad=[41, 3], softcap=5.0, scale=0.3
    )


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_softcap(softcap):
    check(*case(queries=2), softcap=softcap)


@pytest.mark.parametrize("block", [64, 128])
def test_blocks(block, kind):
    check(*case(k_kind=kind, v_kind=kind, dim=128, block=block))


def test_large_logits_do_not_overflow():
    q, *rest = case()
    check(q * 1e4, *rest)


@pytest.mark.parametrize("lengths", [(0, 5), (0, 0), (1, 2)])
def test_rows_without_keys_give_zero_and_minus_infinity(lengths):
    q, k, v, _, _, seqlens, kv_heads = case(queries=2, lengths=lengths)
    out, lse = decode_attention(q, k, v, seqlens, n_kv_heads=kv_heads, return_softmax_lse=True)
    for b, length in enumerate(lengths):
        for t in range(2):
            blind = length - 2 + t < 0
            assert bool((lse[b, :, t] == -torch.inf).all()) == blind
            assert bool((out[b, :, t] == 0).all()) == blind
    assert out.isfinite().all()


@pytest.mark.parametrize("window", [(-1, -1), (6, 0)])
@pytest.mark.parametrize("leftpad", [None, [4, 2]])
def test_zero_keys_give_the_plain_mean_over_what_is_allowed(window, leftpad):
    """Random data hides a mask that is off by one; equal weights do not."""
    lengths, queries = (21, 9), 3
    lanes = Lanes.of(2, 64)
    k = stored.poisoned(2, 128, lanes, 64, "fp32")
    v = stored.poisoned(2, 128, lanes, 64, "fp32")
    numbers = torch.arange(128.0).view(1, 1, 128, 1).expand(2, 2, 128, 64)
    stored.write(k, v, torch.zeros(2, 2, 128, 64), numbers, list(lengths))
    pad = None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32)
    out = decode_attention(
        torch.randn(2, 4, queries, 64), k, v, torch.tensor(lengths, dtype=torch.int32), n_kv_heads=2,
        window_size=window, cache_leftpad=pad,
    )  # fmt: skip
    for b in range(2):
        for t in range(queries):
            last = lengths[b] - queries + t
            first = max(
                0 if leftpad is None else leftpad[b], 0 if window[0] < 0 else last - window[0]
            )
            torch.testing.assert_close(out[b, :, t], torch.full((4, 64), (first + last) / 2))


def test_several_tokens_at_once_equal_single_steps():
    q, k, v, _, _, seqlens, kv_heads = case(queries=6, lengths=(40, 21))
    whole = decode_attention(q, k, v, seqlens, n_kv_heads=kv_heads, window_size=(15, 0))
    for t in range(6):
        step = decode_attention(
            q[:, :, t : t + 1], k, v, seqlens - 5 + t, n_kv_heads=kv_heads, window_size=(15, 0)
        )
        torch.testing.assert_close(whole[:, :, t : t + 1], step, rtol=1e-6, atol=1e-6)


def test_merging_two_halves_of_the_cache_gives_the_whole():
    q, k, v, _, _, seqlens, kv_heads = case(lengths=(100, 100))
    whole, lse = decode_attention(q, k, v, seqlens, n_kv_heads=kv_heads, return_softmax_lse=True)
    early = decode_attention(q, k, v, seqlens - 60, n_kv_heads=kv_heads, return_softmax_lse=True)
    late = decode_attention(
        q, k, v, seqlens, n_kv_heads=kv_heads, return_softmax_lse=True,
        cache_leftpad=torch.full((2,), 40, dtype=torch.int32),
    )  # fmt: skip
    out, merged_lse = merge_state(*early, *late)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse)


def test_a_row_does_not_depend_on_its_batch():
    q, k, v, _, _, seqlens, kv_heads = case(lengths=(37, 90), queries=2)
    both = decode_attention(q, k, v, seqlens, n_kv_heads=kv_heads)
    alone = decode_attention(
        q[:1], KVView(k.codes[:1], k.scales[:1], k.kind), KVView(v.codes[:1], v.scales[:1], v.kind),
        seqlens[:1], n_kv_heads=kv_heads,
    )  # fmt: skip
    torch.testing.assert_close(both[:1], alone, rtol=1e-6, atol=1e-6)


def test_strided_queries_and_views_of_a_longer_buffer():
    _, k, v, *_, seqlens, kv_heads = case(queries=4)
    wide = torch.randn(2, 4, 64, 4).transpose(2, 3)
    assert torch.equal(
        decode_attention(wide, k, v, seqlens, n_kv_heads=kv_heads),
        decode_attention(wide.contiguous(), k.slice(64), v.slice(64), seqlens, n_kv_heads=kv_heads),
    )


def test_opcheck_and_fullgraph(kind):
    q, k, v, _, _, seqlens, kv_heads = case(k_kind=kind, v_kind=kind, queries=2)
    args = (q, k.codes, k.scales, v.codes, v.scales, seqlens, k.kind, v.kind)
    torch.library.opcheck(
        torch.ops.caramba_fast.decode_attention.default,
        args,
        {"n_kv_heads": kv_heads, "window_size": [9, 0]},
    )
    with use_backend("auto"):
        run = torch.compile(
            lambda q: decode_attention(q, k, v, seqlens, n_kv_heads=kv_heads), fullgraph=True
        )
        torch.testing.assert_close(run(q), decode_attention(q, k, v, seqlens, n_kv_heads=kv_heads))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.randn(2, 4, 64)), r"q has shape \(2, 4, 64\), .*\(B, H_q, T, D\)"),
        (dict(q=torch.randn(2, 4, 0, 64)), "none of them 0"),
        (dict(q=torch.randn(2, 3, 1, 64)), "3 heads, not a multiple of n_kv_heads=2"),
        (dict(q=torch.randn(2, 4, 1, 48)), "q has head_dim 48"),
        (dict(q=torch.randn(3, 4, 1, 64)), "B=3 as in q is needed"),
        (dict(q=torch.randn(2, 4, 1, 64, dtype=torch.float64)), "q has dtype torch.float64"),
        (dict(n_kv_heads=0), "n_kv_heads=0"),
        (dict(cache_seqlens=torch.tensor([3, 4])), "int32 is needed"),
        (dict(cache_seqlens=torch.tensor([3], dtype=torch.int32)), r"\(2,\) int32 is needed"),
        (dict(window_size=(-2, 0)), "window_size is"),
        (dict(softcap=-1.0), "softcap is -1.0"),
        (dict(softmax_scale=float("nan")), "softmax_scale is nan; a finite number"),
        (dict(softmax_scale=float("inf")), "softmax_scale is inf"),
        (
            dict(num_splits=-2),
            "num_splits is -2; -1 ",
        ),
        (dict(cache_leftpad=torch.tensor([0, 0])), r"cache_leftpad is \(2,\) torch.int64"),
    ],
)
def test_bad_input_says_what_is_wrong_and_what_is_allowed(change, message):
    q, k, v, _, _, seqlens, kv_heads = case()
    good = dict(q=q, k=k, v=v, cache_seqlens=seqlens, n_kv_heads=kv_heads)
    with pytest.raises((TypeError, ValueError), match=message):
        decode_attention(**{**good, **change})
