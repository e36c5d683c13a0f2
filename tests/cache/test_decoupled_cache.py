"""DecoupledLayerKVCache: the contract, and what its three streams are."""

from typing import ClassVar

import pytest
import torch
from support.cache_contract import BATCH, KV_HEADS, LayerCacheContract, of_values

from caramba_fast.cache import DecoupledLayerKVCache, DecoupledLayerShape, LayerShape, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.formats import FORMATS

pytestmark = pytest.mark.usefixtures("on_reference")


class TestDecoupledLayerKVCache(LayerCacheContract):
    dims: ClassVar = {"k_sem": 32, "k_geo": 64, "v": 32}

    def build(self, max_seq_len, config):
        widths = [KV_HEADS * dim for dim in self.dims.values()]
        return DecoupledLayerKVCache(
            BATCH, max_seq_len, *widths, config, config, of_values(config), n_kv_heads=KV_HEADS
        )


class TestNarrowDecoupledLayerKVCache(TestDecoupledLayerKVCache):
    """Semantic heads of 8: lanes of four heads, of which two are padding."""

    dims: ClassVar = {"k_sem": 8, "k_geo": 16, "v": 32}


def test_nbytes_is_the_format_table_without_padding(kind):
    config = KVCacheTensorConfig(kind=kind)
    cache = DecoupledLayerKVCache(
        3, 200, 128, 256, 512, config, config, config, n_kv_heads=16
    )  # 8, 16 and 32 a head: 4 lanes of 4 heads
    one = FORMATS[kind].bytes_per_vector(128 + 256 + 512, 32)
    assert cache.nbytes == 3 * 256 * one
    assert cache.bytes_per_token == one
    assert [s.lanes.heads_per_lane for s in cache.streams.values()] == [4, 4, 4]


def test_the_streams_may_be_stored_differently():
    cache = DecoupledLayerKVCache(
        2, 64, 64, 64, 128, KVCacheTensorConfig(kind="q8"), KVCacheTensorConfig(kind="fp16"),
        KVCacheTensorConfig(kind="nf4", qblock=64), n_kv_heads=2,
    )  # fmt: skip
    assert cache.k_geo.scales is None and cache.v.scales.shape[-1] == 1
    cache.append(*(torch.randn(2, 2, 3, d) for d in (32, 32, 64)))
    out = cache.attend(torch.randn(2, 4, 1, 32), torch.randn(2, 4, 1, 32))
    assert out.shape == (2, 4, 1, 64)


def test_settings_that_streams_share_must_agree():
    tail = KVCacheTensorConfig(kind="q4", residual_len=8)
    with pytest.raises(ValueError, match=r"residual_len must be the same for all .*'k_geo': 0"):
        DecoupledLayerKVCache(1, 64, 32, 32, 32, tail, None, tail)


def test_a_model_cache_gives_both_keys_the_config_of_k_unless_told():
    q4, q8 = KVCacheTensorConfig(kind="q4"), KVCacheTensorConfig(kind="q8")
    shapes = [DecoupledLayerShape(64, 64, 64, 2), LayerShape(64, 64, 2)]
    cache = ModelKVCache(shapes, 1, 32, q4, q8, k_geo_cfg=q8)
    assert [s.config for s in cache[0].streams.values()] == [q4, q8, q8]
    assert [s.config for s in cache[1].streams.values()] == [q4, q8]
