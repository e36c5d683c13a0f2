"""merge_state: any split of the keys gives the attention over all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caramba_fast.ops import merge_state, use_backend


def softmax_over(logits, values):
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 15), st.sampled_from([1.0, 30.0, 300.0]), st.integers(0, 1000))
def test_merging_a_split_equals_the_whole(cut, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 4, 16, generator=generator) * spread
    values = torch.randn(2, 3, 16, 8, generator=generator)
    whole, lse = softmax_over(logits, values)
    first = softmax_over(logits[..., :cut], values[:, :, :cut])
    second = softmax_over(logits[..., cut:], values[:, :, cut:])
    merged, merged_lse = merge_state(*first, *second)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)


def test_an_empty_side_changes_nothing_and_two_give_zero():
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge_state(out, lse, *nothing), merge_state(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    empty = merge_state(*nothing, *nothing)
    assert (empty[0] == 0).all() and (empty[1] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 96, 576])
def test_triton_equals_the_reference(dim, dtype, device):
    pytest.importorskip("triton")
    outs = [torch.randn(2, 3, 5, dim).to(dtype) for _ in range(2)]
    sums = [torch.randn(2, 3, 5) * 9 for _ in range(2)]
    for side, row in ((0, 0), (1, 1), (0, 2), (1, 2)):  # the last row is empty on both sides
        outs[side][0, 0, row], sums[side][0, 0, row] = 0, -torch.inf
    sums[0][1, 1, 1] = torch.nan
    state = [outs[0], sums[0], outs[1], sums[1]]
    apart = [x.transpose(0, 1) for x in state]
    for given_ in (state, apart):
        with use_backend("reference"):
            wanted = merge_state(*given_)
        with use_backend("triton"):
            got = merge_state(*[x.to(device) for x in given_])
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.cpu(), b, equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_results_are_contiguous_wherever_what_is_merged_lies(backend):
    """As the shapes that a compiler is told: flash-attention's layout is another."""
    state = [torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(2, 5, 3).transpose(1, 2)] * 2
    with use_backend(backend):
        out, lse = merge_state(*state)
    assert out.is_contiguous() and lse.is_contiguous()
    torch.library.opcheck(
        torch.ops.caramba_fast.merge_state.default, state, test_utils=("test_faketensor",)
    )


def test_opcheck():
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    torch.library.opcheck(
        torch.ops.caramba_fast.merge_state.default, (out, lse, out.flip(0), lse.flip(0))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(lse_a=torch.randn(2, 3)), r"lse_a has shape \(2, 3\); \(2, 3, 4\) is needed"),
        (dict(lse_b=torch.randn(2, 3, 4).half()), "lse_b has dtype torch.float16"),
        (dict(out_b=torch.randn(2, 3, 4, 9)), "must agree"),
        (dict(out_a=torch.randint(3, (2, 3, 4, 8))), "out_a has dtype torch.int64"),
    ],
)
def test_bad_input_is_named(change, message):
    good = dict(
        out_a=torch.randn(2, 3, 4, 8), lse_a=torch.randn(2, 3, 4),
        out_b=torch.randn(2, 3, 4, 8), lse_b=torch.randn(2, 3, 4),
    )  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=message):
        merge_state(**{**good, **change})
