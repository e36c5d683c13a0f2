"""Checks of context parallelism, run on every rank: the results equal those of one process.

Models have one layer, so that rounding in the last bit cannot change what a later layer quantizes, and run on the
reference, whose rounding does not depend on how queries are grouped.
"""

from __future__ import annotations

import functools
import math
import re
from contextlib import contextmanager

import pytest
import torch
from support.distributed_models import bytes_given, ids, model

from caramba_fast.bench.serving.traffic import StepShape, decode_step
from caramba_fast.cache import LayerShape, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig, cache_configs
from caramba_fast.distributed import ContextParallelKVCache, RankGroup
from caramba_fast.ops import use_backend

PAGE = 128


@functools.cache
def group():
    return RankGroup(timeout=60)


def pair(name, rows, length, spec, prefill="stored", **options):
    """The cache of one process, and the distributed one."""
    settings = {**cache_configs(spec), "prefill": prefill}
    layout = model(name).cache_layout
    alone = ModelKVCache(layout, rows, length, **settings)
    return alone, ContextParallelKVCache(layout, rows, length, group=group(), **settings, **options)


@torch.no_grad()
def feed(name, caches, tokens, atol=1e-5, **options):
    """Feeds tokens to the model with either cache; logits agree where they are defined."""
    alone, spread = (model(name).forward(tokens, cache, **options) for cache in caches)
    for row, n in enumerate(options.get("query_lens") or [tokens.shape[1]] * len(tokens)):
        torch.testing.assert_close(spread[row, :n], alone[row, :n], atol=atol, rtol=0)
    assert caches[0].row_lengths == caches[1].row_lengths == caches[1].seq_lens.tolist()


def play(name, spec, prefill="stored", atol=1e-5, **options):
    """Chunks of various lengths, decode steps, crops within and beyond the tail, rows of different lengths."""
    caches = pair(name, 2, 700, spec, prefill, **options)
    whole, seen = ids(2, 700), 0
    for count in (300, 1, 20, 170, 1, 1):
        feed(name, caches, whole[:, seen : seen + count], atol)
        seen += count
    for cache in caches:
        cache.crop([3, 250])
    feed(name, caches, ids(2, 40, 6), atol, query_lens=[40, 17])
    feed(name, caches, ids(2, 1, 7), atol)
    feed(name, caches, ids(2, 3, 7), atol, query_lens=[0, 3])
    for cache in caches:
        cache.truncate(130)
    feed(name, caches, ids(2, 5, 8), atol)
    for cache in caches:
        cache.reset()
        assert cache.row_lengths == [0, 0]
    feed(name, caches, ids(2, 9, 9), atol)


def check_every_kind_and_attention():
    """All combinations on two ranks; on four, each kind and each attention once."""
    once = [("gqa", "q8"), ("window", "q4"), ("dba", "fp16")]
    more = [
        *(("gqa", spec) for spec in ("fp32", "fp16", "q4")), ("window", "fp16"), ("dba", "q8"), ("dba", "q4"),
    ]  # fmt: skip
    with use_backend("reference"):
        for name, spec in once + more if group().size == 2 else once:
            play(name, spec)
        play("deep", "fp32")


def check_exact_prefill_sinks_and_mixed_kinds():
    with use_backend("reference"):
        for name in ("gqa", "dba"):
            play(name, "q4", "exact")
        play("gqa", "q8/q4:sink_len=5,residual_len=40")
        play("gqa", "nf4:plain,sink_len=3", page_size=32)


def check_the_fast_kernels_agree():
    for name in ("gqa", "window", "dba"):
        play(name, "q8", atol=2e-3)
        play(name, "q4", atol=5e-3)


def check_pages_hold_the_bytes_of_one_process():
    rank = group().rank
    for spec in ("q8", "q4"):
        caches = pair("gqa", 2, 700, spec)
        feed("gqa", caches, ids(2, 500), atol=1)
        alone, spread = (cache[0] for cache in caches)
        for name, stream in alone.streams.items():
            own = spread.local.streams[name]
            for row in range(2):
                held = spread.local.pages.rows[row]
                pages = [p for p in spread.placement.spread.pages_of(rank) if p * PAGE < 500]
                assert len(held) == len(pages)
                for mine, page in zip(held, pages, strict=True):
                    # Incomplete groups by channel have no codes yet.
                    n = min(PAGE, 500 - page * PAGE) // stream.group * stream.group
                    for one, other, per in (
                        (stream.codes, own.codes, 1), (stream.scales, own.scales, stream.group)
                    ):  # fmt: skip
                        part = one[row, :, page * PAGE // per : (page * PAGE + n) // per]
                        assert torch.equal(part, other[mine, :, : n // per])


def check_rows_are_reordered_and_taken():
    with use_backend("reference"):
        for spec in ("fp32", "q4"):
            caches = pair("gqa", 2, 400, spec)
            feed("gqa", caches, ids(2, 200), query_lens=[200, 140])
            for cache in caches:
                cache.reorder(torch.tensor([1, 1]))
            feed("gqa", caches, ids(2, 70, 6))
            taken = [cache.select_rows([1, 0, 1]) for cache in caches]
            feed("gqa", taken, ids(3, 2, 7))
            feed("gqa", caches, ids(2, 1, 8))


def check_more_than_there_is_room_for_is_refused_before_anything_is_written():
    caches = pair("gqa", 2, 300, "q4")
    feed("gqa", caches, ids(2, 250), atol=1, query_lens=[250, 240])
    spread = caches[1]
    before = [x.clone() for s in spread[0].local.streams.values() for x in s.buffers]
    rings = [s.tail.clone() for s in spread[0].ring.streams.values()]
    message = f"row 0 holds 250 tokens over {group().size} ranks and cannot take 51 more: max_seq_len is 300"
    with pytest.raises(ValueError, match=message):
        model("gqa").forward(ids(2, 51), spread)
    after = [x for s in spread[0].local.streams.values() for x in s.buffers]
    assert all(
        a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(before, after, strict=True)
    )
    assert all(a.equal(s.tail) for a, s in zip(rings, spread[0].ring.streams.values(), strict=True))
    assert spread.row_lengths == spread.seq_lens.tolist() == [250, 240]
    feed("gqa", caches, ids(2, 50), atol=1)


def check_ranks_of_different_sizes():
    size = group().size
    rooms = [256, *[128] * (size - 2), 700]
    with use_backend("reference"):
        caches = pair("gqa", 1, 700, "q4", rank_tokens=rooms)
        for start in range(0, 700, 175):
            feed("gqa", caches, ids(1, 700)[:, start : start + 175])
    spread = caches[1][0].placement.spread
    held = [spread.count(rank, torch.tensor(700).numpy()).item() for rank in range(size)]
    assert sum(held) == 700 and all(n <= room for n, room in zip(held, rooms, strict=True))
    assert len(caches[1][0].local.pages.rows[0]) * PAGE >= held[group().rank] > 0
    with pytest.raises(
        ValueError, match=rf"max_seq_len is 2000, 16 pages of 128 tokens; .* {size}|room for"
    ):
        pair("gqa", 1, 2000, "q4", rank_tokens=rooms)


def check_bytes_are_those_of_the_formulas():
    size, rank = group().size, group().rank
    for name, spec in (("gqa", "fp32"), ("gqa", "q4:plain,residual_len=32"), ("dba", "q8:plain")):
        given = model(name)
        _, cache = pair(name, 2, 700, spec)
        layer = cache[0]
        with torch.no_grad():
            given.forward(ids(2, 600), cache)
            traffic, before = group().traffic, vars(group().traffic).copy()
            with bytes_given() as counted:
                given.forward(ids(2, 1), cache)
        heads = given.config.num_attention_heads
        shape = StepShape(
            1, 64, heads, layer.n_kv_heads, layer.streams["v"].head_dim, 4, layer.bytes_per_token,
            layer.residual_len, sum(2 * layer.n_kv_heads * s.head_dim for s in layer.streams.values()),
        )  # fmt: skip
        step = decode_step(shape, 601, batch=2, context=size)
        moved = {key: value - before[key] for key, value in vars(traffic).items()}
        assert moved == {"collectives": 1, "given": step.given, "received": step.received}
        assert counted == [step.given]
        spread = layer.placement.spread
        codes = 2 * spread.tokens_of(rank) * layer.bytes_per_token
        table = layer.local.pages.tensor.nbytes
        assert layer.local.nbytes == codes + table
        read = [
            2 * spread.count(r, torch.tensor(601 - layer.residual_len).numpy()).item() * layer.bytes_per_token
            for r in range(size)
        ]  # fmt: skip
        read[0] += 2 * shape.tail_tokens * shape.tail_token_bytes
        assert step.cache_read == max(read)


@contextmanager
def refused(kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        yield


def check_what_cannot_be_exact_is_refused():
    shape, config = LayerShape(64, 64, 2), KVCacheTensorConfig(kind="q8")
    cache = ContextParallelKVCache([shape], 1, 300, config, config, group=group())
    k, q = torch.randn(1, 2, 3, 32), torch.randn(1, 4, 3, 32)
    with refused(
        ValueError, "cache_leftpad is given; rows spread over ranks begin with real tokens"
    ):
        cache[0].append(k, k, None, torch.zeros(1, dtype=torch.int32))
    cache[0].append(k, k)
    with refused(
        TypeError,
        "attend has no option num_sink_tokens for pages spread over ranks; allowed are before",
    ):
        cache[0].attend(q, num_sink_tokens=2)
    for asked, options, message in (
        (q, {"before": 1}, "q has shape (1, 4, 3, 32) and before is 1"),
        (q[:, :3], {}, "q has shape (1, 3, 3, 32); (1, H_q, T, 32) with H_q a multiple of 2"),
        (q[..., :16], {}, "q has shape (1, 4, 3, 16); (1, H_q, T, 32)"),
        (q, {"num_splits": -2}, "num_splits is -2; -1 or more is allowed"),
        (q, {"window_size": (3,)}, "window_size is (3,); (left, right)"),
        (q, {"softmax_scale": math.inf}, "softmax_scale is inf; a finite number is needed"),
        (q, {"null_k": k[0, :, 0]}, "null keys and values go together; only null_k given"),
        (q, {"num_splits": 1.5}, "num_splits is 1.5; an int is needed"),
        (q, {"s_aux": torch.zeros(1)}, "s_aux is (1,) on cpu; (4,) on cpu is needed"),
        (q, dict.fromkeys(("null_k", "null_v"), k[0, :1, 0]), "null_k is (1, 32) on cpu; (2, 32)"),
    ):
        with refused(ValueError, message):
            cache[0].attend(asked, **options)
    with refused(TypeError, "attend has no option sem_scale"):
        cache[0].attend(q, sem_scale=0.1)
    with refused(TypeError, "q has dtype torch.int64"):
        cache[0].attend(q.long())
    with refused(RuntimeError, "attention over a packed cache has no derivative"):
        cache[0].attend(q.requires_grad_()).sum().backward()
    with refused(ValueError, "cannot crop 4 tokens of row 0, which holds 3"):
        cache.crop(4)
    with refused(ValueError, "page_size is 100; a multiple of 32 is needed"):
        ContextParallelKVCache([shape], 1, 300, group=group(), page_size=100)
    with refused(ValueError, "num_pages is 3"):
        ContextParallelKVCache([shape], 1, 300, group=group(), num_pages=3)
    with refused(ValueError, "sink_len is 40; up to page_size=32 is allowed"):
        sinks = KVCacheTensorConfig(sink_len=40)
        ContextParallelKVCache([shape], 1, 300, sinks, sinks, group=group(), page_size=32)
    with refused(TypeError, "unexpected keyword argument 'pages'"):
        ContextParallelKVCache([shape], 1, 300, group=group(), pages=3)


@torch.no_grad()
def check_options_of_a_layer():
    """before, s_aux, softcap, a window of the call's own, and lse."""
    config = KVCacheTensorConfig(kind="fp32")
    caches = [
        ModelKVCache([LayerShape(64, 64, 2)], 2, 400, config, config)[0],
        ContextParallelKVCache([LayerShape(64, 64, 2)], 2, 400, config, config, group=group())[0],
    ]
    k, v, q = (torch.randn(2, heads, 300, 32) for heads in (2, 2, 4))
    nulls = torch.randn(2, 2, 32)
    for cache in caches:
        cache.append(k, v, [300, 170])
    with use_backend("reference"):
        for options in (
            {},
            {"softmax_scale": 0.3, "softcap": 5.0, "s_aux": torch.randn(4)},
            {"window_size": (60, 0)},
            {"null_k": nulls[0], "null_v": nulls[1]},
            {"null_v": nulls[1], "null_k": nulls[0]},
        ):
            one, other = (c.attend(q, return_softmax_lse=True, **options) for c in caches)
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(b[0], a[0], atol=1e-5, rtol=0)
                torch.testing.assert_close(b[1, :, :170], a[1, :, :170], atol=1e-5, rtol=0)
        for cache in caches:
            cache.append(k[:, :, :50], v[:, :, :50])
        one, other = (c.attend(q[:, :, :20], before=30) for c in caches)
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)


def check_rows_cropped_to_a_few_tokens_keep_their_sinks():
    with use_backend("reference"):
        for spec in ("q4", "q8", "q4:plain,residual_len=8,sink_len=3"):
            caches = pair("gqa", 1, 700, spec)
            feed("gqa", caches, ids(1, 300))
            for cache in caches:
                cache.truncate(10)
            feed("gqa", caches, ids(1, 5, 8))
            feed("gqa", caches, ids(1, 60, 9))


def check_rows_of_different_lengths_are_on_their_own_pages():
    """The second row's tokens for a rank are the last of the 60, the first row's are the first."""
    with use_backend("reference"):
        for spec in ("fp32", "q4"):
            caches = pair("gqa", 2, 700, spec)
            feed("gqa", caches, ids(2, 200), query_lens=[1, 200])
            feed("gqa", caches, ids(2, 60, 6))
            feed("gqa", caches, ids(2, 1, 7))


def check_a_cut_group_is_encoded_as_in_one_process():
    """Crops within the tail lose nothing; deeper ones, what one process loses."""
    with use_backend("reference"):
        for spec in (
            "q4",
            "q8",
            "q4:residual_len=33,tail_slack=3/q4:plain,residual_len=33,tail_slack=3",
        ):
            caches = pair("gqa", 1, 700, spec)
            for cut in (2, 7, 14, 26):
                feed("gqa", caches, ids(1, 123 - caches[0].pos))
                for cache in caches:
                    cache.crop(cut)
                feed("gqa", caches, ids(1, 60, cut))
                for cache in caches:
                    cache.truncate(90)


def check_a_call_that_fails_leaves_rings_as_they_were():
    with use_backend("reference"):
        for spec in ("q4", "q8"):
            caches = pair("gqa", 1, 700, spec)
            feed("gqa", caches, ids(1, 300))
            before = [(x.row_lengths, [layer.tail_state() for layer in x]) for x in caches]
            feed("gqa", caches, ids(1, 100, 6))
            for cache, (lengths, tails) in zip(caches, before, strict=True):
                cache.restore(lengths)
                for layer, tail in zip(cache, tails, strict=True):
                    layer.restore_tail(tail)
            feed("gqa", caches, ids(1, 40, 7))
