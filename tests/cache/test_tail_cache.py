"""The fp16 tail and sinks: what append_ writes there, and caches that have them, whatever happens."""

import random

import pytest
import torch
from support import cases, dense
from support.blocks import same_bits
from support.cache_contract import poison
from support.cases import rows
from support.tolerances import RELATIVE_L2, relative_l2

from caramba_fast.cache import LayerKVCache, ModelKVCache
from caramba_fast.cache import stream as stream_module
from caramba_fast.cache.model import LayerShape
from caramba_fast.config import KVCacheTensorConfig, cache_configs
from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.ops import KVView, append_, decode_attention, decoupled_append_, use_backend

SIDES = ("tail", "sinks")
ROTATIONS = ("rotate_k", "rotate_v")


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


# -- what append_ writes ------------------------------------------------------------------------


def side_by_side(case):
    """A copy of the case with buffers of its own."""
    return {
        name: KVView(
            *(None if x is None else x.clone() for x in (s.view.codes, s.view.scales)), s.view.kind,
            s.view.tail.clone(), s.view.sink.clone(), s.view.rotate,
        )
        for name, s in case.streams.items()
    }  # fmt: skip


@pytest.mark.parametrize("options", [SIDES, (*SIDES, *ROTATIONS, "leftpad", "pages")], ids=len)
@pytest.mark.parametrize(
    "streams", [{"k": 32, "v": 32}, {"k_sem": 8, "k_geo": 16, "v": 32}], ids=len
)
def test_one_call_equals_one_call_a_token(streams, options):
    op = append_ if len(streams) == 2 else decoupled_append_
    case = cases.build(options, dims=streams, kinds=("q4_0",) * len(streams))
    single = side_by_side(case)
    case.append(op)
    for t in range(max(case.lengths)):
        counts = [int(t < length) for length in case.lengths]
        new = [s.given[:, :, t : t + 1].contiguous() for s in case.streams.values()]
        start = rows(*(min(t, length) for length in case.lengths))
        op(*single.values(), *new, start, query_lens=rows(*counts), **case.place)
    for name, stream in case.streams.items():
        for part in ("codes", "scales", "tail", "sink"):
            assert same_bits(getattr(stream.view, part), getattr(single[name], part)), part


@pytest.mark.parametrize("options", [SIDES, (*SIDES, *ROTATIONS, "leftpad")], ids=len)
def test_tail_and_sinks_hold_the_transformed_values_in_fp16(options):
    """A call of 45 tokens, longer than the ring of 13; the second row has 18."""
    case = cases.build(options, kinds=("q4_0", "nf4")).append(append_)
    for stream in case.streams.values():
        given = dense.turned(stream.given, stream.view.rotate)
        places = (
            (dense.by_position(stream.view.tail, case.lengths, 64), 13),
            (dense.from_leftpad(stream.view.sink, case.leftpad, 64), 3),
        )
        for place, (found, count) in enumerate(places):
            found = dense.by_head(found, 2, stream.dim)  # noqa: PLW2901
            for b, (length, pad) in enumerate(zip(case.lengths, case.leftpad, strict=True)):
                first = max(length - count, 0) if place == 0 else pad
                held = slice(first, first + count)
                assert relative_l2(found[b, :, held], given[b, :, held]) <= 5e-4


def test_a_row_without_new_tokens_keeps_its_tail_and_sinks():
    case = cases.build((*SIDES, "rotate_k", "pages"), lengths=(40, 1)).append(append_)
    before = side_by_side(case)
    new = [torch.randn(2, 2, 3, 32) for _ in case.streams]
    views = [stream.view for stream in case.streams.values()]
    append_(*views, *new, case.seqlens, query_lens=rows(0, 3), **case.place)
    for view, old in zip(views, before.values(), strict=True):
        assert same_bits(view.tail[0], old.tail[0]) and same_bits(view.sink[0], old.sink[0])
        assert not same_bits(view.sink[1], old.sink[1])


def test_no_row_with_new_tokens_changes_nothing():
    case = cases.build((*SIDES, "rotate_k", "pages")).append(append_)
    before = side_by_side(case)
    new = [torch.randn(2, 2, 3, 32) for _ in case.streams]
    views = [stream.view for stream in case.streams.values()]
    append_(*views, *new, case.seqlens, query_lens=rows(0, 0), **case.place)
    for view, old in zip(views, before.values(), strict=True):
        for part in ("codes", "scales", "tail", "sink"):
            assert same_bits(getattr(view, part), getattr(old, part))


@pytest.mark.parametrize("changed", ["k", "v"])
@pytest.mark.parametrize("part", SIDES)
def test_a_tail_or_sinks_in_one_stream_only_is_refused_before_writing(part, changed):
    case = cases.build(SIDES)
    views = side_by_side(case)
    v = views[changed]
    gone = {"tail": None} if part == "tail" else {"sink": None}
    views[changed] = KVView(v.codes, v.scales, v.kind, **{"tail": v.tail, "sink": v.sink, **gone})
    new = [torch.randn(2, 2, 3, 32) for _ in views]
    before = side_by_side(case)
    with pytest.raises(ValueError, match=part.rstrip("s")):
        append_(*views.values(), *new, rows(0, 0))
    assert same_bits(views["k"].codes, before["k"].codes)


# -- a cache with a tail ------------------------------------------------------------------------


def make(
    residual_len=6, tail_slack=4, sink_len=0, kind="q4", batch=1, rotate=False, **sizes
):  # fmt: skip
    config = KVCacheTensorConfig(
        kind=kind,
        rotate=rotate,
        residual_len=residual_len,
        tail_slack=tail_slack,
        sink_len=sink_len,
    )
    return poison(LayerKVCache(batch, 128, 64, 64, config, config, n_kv_heads=2, **sizes))


def tokens(count, batch=1):
    return torch.randn(batch, 2, count, 32)


class Mirror:
    """What each row of a cache with a tail must hold, kept by the words of the documentation.

    A position read from the ring has its fp16 values unless its slot was overwritten since; then it
    has those of its codes.
    """

    def __init__(self, cache):
        self.cache, self.size = cache, cache.k.tail.shape[2]
        self.given = [[[], []] for _ in range(cache.batch_size)]
        self.exact = [[] for _ in range(cache.batch_size)]

    def append(self, k, v, lens=None):
        self.cache.append(k, v, lens)
        for b, (given, exact) in enumerate(zip(self.given, self.exact, strict=True)):
            for t in range(k.shape[2] if lens is None else lens[b]):
                for kept, x in zip(given, (k, v), strict=True):
                    kept.append(x[b, :, t])
                exact.append(True)
                if len(exact) > self.size:
                    exact[len(exact) - 1 - self.size] = False

    def crop(self, counts):
        self.cache.crop(counts)
        for b, count in enumerate(counts):
            for kept in (*self.given[b], self.exact[b]):
                del kept[len(kept) - count :]

    def reorder(self, order):
        self.cache.reorder(torch.tensor(order))
        self.given = [[list(kept) for kept in self.given[row]] for row in order]
        self.exact = [list(self.exact[row]) for row in order]

    def expected(self, q, query_lens=None):
        lengths = [len(row) for row in self.exact]
        codes, fp16 = [], []
        for index, stream in enumerate((self.cache.k, self.cache.v)):
            lanes = dense.decoded(stream.codes, stream.scales, stream.config.kind.value)
            if self.cache.pages is not None:
                lanes = dense.by_row(lanes, self.cache.pages.tensor)
            stored = dense.by_head(lanes, 2, 32)
            side = stored.half().double()
            for b, exact in enumerate(self.exact):
                for j, kept in enumerate(exact):
                    if kept:
                        side[b, :, j] = self.given[b][index][j].half().double()
            codes.append(stored)
            fp16.append(side)
        sides = dense.Sides(self.cache.residual_len, 0, tuple(fp16))
        return dense.attend(q, *codes, lengths, query_lens=query_lens, sides=sides)

    def check(self, count, query_lens=None):
        q = torch.randn(self.cache.batch_size, 4, count, 32)
        out = self.cache.attend(q)
        expected, _ = self.expected(q, query_lens)
        assert out.isfinite().all()
        assert relative_l2(out, expected) <= RELATIVE_L2[torch.float32]


@pytest.mark.parametrize("drop", range(14))
@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_a_crop_of_any_depth_then_new_tokens(kind, drop):
    """Within the slack nothing is lost; deeper, what was lost is read from the codes."""
    mirror = Mirror(make(kind=kind))
    mirror.append(tokens(40), tokens(40))
    mirror.crop([drop])
    assert drop > 4 or all(mirror.exact[0][-6:])
    for count in (1, 4, 2):
        mirror.append(tokens(count), tokens(count))
        mirror.check(count)


@pytest.mark.parametrize("drop", range(14))
@pytest.mark.parametrize("count", [1, 4])
def test_the_newest_tokens_may_be_asked_again_after_a_crop(drop, count):
    mirror = Mirror(make())
    mirror.append(tokens(40), tokens(40))
    mirror.crop([drop])
    mirror.check(count)


@pytest.mark.parametrize("page_size", [None, 32])
@pytest.mark.parametrize("seed", range(4))
def test_any_history_reads_the_right_values(seed, page_size):
    rng = random.Random(seed)
    mirror = Mirror(make(batch=2, page_size=page_size))
    for _ in range(60):
        lengths = [len(row) for row in mirror.exact]
        call = rng.choice(["step"] * 4 + ["prefill", "crop", "crop", "reorder"])
        if call in ("step", "prefill"):
            count = rng.randint(1, 4) if call == "step" else rng.randint(5, 30)
            if max(lengths) + count > 128:
                mirror.crop([length // 2 for length in lengths])
            lens = [rng.randint(0, count) for _ in lengths] if rng.random() < 0.3 else None
            mirror.append(tokens(count, 2), tokens(count, 2), lens)
            if call == "step":
                mirror.check(count, lens)
        elif call == "crop":
            mirror.crop([rng.randint(0, min(n, rng.choice([4, 12, 90]))) for n in lengths])
        else:
            mirror.reorder([rng.randrange(2), rng.randrange(2)])


def test_an_order_on_the_device_is_as_careful_as_one_on_the_host():
    """Nothing is read from a device (here "meta"): of rows that may have moved, the worst is assumed."""
    config = KVCacheTensorConfig(kind="q4", residual_len=6, tail_slack=4)
    caches = [
        LayerKVCache(2, 128, 64, 64, config, config, n_kv_heads=2, device=device)
        for device in ("cpu", "meta")
    ]
    for cache in caches:
        new = torch.zeros(2, 2, 40, 32, device=cache.device)
        cache.append(new, new, [40, 18])
        cache.crop([12, 0])
        cache.append(new[:, :, :10], new[:, :, :10], [0, 10])
        cache.reorder(torch.tensor([0, 0]).to(cache.device, non_blocking=True))
    host, device = caches
    assert device.lengths.host == host.lengths.host == [28, 28]
    assert min(device.tail.lowest) >= max(host.tail.lowest)
    assert device.lengths.query_lens is host.lengths.query_lens is None


@pytest.mark.parametrize("cut", [9, 40, 45])
def test_a_rebuilt_cache_and_a_deeply_cropped_one_agree_to_the_format(cut):
    cropped, rebuilt = make(), make()
    k, v = tokens(50), tokens(50)
    cropped.append(k, v)
    cropped.crop(cut)
    rebuilt.append(k[:, :, : 50 - cut], v[:, :, : 50 - cut])
    more_k, more_v, q = tokens(2), tokens(2), torch.randn(1, 4, 2, 32)
    outs = []
    for cache in (cropped, rebuilt):
        cache.append(more_k, more_v)
        outs.append(cache.attend(q))
    assert relative_l2(*outs) <= 0.15


def test_the_tail_makes_recent_tokens_exact():
    """With every token in the tail a 4-bit cache answers as fp16 does."""
    cache, k, v = make(residual_len=40), tokens(40), tokens(40)
    cache.append(k, v)
    q = torch.randn(1, 4, 1, 32)
    expected, _ = dense.attend(q, k.half(), v.half(), [40])
    assert relative_l2(cache.attend(q), expected) <= RELATIVE_L2[torch.float32]


def test_sinks_are_rewritten_after_a_crop_into_them():
    cache = make(residual_len=0, sink_len=4)
    cache.append(tokens(3), tokens(3))
    cache.crop(2)
    k, v = tokens(3), tokens(3)
    cache.append(k, v)
    sink = dense.by_head(cache.k.sink.double(), 2, 32)
    assert torch.equal(sink[:, :, 1:], k.half().double())


@pytest.mark.parametrize("rotate", [False, True])
def test_more_sinks_than_the_cache_has_slots(rotate):
    cache = make(residual_len=0, sink_len=200, rotate=rotate)
    k, v = tokens(20), tokens(20)
    cache.append(k, v)
    q = torch.randn(1, 4, 1, 32)
    expected, _ = dense.attend(q, k, v, [20])
    assert relative_l2(cache.attend(q), expected) <= 2e-3


def test_nbytes_count_the_ring_and_the_sinks():
    plain = make(residual_len=0).nbytes
    assert make(residual_len=6, tail_slack=4, sink_len=3).nbytes - plain == 2 * (10 + 3) * 64 * 2
    assert make(residual_len=0, tail_slack=4).k.tail is None


def test_more_tokens_at_once_than_the_slack_are_refused():
    cache = make()
    cache.append(tokens(20), tokens(20), will_attend=False)
    with pytest.raises(ValueError, match="T=5 tokens; with a tail up to tail_slack=4 are allowed"):
        cache.attend(torch.randn(1, 4, 5, 32))
    assert cache.attend(torch.randn(1, 4, 4, 32)).isfinite().all()


def test_settings_of_a_tail_must_agree_and_be_positive():
    config = KVCacheTensorConfig
    with pytest.raises(ValueError, match="tail_slack must be the same"):
        LayerKVCache(
            1,
            64,
            64,
            64,
            config(residual_len=4, tail_slack=8),
            config(residual_len=4, tail_slack=9),
        )
    with pytest.raises(ValueError, match="sink_len must be the same"):
        LayerKVCache(1, 64, 64, 64, config(sink_len=4), config())
    for change in (dict(residual_len=-1), dict(tail_slack=0), dict(sink_len=-1)):
        with pytest.raises(ValueError, match=next(iter(change))):
            config(**change)


def test_a_tail_of_the_op_is_ignored_without_residual_len():
    case = cases.build(["tail"]).append(append_)
    case.residual_len = 0
    cases.check(case.attend(decode_attention), case.expected())


def test_restoring_a_model_cache_after_a_failed_pass_keeps_the_tail_right():
    config = KVCacheTensorConfig(kind="q4", residual_len=6, tail_slack=4)
    cache = ModelKVCache([LayerShape(64, 64, 2)] * 2, 1, 128, config, config)
    mirrors = [Mirror(poison(layer)) for layer in cache]
    for mirror in mirrors:
        mirror.append(tokens(30), tokens(30))
    lengths = cache.row_lengths
    mirrors[0].append(tokens(4), tokens(4))
    cache.restore(lengths)
    for kept in (*mirrors[0].given[0], mirrors[0].exact[0]):
        del kept[30:]
    for mirror in mirrors:
        mirror.append(tokens(4), tokens(4))
        mirror.check(4)


def test_a_model_verifies_drafts_as_it_steps():
    """The native model with a q4 cache and a tail: 4 tokens at once equal 4 steps."""
    config = ModelConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    model = Transformer(config).eval()
    stored = KVCacheTensorConfig(kind="q4", residual_len=8, tail_slack=4, sink_len=2)
    prompt, draft = torch.randint(50, (2, 40)), torch.randint(50, (2, 4))

    def prefilled():
        cache = ModelKVCache(model.cache_layout, 2, 64, stored, stored)
        model(prompt, cache)
        return cache

    with torch.inference_mode():
        cache = prefilled()
        steps = torch.cat([model(draft[:, t : t + 1], cache) for t in range(4)], dim=1)
        cache.crop(4)
        for again in (cache, prefilled()):
            assert relative_l2(model(draft, again), steps) <= 1e-5


@pytest.mark.parametrize("spec", ["q8", "q4", "q4:plain,residual_len=16,tail_slack=12"])
@pytest.mark.parametrize("page_size", [None, 64])
def test_a_crop_reads_no_more_codes_than_it_puts_back(spec, page_size, monkeypatch):
    """Every rejected draft crops: what is read for it must not grow with the context."""
    cache = LayerKVCache(2, 1024, 64, 64, n_kv_heads=2, page_size=page_size, **cache_configs(spec))
    source = torch.Generator().manual_seed(0)
    for tokens in (500, 5, 5):
        k, v = (torch.randn(2, 2, tokens, 32, generator=source) for _ in range(2))
        cache.append(k, v)
        cache.attend(torch.randn(2, 4, tokens, 32)[:, :, -5:])
    for name in cache.streams:  # of 480 tokens there are whole groups
        part, whole = cache.stored(name, 480, 461, slice(1, 2)), cache.stored(name, 480)
        assert torch.equal(part, whole[1:2, :, 461:])
    read = []
    load = stream_module.load
    monkeypatch.setattr(
        stream_module, "load", lambda codes, *a: (read.append(codes.shape), load(codes, *a))[1]
    )
    cache.crop([4, 2])
    assert read and all(rows == 1 and slots <= 128 for rows, _, slots, _ in read)


def test_a_state_is_taken_while_the_tail_is_wide():
    cache = LayerKVCache(1, 512, 64, 64, n_kv_heads=2, **cache_configs("q4"))
    cache.append(*torch.randn(2, 1, 2, 9, 32))
    state = cache.state_dict()
    wanted = cache.get()
    cache.append(*torch.randn(2, 1, 2, 50, 32))
    cache.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(cache.get(), wanted, strict=True))


def test_padding_goes_with_the_first_append_and_with_attend_where_there_are_sinks():
    """It says where they begin; without sinks it says at attend alone what is hidden, as in flash-attention."""
    pad = torch.tensor([3], dtype=torch.int32)
    for spec, first, then, fits in (
        ("q4", None, pad, False), ("q4", pad, None, False), ("q4", pad, pad, True), ("q4", None, None, True),
        ("fp16", None, pad, True),
    ):  # fmt: skip
        cache = LayerKVCache(1, 512, 64, 64, n_kv_heads=2, **cache_configs(spec))
        for _ in range(2):
            cache.append(*torch.randn(2, 1, 2, 9, 32), cache_leftpad=first)
            q = torch.randn(1, 2, 1, 32)
            if fits:
                cache.attend(q, cache_leftpad=then)
            else:
                with pytest.raises(ValueError, match="goes with the first append and with every"):
                    cache.attend(q, cache_leftpad=then)
            cache.reset()
