"""The ragged batch: tokens of many sequences side by side get what rows of their own get."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.engines import engine, small_model, text

from caramba_fast.cache import LayerKVCache, PagePool, RaggedBatch, Stretch, ragged
from caramba_fast.cache.plans import LayerPlans
from caramba_fast.config import cache_configs
from caramba_fast.ops import use_backend
from caramba_fast.ops.attention_call import BALANCED

INTERPRETED = pytest.mark.skipif(
    "os.environ.get('TRITON_INTERPRET') != '1'", reason="built on the CPU, for the interpreter"
)


@pytest.mark.parametrize("kind", ["fp32", "q8", "q4", "nf4", "q8/q4"])
def test_a_ragged_batch_says_what_rows_of_their_own_say(kind: str) -> None:
    model = small_model()
    configs = cache_configs(kind, residual_len=0)
    pool = PagePool(model.cache_layout, 64, 12, 256, rings=3, **configs)
    together = PagePool(model.cache_layout, 64, 12, 256, rings=3, **configs)
    tables, prompts = [[3, 7], [0], [5, 1, 9]], [text(1, 90), text(2, 1), text(3, 140)]
    rows = {}
    for table, prompt in zip(tables, prompts, strict=True):
        batch = RaggedBatch([Stretch(0, len(prompt), table)], pool)
        rows[len(prompt)] = model.forward_ragged(
            torch.tensor(prompt), batch, torch.tensor([len(prompt) - 1])
        )
    order = sorted(zip(prompts, tables, strict=True), key=lambda pair: len(pair[0]) > 1)
    batch = RaggedBatch([Stretch(0, len(p), t, i) for i, (p, t) in enumerate(order)], together)
    ids = torch.tensor([token for p, _ in order for token in p])
    ends = torch.tensor([len(p) for p, _ in order]).cumsum(0) - 1
    found = model.forward_ragged(ids, batch, ends)
    for logits, (prompt, _) in zip(found, order, strict=True):
        torch.testing.assert_close(logits, rows[len(prompt)][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("cpp", "fp32"),
        ("cpp", "q8"),
        ("cpp", "q4:residual_len=0"),
        ("triton", "q8:plain/q4:plain,rotate"),
    ],
)
def test_every_backend_takes_a_ragged_batch(backend: str, kind: str) -> None:
    """Single tokens, and stretches longer than one piece of queries, over pages in any order."""
    stretches = [
        Stretch(70, 1, [4, 2], 0), Stretch(0, 1, [6], 1), Stretch(3, 40, [0], 2), Stretch(60, 7, [5, 3], 3)
    ]  # fmt: skip
    layout = small_model().cache_layout[:1]
    found = {}
    for name in ("reference", backend):
        torch.manual_seed(0)
        pool = PagePool(layout, 64, 8, 256, rings=4, **cache_configs(kind))
        batches = [
            [Stretch(0, s.start, s.pages, s.ring) for s in stretches if s.start > 1],
            stretches,
        ]
        with use_backend(name):
            for rows in batches:
                batch = RaggedBatch(rows, pool)
                k, v, q = (torch.randn(batch.tokens, heads, 32) for heads in (2, 2, 4))
                batch[0].append_tokens(k, v)
                found[name] = batch[0].attend_tokens(q, window_size=(50, 0))
    assert found[backend].shape == (49, 4, 32)
    error = (found[backend] - found["reference"]).norm() / found["reference"].norm()
    assert error < (1e-5 if kind == "fp32" else 5e-3)


@pytest.mark.parametrize(
    ("backend", "kind", "begin", "steps"),
    [
        ("cpp", "q8", 3, 70),
        ("cpp", "q4:residual_len=0", 0, 40),
        ("cpp", "q4:plain,sink_len=4", 0, 10),
        ("reference", "q8/q4:residual_len=0", 29, 6),
        pytest.param("triton", "q4:residual_len=0", 30, 3, marks=INTERPRETED),
    ],
)
def test_decode_tokens_of_neighbouring_rings_need_no_copies(
    backend: str, kind: str, begin: int, steps: int, monkeypatch
) -> None:
    """They give the same bits as with lent rings, also beside a prompt, and where the last layer skips rows."""
    layout = small_model().cache_layout[:1]
    pages, found = [[4, 2], [6, 7], [5, 3]], {}
    lend = ragged._Rings.taken
    lent = []
    monkeypatch.setattr(
        ragged._Rings, "taken", lambda self, tail: lent.append(1) or lend(self, tail)
    )
    for rings in ((1, 2, 3), (3, 1, 2)):
        torch.manual_seed(0)
        pool = PagePool(layout, 64, 12, 128, rings=5, **cache_configs(kind))
        for buffer in (*pool.page_buffers, *pool._sides):
            buffer.zero_()
        outs, lengths = found.setdefault(rings, []), [0, 0, 0]
        with use_backend(backend):
            for step in range(-1 if begin else 0, steps):
                count = begin if step < 0 else 1
                which = ((0, 1, 2), (0, 1), (1, 2))[max(step, 0) % 3]
                rows = [Stretch(lengths[i], count, pages[i], rings[i]) for i in which]
                beside = step % 4 == 1
                if beside:
                    rows.append(Stretch(0, 5, [8], 4))
                for i in which:
                    lengths[i] += count
                lent.clear()
                batch = RaggedBatch(rows, pool)
                k, v, q = (torch.randn(batch.tokens, heads, 32) for heads in (2, 2, 4))
                ends = [*range(len(which)), len(which) + 2, len(which) + 4][1:]
                kept = torch.tensor(ends if beside else ends[:-2])
                layer = batch[0] if step < 0 else batch.narrowed(kept)
                layer.append_tokens(k, v)
                outs.append(layer.attend_tokens(q if step < 0 else q[kept]))
                apart = any(rings[i + 1] != rings[i] + 1 for i in which[:-1])
                assert bool(lent) == (pool.group > 1 and (apart or beside or step < 0))
        for layer in pool.layers:
            for stream in layer.streams.values():
                sides = [x for x in (stream.tail, stream.sink) if x is not None]
                outs += [side[list(rings)] for side in sides] + [stream.codes]
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter
@INTERPRETED
def test_layers_make_one_schedule_for_a_step(monkeypatch) -> None:
    """Of single tokens and of stretches each; layers of another window have another, and so has the next step."""
    from caramba_fast.kernels import balanced_launch

    begin, schedules = balanced_launch.start, []

    def start(kernel, *args, **options):
        if kernel is balanced_launch.schedule_kernel:
            schedules.append(args[2].clone())
        begin(kernel, *args, **options)

    monkeypatch.setattr(balanced_launch, "start", start)
    monkeypatch.setattr(balanced_launch.BalancedCall, "walkers", 2)  # each is interpreted
    layout = small_model().cache_layout[:1] * 3
    stretches = [
        Stretch(70, 1, [4, 2], 0), Stretch(0, 1, [6], 1), Stretch(3, 5, [0], 2), Stretch(60, 3, [5, 3], 3)
    ]  # fmt: skip
    found = {}
    for shares in (True, False):
        torch.manual_seed(0)
        pool = PagePool(layout, 64, 8, 256, rings=4, **cache_configs("q4", residual_len=0))
        assert pool.num_splits == BALANCED
        with use_backend("reference"):
            batch = RaggedBatch(
                [Stretch(0, s.start, s.pages, s.ring) for s in stretches if s.start > 1], pool
            )
            for layer in batch.layers:
                layer.append_tokens(*torch.randn(2, batch.tokens, 2, 32))
        if not shares:
            monkeypatch.setattr(ragged, "shared", lambda _: nullcontext())
        schedules.clear()
        found[shares] = []
        for step in range(2):
            batch = RaggedBatch(
                [s._replace(start=s.start + step * s.tokens) for s in stretches], pool
            )
            with use_backend("reference"):  # faster than what is interpreted
                for layer in batch.layers:
                    layer.append_tokens(*torch.randn(2, batch.tokens, 2, 32))
            with use_backend("triton"):
                for layer, window in zip(batch.layers, (-1, 40, -1), strict=True):
                    q = torch.randn(batch.tokens, 4, 32)
                    found[shares].append(layer.attend_tokens(q, window_size=(window, 0)))
        assert len(schedules) == 2 * 2 * (2 if shares else 3)
    for one, other in zip(found[True], found[False], strict=True):
        assert torch.equal(one, other)


def test_rows_of_different_lengths_ask_for_a_balanced_schedule(monkeypatch) -> None:
    """One row needs none, and a number of splits that a model asks for stands."""
    pool = PagePool(small_model().cache_layout[:1], 64, 8, 256, **cache_configs("fp16"))
    plans, asked = pool.layers[0].plans, []
    attend = plans.attend
    monkeypatch.setattr(
        plans, "attend", lambda *a, **b: (asked.append(a[2].get("num_splits")), attend(*a, **b))[1]
    )
    one, other, prompt = Stretch(0, 1, [1]), Stretch(0, 1, [3]), Stretch(0, 5, [2])
    for stretches, options in (
        ([one, other, prompt], {}), ([one], {}), ([one, other], {"num_splits": 3}),
    ):  # fmt: skip
        layer = RaggedBatch(stretches, pool)[0]
        k, v, q = (torch.randn(sum(s.tokens for s in stretches), n, 32) for n in (2, 2, 4))
        layer.append_tokens(k, v)
        layer.attend_tokens(q, **options)
    assert asked == [BALANCED, None, None, 3]


@pytest.mark.parametrize(
    ("stretches", "said"),
    [
        ([], "one token or more"),
        ([Stretch(0, 0, [1])], "1 or more"),
        ([Stretch(60, 5, [1])], "60 and 1 pages of 64"),
        ([Stretch(0, 4, [1]), Stretch(0, 1, [2])], "behind a longer stretch"),
    ],
)
def test_ragged_batches_that_make_no_sense_are_refused(stretches: list[Stretch], said: str) -> None:
    pool = PagePool(small_model().cache_layout, 64, 4, 256)
    with pytest.raises(ValueError, match=said):
        RaggedBatch(stretches, pool)


def test_pages_cannot_have_tails() -> None:
    with pytest.raises(ValueError, match="residual_len=16"):
        PagePool(small_model().cache_layout, 64, 4, 256, **cache_configs("q4"))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_rings_of_a_ragged_batch_are_those_of_a_cache(group: int) -> None:
    """Prompts, drafts that are taken back, and single tokens, beside a contiguous cache that does the same."""
    layout = small_model().cache_layout[:1]
    configs = cache_configs(f"q4_channel:qblock={group}/q4:plain,rotate")
    pool = PagePool(layout, 128, 8, 512, rings=2, **configs)
    alone = [LayerKVCache(1, 512, 64, 64, n_kv_heads=2, **configs) for _ in range(2)]
    pages, held = [[4, 2, 7], [1, 6]], [0, 0]
    torch.manual_seed(0)
    for wanted, taken_back in [
        ((150, 1), (0, 0)), ((9, 1), (7, 0)), ((30, 31), (29, 20)), ((1, 1), (0, 0)), ((1, 12), (0, 11)),
        ((31, 70), (0, 0)), ((200, 1), (0, 0)), ((1, 30), (0, 1)),
    ]:  # fmt: skip
        # From within a group no more than the rest of it, as the engine schedules.
        counts = [
            min(n, group - at % group if at % group else n)
            for n, at in zip(wanted, held, strict=True)
        ]
        dropped = [min(n, count - 1) for n, count in zip(taken_back, counts, strict=True)]
        order = sorted(range(2), key=lambda row: counts[row] > 1)
        batch = RaggedBatch([Stretch(held[r], counts[r], pages[r], 1 - r) for r in order], pool)
        k, v, q = (torch.randn(batch.tokens, heads, 32) for heads in (2, 2, 4))
        batch[0].append_tokens(k, v)
        found, first = batch[0].attend_tokens(q), 0
        for row in order:
            part = slice(first, first + counts[row])
            new = [x[part].transpose(0, 1)[None] for x in (k, v, q)]
            alone[row].append(*new[:2])
            expected = alone[row].attend(new[2])[0].transpose(0, 1)
            torch.testing.assert_close(found[part], expected, rtol=0, atol=1e-5)
            alone[row].crop(dropped[row])
            held[row] += counts[row] - dropped[row]
            first += counts[row]


@pytest.mark.parametrize("asked", [None, 0, 3])
def test_an_engine_says_how_reads_over_several_sequences_are_cut(asked, monkeypatch):
    seen, attend = [], LayerPlans.attend

    def noted(self, queries, lengths, options, *args, **kwargs):
        seen.append((len(queries[0]), options.get("num_splits")))
        return attend(self, queries, lengths, options, *args, **kwargs)

    monkeypatch.setattr(LayerPlans, "attend", noted)
    made = engine(
        temperature=0, max_new_tokens=4, **({} if asked is None else {"num_splits": asked})
    )
    made.generate_batch([text(1, 20), text(2, 30)])
    by_rows = {
        many: {value for rows, value in seen if (rows > 1) == many} for many in (False, True)
    }
    assert by_rows[True] == {-1 if asked is None else asked}
    assert by_rows[False] <= ({None} if asked is None else {asked})


@pytest.mark.parametrize("kind", ["q8:plain,sink_len=40", "q4:sink_len=40"])
@pytest.mark.parametrize("parts", [[50], [20, 30], [33, 1, 16]])
def test_sinks_of_more_tokens_than_a_piece_has_are_all_kept(kind: str, parts: list[int]) -> None:
    configs = cache_configs(kind, residual_len=0)
    pool = PagePool(small_model().cache_layout[:1], 64, 4, 128, rings=1, **configs)
    for stream in pool.layers[0].streams.values():
        stream.sink.fill_(7.0)  # another sequence's
    torch.manual_seed(0)
    k, v, q = (torch.randn(heads, 50, 32) for heads in (2, 2, 4))
    own = LayerKVCache(1, 128, 64, 64, n_kv_heads=2, **configs)
    own.append(k[None], v[None])
    wanted = own.attend(q[None, :, -1:])[0, :, 0]
    start = 0
    for count in parts:
        layer = RaggedBatch([Stretch(start, count, [0])], pool)[0]
        new = [x[:, start : start + count].transpose(0, 1) for x in (k, v, q)]
        layer.append_tokens(*new[:2])
        found = layer.attend_tokens(new[2])
        start += count
    torch.testing.assert_close(found[-1], wanted, rtol=1e-3, atol=1e-3)
