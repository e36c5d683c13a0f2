"""Paged caches: the contract, and equality with a contiguous cache after any history."""

import random
from typing import ClassVar

import pytest
import torch
from support.cache_contract import (
    BATCH,
    KV_HEADS,
    SETUPS,
    LayerCacheContract,
    Setup,
    of_values,
    poison,
)
from support.tolerances import relative_l2

from caramba_fast.cache import (
    DecoupledLayerKVCache,
    DecoupledLayerShape,
    LayerKVCache,
    LayerShape,
    ModelKVCache,
    OutOfPagesError,
)
from caramba_fast.config import KVCacheTensorConfig, cache_configs

pytestmark = pytest.mark.usefixtures("on_reference")


class TestPagedLayerKVCache(LayerCacheContract):
    dims: ClassVar = {"k": 32, "v": 32}

    def build(self, max_seq_len, config, page_size=32, **pages):
        width = KV_HEADS * 32
        return LayerKVCache(
            BATCH, max_seq_len, width, width, config, of_values(config), n_kv_heads=KV_HEADS,
            page_size=page_size, **pages,
        )  # fmt: skip


class TestPagedDecoupledLayerKVCache(LayerCacheContract):
    dims: ClassVar = {"k_sem": 8, "k_geo": 16, "v": 32}

    def build(self, max_seq_len, config, page_size=32, **pages):
        widths = [KV_HEADS * dim for dim in self.dims.values()]
        return DecoupledLayerKVCache(
            BATCH, max_seq_len, *widths, config, config, of_values(config), n_kv_heads=KV_HEADS,
            page_size=page_size, **pages,
        )  # fmt: skip


@pytest.fixture(params=[TestPagedLayerKVCache, TestPagedDecoupledLayerKVCache])
def contract(request):
    return request.param()


# -- equality with contiguous caches ------------------------------------------------------------


def contiguous(contract, setup, max_seq_len):
    config = setup.config
    widths = [KV_HEADS * dim for dim in contract.dims.values()]
    kind = LayerKVCache if len(widths) == 2 else DecoupledLayerKVCache
    cache = kind(
        BATCH,
        max_seq_len,
        *widths,
        *[config] * (len(widths) - 1),
        of_values(config),
        n_kv_heads=KV_HEADS,
    )
    return poison(cache)


def random_step(contract, rng, caches):
    """One random call, the same on all caches."""
    first = caches[0]
    room = min(first.max_seq_len - n for n in first.lengths.host)
    held = first.lengths.host
    call = rng.choice(["append"] * 5 + ["crop", "crop", "truncate", "reorder", "reorder", "reset"])
    if call == "append" and room:
        count = rng.randint(1, min(room, rng.choice([1, 3, 40])))
        lens = [rng.randint(0, count) for _ in held] if rng.random() < 0.4 else None
        args = (*contract.tokens(count), lens)
    elif call == "crop":
        args = ([rng.randint(0, min(n, rng.choice([3, 60]))) for n in held],)
    elif call == "truncate":
        args = (rng.randint(first.pos // 2, first.pos),)
    elif call == "reorder":
        args = (torch.tensor([rng.randrange(BATCH) for _ in held]),)
    elif call == "reset" and rng.random() < 0.3:
        args = ()
    else:
        return
    for cache in caches:
        getattr(cache, call)(*args)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["fp32", "q4_0", "q4_0+sides", "nf4+rotate+sides"])
def test_any_history_equals_that_of_a_contiguous_cache(contract, name, seed):
    setup = next(s for s in SETUPS if str(s) == name)
    rng = random.Random(seed)
    caches = [contract.make(setup, 100), contiguous(contract, setup, 100)]
    for _ in range(40):
        random_step(contract, rng, caches)
        paged, plain_cache = caches
        assert paged.seq_lens.tolist() == plain_cache.seq_lens.tolist() == paged.lengths.host
        pages = [-(-n // 32) for n in paged.lengths.host]
        assert [len(row) for row in paged.pages.rows] == pages
        assert all(map(torch.equal, paged.get(), plain_cache.get()))
        if not paged.is_empty:
            q = contract.queries(max(1, paged.lengths.newest if paged.lengths.newest < 12 else 1))
            if paged.lengths.query_lens is None or q[0].shape[2] == paged.lengths.newest:
                assert relative_l2(paged.attend(*q), plain_cache.attend(*q)) <= 1e-6
    for cache in caches:
        cache.reset()
    assert caches[0].pages.allocator.free == len(caches[0].pages.allocator.references)


# -- pages of a cache ---------------------------------------------------------------------------


def test_beams_share_pages_until_they_write(contract):
    cache, _ = contract.filled(Setup("q4_0"), 64)
    assert cache.pages.allocator.free == 2
    cache.reorder(torch.tensor([0, 0]))
    assert cache.pages.allocator.free == 4
    cache.append(*contract.tokens(1))
    assert cache.pages.allocator.free == 2
    assert cache.pages.rows[0][:2] == cache.pages.rows[1][:2]
    assert cache.pages.rows[0][2] != cache.pages.rows[1][2]


def test_memory_is_that_of_the_pages(contract):
    config = KVCacheTensorConfig(kind="q8")
    small = contract.build(96, config, num_pages=2).nbytes
    assert contract.build(96, config, num_pages=4).nbytes - small == small - BATCH * 3 * 4


def test_a_pool_that_is_too_small_is_refused_before_anything_is_written(contract):
    cache = poison(contract.build(96, KVCacheTensorConfig(kind="q4"), num_pages=3))
    cache.append(*contract.tokens(40), [40, 20])
    before = cache.get()
    with pytest.raises(OutOfPagesError, match="2 pages are needed and 0 of 3 are free"):
        cache.append(*contract.tokens(30), [30, 30])
    assert cache.seq_lens.tolist() == [40, 20]
    assert all(map(torch.equal, cache.get(), before))
    cache.append(*contract.tokens(24), [24, 12])
    assert cache.seq_lens.tolist() == [64, 32]
    cache.crop([64, 0])
    cache.append(*contract.tokens(20), [0, 20])
    assert cache.seq_lens.tolist() == [0, 52]


def test_a_shared_page_that_cannot_be_copied_is_refused(contract):
    cache = poison(contract.build(96, KVCacheTensorConfig(kind="q4"), num_pages=2))
    cache.append(*contract.tokens(40), [40, 0])
    cache.reorder(torch.tensor([0, 0]))
    before = cache.get()
    with pytest.raises(OutOfPagesError, match="1 pages are needed and 0 of 2 are free"):
        cache.append(*contract.tokens(1))
    assert all(map(torch.equal, cache.get(), before))


@pytest.mark.parametrize(("change", "message"), [
    (dict(page_size=48), "page_size is 48; a multiple of 32 is needed"),
    (dict(page_size=0), "page_size is 0"),
    (dict(page_size=32, num_pages=0), "num_pages is 0"),
    (dict(page_size=None, num_pages=3), "num_pages was given without page_size"),
])  # fmt: skip
def test_bad_pages_are_refused(contract, change, message):
    with pytest.raises(ValueError, match=message):
        contract.build(96, KVCacheTensorConfig(), **change)


def test_the_layers_of_a_model_have_pools_of_their_own():
    config = KVCacheTensorConfig(kind="q4")
    cache = ModelKVCache(
        [LayerShape(64, 64, 2), DecoupledLayerShape(32, 32, 64, 2)], 2, 96, config, config,
        page_size=32, num_pages=4,
    )  # fmt: skip
    for layer in cache:
        layer.append(*(torch.randn(2, 2, 40, s.head_dim) for s in layer.streams.values()))
    assert [layer.pages.allocator.free for layer in cache] == [0, 0]
    cache.crop([10, 0])
    assert [layer.pages.allocator.free for layer in cache] == [1, 1]
    cache.reset()
    assert [layer.pages.allocator.free for layer in cache] == [4, 4]


@pytest.mark.parametrize("spec", ["fp32", "q4"])
def test_a_copy_of_a_page_that_fails_leaves_rows_with_the_pages_they_had(spec, monkeypatch):
    cache = LayerKVCache(2, 128, 64, 64, n_kv_heads=2, page_size=32, **cache_configs(spec))
    x = torch.randn(2, 2, 40, 32, generator=torch.Generator().manual_seed(0))
    cache.append(x, x)
    cache.reorder(torch.tensor([0, 0]))
    before, free = cache.get(), cache.pages.allocator.free
    with monkeypatch.context() as patch:

        def full(_):
            raise torch.OutOfMemoryError

        patch.setattr(cache, "copy_pages", full)
        with pytest.raises(torch.OutOfMemoryError):
            cache.append(x[:, :, :1], x[:, :, :1])
    assert all(map(torch.equal, cache.get(), before)) and cache.pages.allocator.free == free
    cache.append(x[:, :, :1], x[:, :, :1])
    assert torch.equal(cache.get()[0][:, :, :32], before[0][:, :, :32])
