"""append_: what is written, where, and what is left alone."""

import pytest
import torch
from support import stored
from support.blocks import same_bits

from caramba_fast.ops import append_, quantize
from caramba_fast.ops.view import Lanes


def buffers(kind, lanes, dim=64, slots=128, batch=2):
    return (
        stored.poisoned(batch, slots, lanes, dim, kind),
        stored.poisoned(batch, slots, lanes, dim, kind),
    )


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 80), (6, 8), (1, 256)])
def test_each_row_is_written_at_its_own_start_and_nothing_else_changes(kind, heads, dim):
    lanes = Lanes.of(heads, dim)
    k, v = buffers(kind, lanes, dim)
    before = [x.clone() for view in (k, v) for x in (view.codes, view.scales) if x is not None]
    k_new, v_new = torch.randn(2, heads, 3, dim), torch.randn(2, heads, 3, dim)
    append_(k, v, k_new, v_new, starts(0, 41))
    after = [x for view in (k, v) for x in (view.codes, view.scales) if x is not None]
    for old, new in zip(before, after, strict=True):
        for row, start in enumerate((0, 41)):
            assert same_bits(new[row, :, :start], old[row, :, :start])
            assert same_bits(new[row, :, start + 3 :], old[row, :, start + 3 :])
    for view, fresh in ((k, k_new), (v, v_new)):
        packed = lanes.pack(fresh)
        if view.scales is None:
            expected = [packed.to(view.codes.dtype)]
        else:
            expected = list(quantize(packed, kind))
        for row, start in enumerate((0, 41)):
            assert same_bits(view.codes[row, :, start : start + 3], expected[0][row])
            if view.scales is not None:
                assert same_bits(view.scales[row, :, start : start + 3], expected[1][row])


def test_one_token_at_a_time_equals_many_at_once(kind):
    lanes = Lanes.of(2, 64)
    whole, single = buffers(kind, lanes), buffers(kind, lanes)
    k_new, v_new = torch.randn(2, 2, 5, 64), torch.randn(2, 2, 5, 64)
    append_(*whole, k_new, v_new, starts(7, 0))
    for t in range(5):
        append_(*single, k_new[:, :, t : t + 1], v_new[:, :, t : t + 1], starts(7 + t, t))
    for a, b in zip(whole, single, strict=True):
        for row, start in enumerate((7, 0)):
            assert same_bits(a.codes[row, :, start : start + 5], b.codes[row, :, start : start + 5])


@pytest.mark.parametrize("start", [126, 127, 128, 200])
def test_slots_past_the_buffer_are_dropped(kind, start):
    lanes = Lanes.of(2, 64)
    k, v = buffers(kind, lanes)
    clean = k.codes.clone()
    new = torch.randn(2, 2, 4, 64)
    append_(k, v, new, new, starts(start, 0))
    kept = max(128 - start, 0)
    assert same_bits(k.codes[0, :, : 128 - kept], clean[0, :, : 128 - kept])
    other_k, other_v = buffers(kind, lanes)
    if kept:
        append_(other_k, other_v, new[:, :, :kept], new[:, :, :kept], starts(start, 0))
        assert same_bits(k.codes[0, :, start:], other_k.codes[0, :, start:])


def test_heads_that_do_not_fill_a_lane_are_padded_with_zeros():
    lanes = Lanes.of(3, 80)
    assert (lanes.heads_per_lane, lanes.count) == (2, 2)
    k, v = buffers("q8_0", lanes, 80)
    append_(k, v, torch.randn(2, 3, 1, 80), torch.randn(2, 3, 1, 80), starts(0, 0))
    assert (k.codes[:, 1, 0, 80:] == 0).all()


def test_opcheck(kind):
    lanes = Lanes.of(2, 64)
    k, v = buffers(kind, lanes)
    k.codes.zero_(), v.codes.zero_()
    for scales in (k.scales, v.scales):
        if scales is not None:
            scales.zero_()
    new = torch.randn(2, 2, 3, 64)
    args = (k.codes, k.scales, v.codes, v.scales, new, new, starts(0, 9), kind, kind)
    torch.library.opcheck(torch.ops.caramba_fast.append_.default, args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k_new=torch.randn(2, 64)), "k_new has shape"),
        (dict(k_new=torch.randn(3, 2, 1, 64)), "k_new has B=3, its codes 2"),
        (dict(v_new=torch.randn(2, 2, 1, 32)), "v_new has 2 heads of 32"),
        (
            dict(v_new=torch.randn(2, 2, 2, 64)),
            "v_new has shape .* agreeing with .2, 2, 1, 64. in B, H_kv and T",
        ),
        (dict(k_new=torch.zeros(2, 2, 1, 64, dtype=torch.int32)), "k_new has dtype"),
        (dict(start=torch.zeros(2, dtype=torch.int64)), r"\(2,\) int32 is needed"),
        (dict(start=torch.zeros(3, dtype=torch.int32)), r"start is \(3,\)"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(change, message):
    k, v = buffers("q4_0", Lanes.of(2, 64))
    before = k.codes.clone()
    good = dict(
        k=k, v=v, k_new=torch.randn(2, 2, 1, 64), v_new=torch.randn(2, 2, 1, 64), start=starts(0, 0)
    )
    with pytest.raises((TypeError, ValueError), match=message):
        append_(**{**good, **change})
    assert torch.equal(k.codes, before)
