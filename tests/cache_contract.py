"""What every cache of a layer must do, whatever its type and storage.

A test module derives from `LayerCacheContract` and provides ``make``; pytest then runs all of it.
"""

from __future__ import annotations

import dense
import pytest
import torch
from tolerances import RELATIVE_L2, relative_l2

BATCH, HEADS, KV_HEADS, DIM, CAPACITY = 2, 4, 2, 64, 96


def tokens(count: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, KV_HEADS, count, DIM)


class LayerCacheContract:
    """Derive and override `make`: a new empty cache of BATCH rows with its memory poisoned."""

    def make(self, kind: str, max_seq_len: int = CAPACITY):
        raise AssertionError("the deriving test provides this")

    def filled(self, kind: str, count: int, **kw):
        cache = self.make(kind, **kw)
        k, v = tokens(count), tokens(count)
        cache.append(k, v)
        return cache, k, v

    # -- content --------------------------------------------------------------------------

    def test_a_new_cache_is_empty(self, kind):
        cache = self.make(kind)
        assert cache.pos == 0 and cache.is_empty and cache.seq_lens.tolist() == [0, 0]
        assert all(x.shape == (BATCH, KV_HEADS, 0, DIM) for x in cache.get())

    def test_get_returns_what_was_appended_up_to_the_format(self, kind):
        cache, k, v = self.filled(kind, 9)
        bound = {"fp32": 0, "fp16": 6e-4, "bf16": 5e-3, "q8_0": 0.01, "q4_0": 0.13, "nf4": 0.13}[
            kind
        ]
        for stored, given in zip(cache.get(), (k, v), strict=True):
            assert stored.dtype == torch.float32
            assert relative_l2(stored, given) <= bound
        assert all(x.dtype == torch.float16 for x in cache.get(torch.float16))

    def test_flat_and_headed_tokens_are_the_same(self, kind):
        cache, k, v = self.filled(kind, 5)
        flat = self.make(kind)
        flat.append(k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2))
        assert all(map(torch.equal, cache.get(), flat.get()))

    def test_appending_in_pieces_equals_appending_at_once(self, kind):
        cache, k, v = self.filled(kind, 12)
        pieces = self.make(kind)
        for start, stop in ((0, 1), (1, 8), (8, 12)):
            pieces.append(k[:, :, start:stop], v[:, :, start:stop])
        assert all(map(torch.equal, cache.get(), pieces.get()))

    def test_padded_rows_grow_by_their_own_length(self, kind):
        cache, k, v = self.filled(kind, 3)
        cache.append(k, v, [3, 1])
        assert cache.seq_lens.tolist() == [6, 4] and cache.pos == 6
        stored = cache.get()[0]
        assert torch.equal(stored[0, :, 3:], stored[0, :, :3])
        assert torch.equal(stored[1, :, 3], stored[1, :, 0])
        assert (stored[1, :, 4:] == 0).all()

    # -- attention ------------------------------------------------------------------------

    @pytest.mark.parametrize("queries", [1, 5])
    @pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
    def test_attend_equals_dense_attention_over_get(self, kind, queries, window):
        cache, _, _ = self.filled(kind, 20)
        cache.crop([0, 7])
        q = torch.randn(BATCH, HEADS, queries, DIM)
        out = cache.attend(q, window_size=window)
        expected, _ = dense.attend(q, *cache.get(), [20, 13], window=window)
        assert relative_l2(out, expected) <= RELATIVE_L2[torch.float32]

    def test_many_queries_in_pieces_equal_single_steps(self, kind):
        cache, _, _ = self.filled(kind, 60)
        q = torch.randn(BATCH, HEADS, 40, DIM)
        whole = cache.attend(q, return_softmax_lse=True)
        for a, b in zip(whole, cache.attend(q, return_softmax_lse=True, q_chunk=7), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        expected, _ = dense.attend(q, *cache.get(), [60, 60])
        assert relative_l2(whole[0], expected) <= RELATIVE_L2[torch.float32]

    def test_padded_queries_of_a_short_row_do_not_disturb_the_real_ones(self, kind):
        cache, _, _ = self.filled(kind, 6)
        k, v, q = tokens(4), tokens(4), torch.randn(BATCH, HEADS, 4, DIM)
        cache.append(k, v, [4, 2])
        out = cache.attend(q)
        expected, _ = dense.attend(q[1:, :, :2], *(x[1:] for x in cache.get()), [8])
        assert relative_l2(out[1:, :, :2], expected) <= RELATIVE_L2[torch.float32]

    def test_padding_past_the_capacity_is_harmless(self, kind):
        cache = self.make(kind, max_seq_len=128)
        k, v = tokens(120), tokens(120)
        cache.append(k, v, [120, 10])
        cache.append(k[:, :, :100], v[:, :, :100], [8, 100])
        assert cache.seq_lens.tolist() == [128, 110]
        q = torch.randn(BATCH, HEADS, 100, DIM)
        expected, _ = dense.attend(q[:1, :, 5:8], *(x[:1] for x in cache.get()), [128])
        assert relative_l2(cache.attend(q)[:1, :, 5:8], expected) <= RELATIVE_L2[torch.float32]

    # -- shrinking and moving ---------------------------------------------------------------

    @pytest.mark.parametrize("drop", [4, [4, 9], torch.tensor([4, 9])])
    def test_crop_then_append_equals_never_having_appended(self, kind, drop):
        cache, k, v = self.filled(kind, 15)
        cache.crop(drop)
        left = [11, 11] if isinstance(drop, int) else [11, 6]
        assert cache.seq_lens.tolist() == left
        more_k, more_v = tokens(3), tokens(3)
        cache.append(more_k, more_v)
        fresh = self.make(kind)
        fresh.append(k[:, :, :11], v[:, :, :11], left)
        fresh.append(more_k, more_v)
        assert all(map(torch.equal, cache.get(), fresh.get()))
        q = torch.randn(BATCH, HEADS, 3, DIM)
        assert torch.equal(cache.attend(q), fresh.attend(q))

    def test_truncate_keeps_the_first_tokens(self, kind):
        cache, _, _ = self.filled(kind, 10)
        before = cache.get()
        cache.crop([0, 6])
        cache.truncate(7)
        assert cache.seq_lens.tolist() == [7, 4]
        assert torch.equal(cache.get()[0][0], before[0][0, :, :7])
        cache.truncate(0)
        assert cache.is_empty

    def test_reorder_moves_rows_with_their_lengths(self, kind):
        cache, _, _ = self.filled(kind, 10)
        cache.crop([0, 6])
        k, _ = cache.get()
        cache.reorder(torch.tensor([1, 1]))
        assert cache.seq_lens.tolist() == [4, 4]
        assert torch.equal(cache.get()[0], k[[1, 1], :, :4])

    def test_reset_starts_anew(self, kind):
        cache, k, v = self.filled(kind, 10)
        first = cache.get()
        cache.reset()
        assert cache.is_empty and cache.get()[0].shape[2] == 0
        cache.append(k, v)
        assert all(map(torch.equal, cache.get(), first))

    # -- refusing -------------------------------------------------------------------------

    def test_overflow_is_refused_before_anything_is_written(self, kind):
        cache, _, _ = self.filled(kind, 90)
        before = [x.clone() for x in cache.get()]
        with pytest.raises(
            ValueError, match="row 0 holds 90 tokens and cannot take 7 more: max_seq_len is 96"
        ):
            cache.append(tokens(7), tokens(7))
        cache.crop([5, 0])
        with pytest.raises(ValueError, match="row 1"):
            cache.append(tokens(7), tokens(7))
        cache.append(tokens(6), tokens(6))
        assert cache.seq_lens.tolist() == [91, 96]
        assert torch.equal(cache.get()[0][:, :, :85], before[0][:, :, :85])

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda c: c.append(torch.randn(2, 2, 1, 32), tokens(1)),
                r"k has shape \(2, 2, 1, 32\)",
            ),
            (lambda c: c.append(tokens(1), torch.randn(2, 1, 64)), r"v has shape \(2, 1, 64\)"),
            (lambda c: c.append(tokens(1, batch=3), tokens(1)), "k has shape"),
            (lambda c: c.append(tokens(0), tokens(0)), "T >= 1"),
            (lambda c: c.append(tokens(2), tokens(1)), "k has 2, v has 1 tokens"),
            (lambda c: c.append(tokens(1).long(), tokens(1)), "k has dtype torch.int64"),
            (lambda c: c.append(tokens(2), tokens(2), [1, 3]), r"new_lens\[1\] is 3"),
            (lambda c: c.append(tokens(2), tokens(2), [1]), "1 entries for 2 rows"),
            (lambda c: c.crop(11), "cannot crop 11 tokens of row 0, which holds 10"),
            (lambda c: c.crop(-1), "cannot crop -1"),
            (lambda c: c.crop(1.0), "n is a float"),
            (lambda c: c.crop([1, 2, 3]), "3 entries for 2 rows"),
            (lambda c: c.crop(torch.tensor([0.5, 1])), "integer tensor on cpu"),
            (lambda c: c.truncate(11), "0 to 10"),
            (lambda c: c.reorder(torch.tensor([0, 2])), "0 to 1 is allowed"),
            (lambda c: c.reorder(torch.tensor([0])), r"\(2,\) integers are needed"),
            (lambda c: c.attend(torch.randn(2, 4, 11, 64)), "T from 1 to the 10 tokens"),
            (lambda c: c.attend(torch.randn(2, 3, 1, 64)), "not a multiple of n_kv_heads=2"),
        ],
    )
    def test_bad_input_is_named_and_changes_nothing(self, kind, call, message):
        cache, _, _ = self.filled(kind, 10)
        before = cache.get()
        with pytest.raises((TypeError, ValueError), match=message):
            call(cache)
        assert cache.seq_lens.tolist() == [10, 10]
        assert all(map(torch.equal, before, cache.get()))
