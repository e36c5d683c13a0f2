"""merge_state: any split of the keys gives the attention over all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caramba_fast.ops import merge_state


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
