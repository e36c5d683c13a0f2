"""The contract of every layer cache, whatever its type and storage.

A test module derives from `LayerCacheContract` and provides ``build``; pytest then runs all tests for every storage in
`SETUPS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import cases
from support.tolerances import RELATIVE_L2, relative_l2
from torch import Tensor

from caramba_fast.config import KVCacheKind, KVCacheTensorConfig

BATCH, HEADS, KV_HEADS, CAPACITY = 2, 4, 2, 96
RESIDUAL, SLACK, SINKS = 5, 12, 3
KINDS = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "nf4")
#: Relative error of a stored normal value.
ERROR = {
    "fp32": 1e-6, "fp16": 6e-4, "bf16": 5e-3, "q8_0": 0.01, "q4_0": 0.13, "nf4": 0.13, "q8_channel": 0.01,
    "q4_channel": 0.13,
}  # fmt: skip
#: The kind of values beside keys of a per-channel kind.
BESIDE = {"q8_channel": "q8_0", "q4_channel": "q4_0"}


@dataclass(frozen=True)
class Setup:
    """Storage of the streams of a cache: kind, and any of rotate, sides."""

    kind: str
    extras: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.kind, *self.extras))

    @property
    def config(self) -> KVCacheTensorConfig:
        sides: dict[str, Any] = {}
        if "sides" in self.extras:
            sides = {"residual_len": RESIDUAL, "tail_slack": SLACK, "sink_len": SINKS}
        return KVCacheTensorConfig(kind=self.kind, rotate="rotate" in self.extras, **sides)


SETUPS = (
    *(Setup(kind) for kind in KINDS),
    Setup("q4_0", ("rotate",)), Setup("fp32", ("rotate",)), Setup("q8_0", ("rotate",)),
    Setup("fp32", ("sides",)), Setup("q4_0", ("sides",)), Setup("nf4", ("rotate", "sides")),
    Setup("q4_channel"), Setup("q4_channel", ("sides",)), Setup("q8_channel", ("rotate", "sides")),
)  # fmt: skip


def of_values(config: KVCacheTensorConfig) -> KVCacheTensorConfig:
    """The storage of values beside such keys."""
    return config.model_copy(
        update={"kind": KVCacheKind(BESIDE.get(config.kind.value, config.kind))}
    )


def poison(cache: Any) -> Any:
    """Fills the memory of a new cache with values that would show in any result."""
    for stream in cache.streams.values():
        for buffer in stream.buffers:
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
            else:
                buffer.random_(0, 120)
    return cache


class LayerCacheContract:
    """Derive, set ``dims``, and override `build`."""

    #: Width of a head of each stream.
    dims: dict[str, int]

    def build(self, max_seq_len: int, config: KVCacheTensorConfig) -> Any:
        """A new empty cache of BATCH rows and KV_HEADS heads."""
        raise AssertionError("the deriving test provides this")

    def make(self, setup: Setup, max_seq_len: int = CAPACITY) -> Any:
        return poison(self.build(max_seq_len, setup.config))

    def tokens(self, count: int, batch: int = BATCH) -> list[Tensor]:
        return [torch.randn(batch, KV_HEADS, count, dim) for dim in self.dims.values()]

    def queries(self, count: int) -> list[Tensor]:
        return [torch.randn(BATCH, HEADS, count, d) for n, d in self.dims.items() if n != "v"]

    def filled(self, setup: Setup, count: int, **sizes: Any) -> tuple[Any, list[Tensor]]:
        cache, new = self.make(setup, **sizes), self.tokens(count)
        cache.append(*new)
        return cache, new

    def expected(
        self,
        cache: Any,
        setup: Setup,
        queries: list[Tensor],
        leftpad: list[int] | None = None,
        query_lens: list[int] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Dense attention over the bytes the cache holds."""
        streams = {
            name: cases.Stream(name, s.view, torch.empty(BATCH, KV_HEADS, 1, s.head_dim))
            for name, s in cache.streams.items()
        }
        first = next(iter(cache.streams.values()))
        case = cases.Case(
            streams=streams,
            queries=dict(zip([n for n in self.dims if n != "v"], queries, strict=True)),
            lengths=list(cache.lengths.host),
            leftpad=leftpad or [0] * BATCH,
            query_lens=query_lens,
            table=None if cache.pages is None else cache.pages.tensor,
            residual_len=cache.residual_len,
            ring=0 if first.tail is None else first.tail.shape[2],
            sink_len=0 if first.sink is None else first.sink.shape[2],
        )
        return case.expected(**options)

    def test_a_new_cache_is_empty(self, setup):
        cache = self.make(setup)
        assert cache.pos == 0 and cache.is_empty and cache.seq_lens.tolist() == [0, 0]
        assert cache.seq_lens.dtype == torch.int32
        for x, dim in zip(cache.get(), self.dims.values(), strict=True):
            assert x.shape == (BATCH, KV_HEADS, 0, dim)

    def test_get_returns_what_was_appended_up_to_the_format(self, setup):
        cache, new = self.filled(setup, 9)
        bound = ERROR[setup.kind]
        for stored, given in zip(cache.get(), new, strict=True):
            assert stored.dtype == torch.float32
            assert relative_l2(stored, given) <= bound
        assert all(x.dtype == torch.float16 for x in cache.get(torch.float16))

    def test_flat_and_headed_tokens_are_the_same(self, setup):
        cache, new = self.filled(setup, 5)
        flat = self.make(setup)
        flat.append(*(x.transpose(1, 2).flatten(2) for x in new))
        assert all(map(torch.equal, cache.get(), flat.get()))

    def test_appending_in_pieces_equals_appending_at_once(self, setup):
        cache, new = self.filled(setup, 42)
        pieces = self.make(setup)
        for start, stop in ((0, 1), (1, 8), (8, 32), (32, 42)):
            pieces.append(*(x[:, :, start:stop].contiguous() for x in new))
        assert all(map(torch.equal, cache.get(), pieces.get()))
        q = self.queries(2)
        assert torch.equal(cache.attend(*q), pieces.attend(*q))

    def test_padded_rows_grow_by_their_own_length(self, setup):
        cache, new = self.filled(setup, 3)
        cache.append(*new, [3, 1])
        assert cache.seq_lens.tolist() == [6, 4] and cache.pos == 6
        stored = cache.get()[-1]
        assert torch.equal(stored[0, :, 3:], stored[0, :, :3])
        assert torch.equal(stored[1, :, 3], stored[1, :, 0])
        assert (stored[1, :, 4:] == 0).all()

    def test_a_row_that_takes_no_token_stays_as_it_is(self, setup):
        cache, _ = self.filled(setup, 35)
        before = cache.get()
        cache.append(*self.tokens(4), [0, 4])
        assert cache.seq_lens.tolist() == [35, 39]
        for old, new in zip(before, cache.get(), strict=True):
            assert torch.equal(new[:, :, :35], old)
            assert (new[0, :, 35:] == 0).all()
        q = self.queries(4)
        cases.check(
            cache.attend(*q, return_softmax_lse=True),
            self.expected(cache, setup, q, query_lens=[0, 4]),
        )

    def test_rows_that_never_held_a_token_can_be_attended_from(self, setup):
        cache, q = self.make(setup), self.queries(3)
        cache.append(*self.tokens(3), [0, 0])
        out, lse = cache.attend(*q, return_softmax_lse=True)
        assert not out.any() and (lse == -torch.inf).all()

    def test_nbytes_are_the_bytes_allocated(self, setup):
        cache = self.make(setup)
        buffers = [x for stream in cache.streams.values() for x in stream.buffers]
        buffers += [] if cache.pages is None else [cache.pages.tensor]
        assert cache.nbytes == sum(buffer.untyped_storage().nbytes() for buffer in buffers)

    @pytest.mark.parametrize("stored", ["fp32", "q4_0+sides"])
    def test_tokens_that_require_grad_leave_no_graph_in_the_cache(self, stored):
        """Otherwise a model without no_grad would keep every step in memory."""
        cache = self.make(next(setup for setup in SETUPS if str(setup) == stored))
        cache.append(*(x.requires_grad_() for x in self.tokens(3)))
        buffers = [x for stream in cache.streams.values() for x in stream.buffers]
        assert not any(buffer.requires_grad for buffer in buffers)

    @pytest.mark.parametrize("queries", [1, 5])
    @pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
    def test_attend_equals_dense_attention_over_what_is_stored(self, setup, queries, window):
        cache, _ = self.filled(setup, 40)
        cache.crop([0, 7])
        q = self.queries(queries)
        cases.check(
            cache.attend(*q, window_size=window, return_softmax_lse=True),
            self.expected(cache, setup, q, window_size=window),
        )

    def test_left_padding_is_counted_from_and_not_seen(self, setup):
        cache, new, pad = self.make(setup), self.tokens(12), cases.rows(0, 4)
        cache.append(*new, cache_leftpad=pad)
        cache.append(*self.tokens(3), cache_leftpad=pad)
        q = self.queries(3)
        cases.check(
            cache.attend(*q, cache_leftpad=pad, return_softmax_lse=True),
            self.expected(cache, setup, q, leftpad=[0, 4]),
        )
        bound = ERROR[setup.kind]
        for stored, given in zip(cache.get(cache_leftpad=pad), new, strict=True):
            assert relative_l2(stored[1, :, 4:12], given[1, :, 4:]) <= bound

    def test_many_queries_in_pieces_equal_single_steps(self, setup):
        cache, _ = self.filled(setup, 60)
        q = self.queries(40)
        if cache.ring_len:  # the ring no longer holds the tokens that the first queries read
            cache.attend(*q)
            slack = cache.tail_slack
            with pytest.raises(
                ValueError, match=f"tail_slack={slack} are allowed, or those of the"
            ):
                cache.attend(*q)
            return
        whole = cache.attend(*q, return_softmax_lse=True)
        cases.check(whole, self.expected(cache, setup, q))
        last = cache.attend(*(x[:, :, -1:] for x in q))
        assert relative_l2(last, whole[0][:, :, -1:]) <= RELATIVE_L2[torch.float32]
        pieces = cache.attend(*q, return_softmax_lse=True, q_chunk=7)
        for a, b in zip(whole, pieces, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("held", [0, 3, 33])
    def test_a_chunk_of_a_prompt_equals_tokens_one_by_one(self, setup, held):
        """Far more tokens at once than a tail has slack for, in rows that grow by different numbers."""
        new, q, lens = self.tokens(40), self.queries(40), [40, 21]
        at_once, by_one = self.make(setup), self.make(setup)
        if held:
            before = self.tokens(held)
            at_once.append(*before)
            by_one.append(*before)
        at_once.append(*new, lens)
        found, steps = at_once.attend(*q), []
        for t in range(40):
            by_one.append(*(x[:, :, t : t + 1] for x in new), [1, int(t < 21)])
            steps.append(by_one.attend(*(x[:, :, t : t + 1] for x in q)))
        expected = torch.cat(steps, 2)
        assert relative_l2(found[:1], expected[:1]) <= 1e-6
        assert relative_l2(found[1:, :, :21], expected[1:, :, :21]) <= 1e-6
        more, last = self.tokens(2), self.queries(2)
        for cache in (at_once, by_one):  # and the rings are the same
            cache.crop([1, 2])
            cache.append(*more)
        assert relative_l2(at_once.attend(*last), by_one.attend(*last)) <= 1e-6

    def test_tokens_at_once_equal_tokens_one_by_one(self, setup):
        cache, _ = self.filled(setup, 33)
        new, q, steps = self.tokens(7), self.queries(7), []
        for t in range(7):
            cache.append(*(x[:, :, t : t + 1].contiguous() for x in new))
            steps.append(cache.attend(*(x[:, :, t : t + 1] for x in q)))
        cache.crop(7)
        cache.append(*new)
        assert relative_l2(cache.attend(*q), torch.cat(steps, 2)) <= 1e-6

    def test_padded_queries_of_a_short_row_do_not_disturb_the_real_ones(self, setup):
        cache, _ = self.filled(setup, 6)
        cache.append(*self.tokens(4), [4, 2])
        q = self.queries(4)
        cases.check(
            cache.attend(*q, return_softmax_lse=True),
            self.expected(cache, setup, q, query_lens=[4, 2]),
        )

    def test_padding_past_the_capacity_is_harmless(self, setup):
        cache = self.make(setup, max_seq_len=128)
        new = self.tokens(120)
        cache.append(*new, [120, 10])
        cache.append(*(x[:, :, :100] for x in new), [8, 100])
        assert cache.seq_lens.tolist() == [128, 110]
        q = self.queries(100)
        found = cache.attend(*q)
        if cache.ring_len:
            assert found[:, :, :8].isfinite().all()
            return
        expected, _ = self.expected(cache, setup, [x[:, :, :8] for x in q], query_lens=[8, 0])
        assert relative_l2(found[:1, :, :8], expected[:1]) <= RELATIVE_L2[torch.float32]

    @pytest.mark.parametrize("drop", [4, [4, 9], torch.tensor([4, 9])], ids=str)
    def test_crop_then_append_equals_never_having_appended(self, setup, drop):
        cache, new = self.filled(setup, 45)
        cache.crop(drop)
        left = [41, 41] if isinstance(drop, int) else [41, 36]
        assert cache.seq_lens.tolist() == left
        more = self.tokens(3)
        cache.append(*more)
        fresh = self.make(setup)
        fresh.append(*(x[:, :, :41] for x in new), left)
        fresh.append(*more)
        assert all(map(torch.equal, cache.get(), fresh.get()))
        q = self.queries(3)
        assert torch.equal(cache.attend(*q), fresh.attend(*q))

    def test_truncate_keeps_the_first_tokens(self, setup):
        cache, _ = self.filled(setup, 10)
        before = cache.get()
        cache.crop([0, 6])
        cache.truncate(7)
        assert cache.seq_lens.tolist() == [7, 4]
        assert torch.equal(cache.get()[0][0], before[0][0, :, :7])
        cache.truncate(0)
        assert cache.is_empty

    @pytest.mark.parametrize("order", [[1, 1], [1, 0], [0, 0]], ids=str)
    def test_reorder_moves_rows_with_their_lengths(self, setup, order):
        cache, _ = self.filled(setup, 40)
        cache.crop([0, 6])
        before, lengths = cache.get(), cache.seq_lens[order].tolist()
        cache.reorder(torch.tensor(order))
        assert cache.seq_lens.tolist() == lengths
        for old, new in zip(before, cache.get(), strict=True):
            assert torch.equal(new, old[order][:, :, : max(lengths)])
        q = self.queries(2)
        cases.check(cache.attend(*q, return_softmax_lse=True), self.expected(cache, setup, q))

    @pytest.mark.parametrize("rows", [[1], [0, 0, 0, 1, 1]], ids=str)
    def test_taken_rows_are_a_cache_of_their_own(self, setup, rows):
        cache, _ = self.filled(setup, 40)
        cache.crop([0, 6])
        before = cache.get()
        taken = cache.select_rows(rows)
        assert taken.batch_size == len(rows) and taken.seq_lens.tolist() == [
            [40, 34][r] for r in rows
        ]
        kept = max([40, 34][r] for r in rows)
        for old, new in zip(before, taken.get(), strict=True):
            assert torch.equal(new, old[rows][:, :, :kept])
        cache.crop([3, 0])
        cache.append(*self.tokens(2))  # not visible in the other cache
        for old, new in zip(before, taken.get(), strict=True):
            assert torch.equal(new, old[rows][:, :, :kept])
        shape = [x[[0] * len(rows)] for x in self.tokens(2)]
        pages = None if cache.pages is None else cache.pages.allocator.free
        if pages is None or pages >= len(rows):
            held = cache.get()
            taken.append(*shape)
            assert all(map(torch.equal, cache.get(), held))
            q = [x[[0] * len(rows)] for x in self.queries(2)]
            assert taken.attend(*q).isfinite().all()
        taken.reset()
        assert taken.is_empty and cache.pos == 39

    @pytest.mark.parametrize("rows", [[], [2], [-1]], ids=str)
    def test_rows_that_cannot_be_taken_are_named(self, plain, rows):
        cache, _ = self.filled(plain, 3)
        with pytest.raises(ValueError, match=r"rows.*0 to 1"):
            cache.select_rows(rows)

    def test_rows_that_were_one_grow_apart(self, setup):
        cache, _ = self.filled(setup, 37)
        cache.reorder(torch.tensor([0, 0]))
        before, new, q = cache.get(), self.tokens(2), self.queries(2)
        cache.append(*new)
        for old, now, given in zip(before, cache.get(), new, strict=True):
            assert torch.equal(now[:, :, :37], old)
            assert relative_l2(now[:, :, 37:], given) <= 4 * ERROR[setup.kind]
        cases.check(cache.attend(*q, return_softmax_lse=True), self.expected(cache, setup, q))

    def test_reset_starts_anew(self, setup):
        cache, new = self.filled(setup, 10)
        first = cache.get()
        cache.reset()
        assert cache.is_empty and cache.get()[0].shape[2] == 0
        cache.append(*new)
        assert all(map(torch.equal, cache.get(), first))

    def test_overflow_is_refused_before_anything_is_written(self, setup):
        cache, _ = self.filled(setup, 90)
        before = [x.clone() for x in cache.get()]
        with pytest.raises(
            ValueError, match="row 0 holds 90 tokens and cannot take 7 more: max_seq_len is 96"
        ):
            cache.append(*self.tokens(7))
        cache.crop([5, 0])
        with pytest.raises(ValueError, match="row 1"):
            cache.append(*self.tokens(7))
        cache.append(*self.tokens(6))
        assert cache.seq_lens.tolist() == [91, 96]
        kept = 85 // cache.group * cache.group  # a full group is read from its codes
        assert torch.equal(cache.get()[0][:, :, :kept], before[0][:, :, :kept])

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda c, t: c.append(t[0][..., :-1], *t[1:]), "has shape"),
            (lambda c, t: c.append(*t[:-1], torch.randn(2, 1, 48)), r"v has shape \(2, 1, 48\)"),
            (lambda c, t: c.append(torch.cat((t[0], t[0])), *t[1:]), "has shape"),
            (lambda c, t: c.append(*(x[:, :, :0] for x in t)), "T >= 1"),
            (lambda c, t: c.append(t[0][:, :, :1], *t[1:]), "has 1, .* has 2 tokens"),
            (lambda c, t: c.append(t[0].long(), *t[1:]), "has dtype torch.int64"),
            (lambda c, t: c.append(*t, [1, 3]), r"new_lens\[1\] is 3"),
            (lambda c, t: c.append(*t, [1]), "1 entries for 2 rows"),
            (lambda c, t: c.append(*t, cache_leftpad=torch.tensor([0, 1])), "cache_leftpad is"),
            (lambda c, t: c.append(*t, cache_leftpad=cases.rows(0)), "cache_leftpad is"),
            (lambda c, t: c.crop(11), "cannot crop 11 tokens of row 0, which holds 10"),
            (lambda c, t: c.crop(-1), "cannot crop -1"),
            (lambda c, t: c.crop(1.0), "n is a float"),
            (lambda c, t: c.crop([1, 2, 3]), "3 entries for 2 rows"),
            (lambda c, t: c.crop(torch.tensor([0.5, 1])), "integer tensor on cpu"),
            (lambda c, t: c.truncate(11), "0 to 10"),
            (lambda c, t: c.truncate(True), "new_pos is True"),
            (lambda c, t: c.reorder(torch.tensor([0, 2])), "0 to 1 is allowed"),
            (lambda c, t: c.reorder(torch.tensor([0, -1])), "0 to 1 is allowed"),
            (lambda c, t: c.reorder(torch.tensor([0])), r"\(2,\) integers are needed"),
            (lambda c, t: c.reorder(torch.tensor([True, False])), r"\(2,\) integers are needed"),
        ],
    )
    def test_bad_input_is_named_and_changes_nothing(self, plain, call, message):
        cache, _ = self.filled(plain, 10)
        before = cache.get()
        free = None if cache.pages is None else cache.pages.allocator.free
        with pytest.raises((TypeError, ValueError), match=message):
            call(cache, self.tokens(2))
        assert cache.seq_lens.tolist() == [10, 10]
        assert all(map(torch.equal, before, cache.get()))
        assert free is None or cache.pages.allocator.free == free

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda q: [torch.cat([x] * 11, 2) for x in q], "T from 1 to the 10 tokens"),
            (lambda q: [x[:, :3] for x in q], "not a multiple of n_kv_heads=2"),
            (lambda q: [x[:, :, :0] for x in q], "T from 1 to"),
            (lambda q: [x.squeeze(2) for x in q], "has shape"),
        ],
    )
    def test_queries_that_do_not_fit_are_named(self, plain, change, message):
        cache, _ = self.filled(plain, 10)
        with pytest.raises((TypeError, ValueError), match=message):
            cache.attend(*change(self.queries(1)))

    def test_a_failed_append_leaves_a_cache_that_goes_on(self, plain):
        """The tokens after a refused append do not end up in memory that rows share."""
        cache, new = self.filled(plain, 40)
        with pytest.raises(ValueError, match="cache_leftpad"):
            cache.append(*self.tokens(30), cache_leftpad=torch.tensor([0, 1]))
        cache.reorder(torch.tensor([0, 0]))
        more = self.tokens(3)
        cache.append(*more)
        for stored, old, given in zip(cache.get(), new, more, strict=True):
            assert relative_l2(stored[:, :, :40], old[[0, 0]]) <= ERROR[plain.kind]
            assert relative_l2(stored[:, :, 40:], given) <= ERROR[plain.kind]
