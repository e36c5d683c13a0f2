"""Caches: what a model has seen, stored in any kind, grown, cropped and attended to."""

from caramba_fast.cache.layer import LayerKVCache
from caramba_fast.cache.lengths import RowLengths
from caramba_fast.cache.model import LayerShape, ModelKVCache
from caramba_fast.cache.tensor import CacheTensor

__all__ = ["CacheTensor", "LayerKVCache", "LayerShape", "ModelKVCache", "RowLengths"]
