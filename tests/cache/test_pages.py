"""PageAllocator and PageTable: no page leaks, none is freed twice, none is written while shared."""

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support import cases, stored
from support.blocks import same_bits
from support.cases import rows

from caramba_fast.cache import OutOfPagesError, PageAllocator, PageTable
from caramba_fast.ops import append_, decode_attention
from caramba_fast.ops.view import Lanes

pytestmark = pytest.mark.usefixtures("on_reference")

# -- the allocator ------------------------------------------------------------------------------


def test_a_pool_gives_every_page_once_and_then_refuses():
    pool = PageAllocator(5)
    assert sorted(pool.take() for _ in range(5)) == list(range(5))
    assert pool.free == 0
    with pytest.raises(OutOfPagesError, match="all 5 pages are in use"):
        pool.take()


def test_a_page_is_free_when_its_last_holder_releases_it():
    pool = PageAllocator(2)
    page = pool.take()
    assert pool.share(page) == page and pool.references[page] == 2
    pool.release(page)
    assert pool.free == 1
    pool.release(page)
    assert pool.free == 2 and pool.references == [0, 0]


def test_releasing_or_sharing_a_free_page_is_refused():
    pool = PageAllocator(2)
    page = pool.take()
    pool.release(page)
    with pytest.raises(ValueError, match=f"page {page} is free and cannot be released"):
        pool.release(page)
    with pytest.raises(ValueError, match=f"page {page} is free and cannot be shared"):
        pool.share(page)
    assert pool.free == 2 and sorted((pool.take(), pool.take())) == [0, 1]


@pytest.mark.parametrize("page", [-1, 2])
def test_a_page_that_does_not_exist_is_refused(page):
    pool = PageAllocator(2)
    pool.take(), pool.take()
    with pytest.raises((ValueError, IndexError)):
        pool.release(page)
    assert pool.references == [1, 1]


@pytest.mark.parametrize("count", [0, -3])
def test_an_empty_pool_is_refused(count):
    with pytest.raises(ValueError, match=f"num_pages is {count}"):
        PageAllocator(count)


# -- the table ----------------------------------------------------------------------------------

SIZE = 32


def table(batch=2, per_row=4, pages=8):
    return PageTable(batch, per_row, SIZE, PageAllocator(pages), torch.device("cpu"))


def test_rows_take_pages_as_they_grow_and_give_them_back():
    pages = table()
    assert (pages.tensor == -1).all() and pages.tensor.dtype == torch.int32
    assert pages.reserve([0, 0], [33, 32]) == []
    assert [len(row) for row in pages.rows] == [2, 1] and pages.allocator.free == 5
    assert pages.tensor.tolist() == [row + [-1] * (4 - len(row)) for row in pages.rows]
    pages.reserve([33, 32], [31, 0])
    assert [len(row) for row in pages.rows] == [2, 1]
    pages.shrink([32, 0])
    assert [len(row) for row in pages.rows] == [1, 0] and pages.allocator.free == 7
    assert pages.tensor[1].tolist() == [-1] * 4


def test_a_shared_page_is_copied_before_the_row_writes_into_it():
    pages = table()
    pages.reserve([0, 0], [40, 3])
    pages.reorder([0, 0])
    assert pages.rows[0] == pages.rows[1] and pages.allocator.free == 6
    old = list(pages.rows[0])
    moved = pages.reserve([40, 40], [1, 0])
    assert moved == [(old[1], pages.rows[0][1])] and pages.rows[0][1] != old[1]
    assert pages.rows[0][0] == pages.rows[1][0] == old[0] and pages.rows[1] == old
    assert pages.reserve([41, 40], [1, 1]) == []


def test_the_last_of_several_writers_keeps_the_shared_page():
    pages = table(batch=3, pages=4)
    pages.reserve([0] * 3, [5, 0, 0])
    pages.reorder([0, 0, 0])
    page = pages.rows[0][0]
    moved = pages.reserve([5] * 3, [1, 1, 1])
    assert [source for source, _ in moved] == [page, page]
    held = [row[0] for row in pages.rows]
    assert len(set(held)) == 3 and page in held and pages.allocator.free == 1


def test_full_pages_stay_shared():
    pages = table()
    pages.reserve([0, 0], [64, 1])
    pages.reorder([0, 0])
    assert pages.reserve([64, 64], [1, 1]) == []
    assert pages.rows[0][:2] == pages.rows[1][:2] and pages.rows[0][2] != pages.rows[1][2]


def test_a_row_cut_back_into_a_shared_page_copies_it():
    pages = table()
    pages.reserve([0, 0], [64, 0])
    pages.reorder([0, 0])
    pages.shrink([40, 64])
    moved = pages.reserve([40, 64], [1, 0])
    assert len(moved) == 1 and pages.rows[0][1] != pages.rows[1][1]


@pytest.mark.parametrize("grow", [[65, 0], [33, 33], [0, 97]])
def test_too_few_pages_are_refused_before_anything_changed(grow):
    pages = table(pages=4)
    pages.reserve([0, 0], [32, 33])
    before = [list(row) for row in pages.rows], pages.tensor.clone(), pages.allocator.free
    with pytest.raises(OutOfPagesError, match=r"pages are needed and 1 of 4 are free"):
        pages.reserve([32, 33], grow)
    assert ([list(row) for row in pages.rows], pages.allocator.free) == (before[0], before[2])
    assert torch.equal(pages.tensor, before[1])


def test_one_writer_to_a_shared_page_needs_a_page_for_its_copy():
    pages = table(pages=1)
    pages.reserve([0, 0], [5, 0])
    pages.reorder([0, 0])
    with pytest.raises(OutOfPagesError, match="1 pages are needed and 0 of 1 are free"):
        pages.reserve([5, 5], [1, 0])
    assert pages.rows == [[0], [0]] and pages.allocator.references == [2]


def test_columns_cover_the_longest_row_and_at_least_one_page():
    pages = table()
    assert [pages.columns(n).shape[1] for n in (0, 1, 32, 33, 128)] == [1, 1, 1, 2, 4]


class Pages(RuleBasedStateMachine):
    """Random rows over a small pool; a set of tokens written to each page stands for its content."""

    def __init__(self):
        super().__init__()
        self.table = table(batch=3, per_row=4, pages=7)
        self.held = [0, 0, 0]
        self.meant = [[], [], []]
        self.memory = {}
        self.next = 0

    @rule(added=st.tuples(*[st.integers(0, 50)] * 3))
    def grow(self, added):
        added = [min(n, 128 - held) for n, held in zip(added, self.held, strict=True)]
        before = [list(row) for row in self.table.rows], list(self.table.allocator.references)
        try:
            moved = self.table.reserve(self.held, added)
        except OutOfPagesError:
            assert before == ([*self.table.rows], self.table.allocator.references)
            return
        copied = {target: dict(self.memory.get(source, {})) for source, target in moved}
        self.memory.update(copied)
        for row, count in enumerate(added):
            for j in range(self.held[row], self.held[row] + count):
                page = self.table.rows[row][j // SIZE]
                self.memory.setdefault(page, {})[j % SIZE] = self.next
                self.meant[row].append(self.next)
                self.next += 1
            self.held[row] += count

    @rule(kept=st.tuples(*[st.floats(0, 1)] * 3))
    def shrink(self, kept):
        self.held = [int(n * part) for n, part in zip(self.held, kept, strict=True)]
        self.meant = [row[:n] for row, n in zip(self.meant, self.held, strict=True)]
        self.table.shrink(self.held)

    @rule(order=st.tuples(*[st.integers(0, 2)] * 3))
    def reorder(self, order):
        self.table.reorder(order)
        self.held = [self.held[row] for row in order]
        self.meant = [list(self.meant[row]) for row in order]

    @invariant()
    def every_page_is_counted_once_for_each_row_that_holds_it(self):
        pool, counted = self.table.allocator, [0] * 7
        for row in self.table.rows:
            assert len(set(row)) == len(row)
            for page in row:
                counted[page] += 1
        assert counted == pool.references
        assert sorted(pool._free) == [page for page in range(7) if not counted[page]]

    @invariant()
    def rows_have_the_pages_of_their_length(self):
        assert [len(row) for row in self.table.rows] == [-(-n // SIZE) for n in self.held]
        padded = [row + [-1] * (4 - len(row)) for row in self.table.rows]
        assert self.table.tensor.tolist() == padded

    @invariant()
    def every_row_reads_what_it_wrote(self):
        for row, meant in enumerate(self.meant):
            pages = self.table.rows[row]
            assert [self.memory[pages[j // SIZE]][j % SIZE] for j in range(len(meant))] == meant


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

# -- append_ and attention over pages -----------------------------------------------------------


def test_tokens_without_a_page_are_dropped(kind):
    """Row 0 has no second page, row 1 no page at all: nothing of theirs is written anywhere."""
    lanes = Lanes.of(2, 32)
    k, v = (stored.poisoned(3, 32, lanes, 32, kind) for _ in range(2))
    block_table = torch.tensor([[2, -1], [-1, -1]], dtype=torch.int32)
    before = [x.clone() for view in (k, v) for x in (view.codes, view.scales) if x is not None]
    new = torch.randn(2, 2, 5, 32)
    append_(k, v, new, new, rows(30, 7), block_table=block_table)
    after = [x for view in (k, v) for x in (view.codes, view.scales) if x is not None]
    for old, now in zip(before, after, strict=True):
        assert same_bits(now[:2], old[:2]) and same_bits(now[2, :, :30], old[2, :, :30])
        assert not same_bits(now[2, :, 30:], old[2, :, 30:])


def test_a_call_whose_every_token_is_dropped_changes_nothing(kind):
    k, v = (stored.poisoned(3, 32, Lanes.of(2, 32), 32, kind) for _ in range(2))
    before = k.codes.clone()
    new, none = torch.randn(2, 2, 5, 32), torch.full((2, 2), -1, dtype=torch.int32)
    append_(k, v, new, new, rows(30, 7), block_table=none)
    append_(k, v, new, new, rows(64, 99), block_table=torch.zeros_like(none))
    assert same_bits(k.codes, before)


@pytest.mark.parametrize("garbage", [10**6, 2**31 - 1])
def test_tokens_that_are_not_real_may_lie_on_any_page(garbage):
    """Entries past a row's length hold anything, for append_ as for attention."""
    case = cases.build(["pages", "query_lens"], tokens=3)
    case.table[case.table == -1] = garbage
    case.append(append_)
    cases.check(case.attend(decode_attention), case.expected())
    views = [stream.view for stream in case.streams.values()]
    before = views[0].codes.clone()
    new = torch.randn(2, 2, 40, 32)
    append_(*views, new, new, case.seqlens, block_table=case.table, query_lens=rows(0, 0))
    assert same_bits(views[0].codes, before)


def test_pages_of_other_rows_are_never_read():
    """Everything outside a row's own pages is poison, whatever the order of its pages."""
    for seed in range(5):
        torch.manual_seed(seed)
        lengths = [random.Random(seed).randint(1, 96) for _ in range(3)]
        case = cases.build(["pages", "rotate_k"], lengths=lengths, slots=96, tokens=1).append(
            append_
        )
        whole = case.attend(decode_attention)
        for b, length in enumerate(lengths):
            used = case.table[b, : -(-length // 32)].long()
            keep = torch.zeros(case.streams["k"].view.codes.shape[0], dtype=torch.bool)
            keep[used] = True
            views = {}
            for name, stream in case.streams.items():
                scales = stream.view.scales.clone()
                scales[~keep] = torch.nan
                views[name] = cases.KVView(
                    stream.view.codes, scales, stream.view.kind, rotate=stream.view.rotate
                )
            alone = case.attend(decode_attention, views=views)
            assert torch.equal(alone[0][b], whole[0][b])


@pytest.mark.parametrize("change", ["dtype", "rank", "rows", "no columns", "page size"])
def test_append_refuses_a_bad_block_table_before_writing(change):
    case = cases.build(["pages"])
    block_table = {
        "dtype": case.table.long(), "rank": case.table[0], "rows": case.table[:1],
        "no columns": case.table[:, :0], "page size": case.table,
    }[change]  # fmt: skip
    views = [stream.view for stream in case.streams.values()]
    if change == "page size":
        views = [cases.KVView(v.codes[:, :, :24], v.scales[:, :, :24], v.kind) for v in views]
    before = views[0].codes.clone()
    new = torch.randn(2, 2, 3, 32)
    with pytest.raises(
        ValueError, match="multiple of 32" if change == "page size" else "block_table"
    ):
        append_(*views, new, new, rows(0, 0), block_table=block_table)
    assert same_bits(views[0].codes, before)
