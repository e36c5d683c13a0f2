"""KV caches of any storage kind: append, crop, reorder and attend, contiguous or paged."""

from caramba_fast.cache.decode_batch import DecodeBatch
from caramba_fast.cache.interface import AttentionLimits, Rope
from caramba_fast.cache.layer import DecoupledLayerKVCache, LayerCache, LayerKVCache
from caramba_fast.cache.lengths import RowLengths
from caramba_fast.cache.model import AnyLayerShape, DecoupledLayerShape, LayerShape, ModelKVCache
from caramba_fast.cache.pages import OutOfPagesError, PageAllocator, PageTable
from caramba_fast.cache.pool import PageBytes, PagePool
from caramba_fast.cache.ragged import RaggedBatch, Stretch
from caramba_fast.cache.stream import CacheTensor

__all__ = [
    "AnyLayerShape",
    "AttentionLimits",
    "CacheTensor",
    "DecodeBatch",
    "DecoupledLayerKVCache",
    "DecoupledLayerShape",
    "LayerCache",
    "LayerKVCache",
    "LayerShape",
    "ModelKVCache",
    "OutOfPagesError",
    "PageAllocator",
    "PageBytes",
    "PagePool",
    "PageTable",
    "RaggedBatch",
    "Rope",
    "RowLengths",
    "Stretch",
]
