"""LayerKVCache: the contract, and what its memory is."""

import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from support.cache_contract import BATCH, KV_HEADS, LayerCacheContract, of_values

from caramba_fast.cache import LayerKVCache, LayerShape, ModelKVCache
from caramba_fast.config import KVCacheKind, KVCacheTensorConfig, cache_configs
from caramba_fast.formats import FORMATS

pytestmark = pytest.mark.usefixtures("on_reference")


class TestLayerKVCache(LayerCacheContract):
    dims: ClassVar = {"k": 32, "v": 32}

    def build(self, max_seq_len, config):
        width = KV_HEADS * 32
        return LayerKVCache(
            BATCH, max_seq_len, width, width, config, of_values(config), n_kv_heads=KV_HEADS
        )


class TestLayerKVCacheOfSharedLanes(TestLayerKVCache):
    """Two heads of 80 side by side, and values of 16 that fill half a lane."""

    dims: ClassVar = {"k": 80, "v": 16}

    def build(self, max_seq_len, config):
        return LayerKVCache(
            BATCH,
            max_seq_len,
            KV_HEADS * 80,
            KV_HEADS * 16,
            config,
            of_values(config),
            n_kv_heads=KV_HEADS,
        )


@pytest.mark.parametrize(("heads", "dim", "lanes", "lane_dim"), [
    (8, 64, 8, 64), (2, 80, 1, 160), (4, 96, 4, 96), (2, 112, 1, 224), (8, 128, 8, 128),
    (2, 256, 2, 256), (16, 8, 4, 32), (3, 80, 2, 160),
])  # fmt: skip
@pytest.mark.parametrize("max_seq_len", [1, 128, 300])
def test_nbytes_is_the_format_table_and_the_bytes_allocated(
    kind, heads, dim, lanes, lane_dim, max_seq_len
):
    config = KVCacheTensorConfig(kind=kind)
    cache = LayerKVCache(3, max_seq_len, heads * dim, heads * dim, config, config, n_kv_heads=heads)
    slots = -(-max_seq_len // 128) * 128
    assert cache.nbytes == 2 * 3 * lanes * slots * FORMATS[kind].bytes_per_vector(lane_dim, 32)
    storages = {
        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes()
        for stream in (cache.k, cache.v)
        for buffer in stream.buffers
    }
    assert cache.nbytes == sum(storages.values())


def test_compression_of_a_real_layer_has_no_padding():
    fp16 = LayerKVCache(1, 4096, 1024, 1024, n_kv_heads=8).nbytes
    q4 = KVCacheTensorConfig(kind="q4")
    assert LayerKVCache(1, 4096, 1024, 1024, q4, q4, n_kv_heads=8).nbytes / fp16 == 4.5 / 16


MEMORY_PROBE = """
import torch
from caramba_fast.cache import LayerKVCache
from caramba_fast.config import KVCacheTensorConfig

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096

config = KVCacheTensorConfig(kind="q8")
before = resident()
cache = LayerKVCache(1, 32768, 1024, 1024, config, config, n_kv_heads=8)
for buffer in (*cache.k.buffers, *cache.v.buffers):
    buffer.zero_()
print(cache.nbytes, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_really_takes_that_much_memory():
    """Written pages of a 70 MB cache show in the resident set, and hardly more than them."""
    output = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE], capture_output=True, text=True, check=True
    )
    nbytes, grown = map(int, output.stdout.split())
    assert abs(grown - nbytes) <= 4 * 2**20


def test_k_and_v_may_be_stored_differently():
    cache = LayerKVCache(
        1, 64, 256, 128, KVCacheTensorConfig(kind=KVCacheKind.Q8_0, qblock=64),
        KVCacheTensorConfig(kind="nf4"), n_kv_heads=2,
    )  # fmt: skip
    cache.append(torch.randn(1, 2, 3, 128), torch.randn(1, 2, 3, 64))
    assert cache.k.scales.shape[-1] == 2 and cache.v.scales.shape[-1] == 2
    assert cache.attend(torch.randn(1, 2, 1, 128)).shape == (1, 2, 1, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(batch_size=0), "batch_size is 0"),
        (dict(max_seq_len=-1), "max_seq_len is -1"),
        (dict(k_dim=100, n_kv_heads=3), "k_dim=100 is not a multiple of n_kv_heads=3"),
        (dict(n_kv_heads=True), "n_kv_heads is True"),
        (
            dict(k_cfg=KVCacheTensorConfig(kind="q8", qblock=128), k_dim=96),
            "qblock=128 does not divide 96",
        ),
    ],
)
def test_bad_sizes_are_refused(change, message):
    good = dict(batch_size=1, max_seq_len=8, k_dim=96, v_dim=96)
    with pytest.raises(ValueError, match=message):
        LayerKVCache(**{**good, **change})


def test_layers_of_a_model_move_together():
    config = KVCacheTensorConfig(kind="q4")
    cache = ModelKVCache([LayerShape(128, 128, 2)] * 3, 2, 64, config, config)
    for layer in cache:
        layer.append(torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64))
    cache.crop([1, 4])
    assert [layer.seq_lens.tolist() for layer in cache] == [[8, 5]] * 3
    cache.reorder(torch.tensor([1, 0]))
    cache.truncate(6)
    assert cache.row_lengths == [5, 6] and cache.pos == 6 and len(cache) == 3
    assert cache.bytes_per_token == 3 * 2 * 128 * 4.5 / 8
    cache.reset()
    assert cache.pos == 0


def test_a_model_cache_refuses_bad_arguments():
    with pytest.raises(ValueError, match="layers is empty"):
        ModelKVCache([], 1, 8)
    with pytest.raises(ValueError, match="prefill is 'fast'"):
        ModelKVCache([LayerShape(64, 64, 1)], 1, 8, prefill="fast")


@pytest.mark.parametrize("spec", [
    "q8", "q4", "nf4", "q4:plain,residual_len=8,sink_len=3", "q4_channel:sink_len=5/q8:plain,sink_len=5", "fp16",
])  # fmt: skip
@pytest.mark.parametrize("leftpad", [None, [0, 7, 40]])
@torch.no_grad()
def test_what_attention_reads_is_what_get_gives_as_read(spec, leftpad):
    torch.manual_seed(0)
    cache = LayerKVCache(3, 256, 128, 128, n_kv_heads=4, **cache_configs(spec))
    pads = None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32)
    k, v = torch.randn(2, 3, 4, 150, 32)
    cache.append(k, v, [150, 90, 120], cache_leftpad=pads)
    cache.crop(5)
    query = torch.randn(3, 4, 1, 32)
    options = {} if pads is None else {"cache_leftpad": pads}
    keys, values = cache.get(torch.float32, pads, as_read=True)
    place, start = torch.arange(cache.pos), torch.tensor(leftpad or [0] * 3)[:, None]
    seen = (place < cache.seq_lens[:, None]) & (place >= start)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen[:, None, None]
    )
    torch.testing.assert_close(cache.attend(query, **options), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", [
    lambda cache, x: cache.append(x, x, cache_leftpad=[3]),
    lambda cache, x: cache.attend(x, cache_leftpad=[0]),
    lambda cache, x: cache.attend(x, s_aux=[0.0] * 2),
    lambda cache, x: cache.reorder([0]),
])  # fmt: skip
def test_lists_in_place_of_tensors_are_named(call):
    cache, x = (
        LayerKVCache(1, 64, 64, 64, n_kv_heads=2, **cache_configs("q4")),
        torch.randn(1, 2, 3, 32),
    )
    cache.append(x, x)
    before = [y.clone() for y in cache.get()]
    with pytest.raises(TypeError, match=r"is a list; a tensor is needed"):
        call(cache, x)
    assert all(map(torch.equal, cache.get(), before))


def test_a_window_that_is_no_pair_and_a_state_of_tensors_are_refused():
    cache, x = (
        LayerKVCache(1, 64, 64, 64, n_kv_heads=2, **cache_configs("q4")),
        torch.randn(1, 2, 3, 32),
    )
    cache.append(x, x)
    with pytest.raises(ValueError, match="window_size is 5"):
        cache.attend(x, window_size=5)
    for change in (
        lambda s: s.update(n_kv_heads=torch.ones(2)),
        lambda s: s["streams"]["k"]["config"].update(qblock=torch.ones(2)),
    ):
        state = cache.state_dict()
        change(state)
        with pytest.raises(ValueError, match="the state does not fit"):
            cache.load_state_dict(state)
