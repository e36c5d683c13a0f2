"""Settings of the caches; sits on `caramba_fast.formats` alone."""

from caramba_fast.config.kvcache import KVCacheKind, KVCacheTensorConfig, cache_configs, kind_names

__all__ = ["KVCacheKind", "KVCacheTensorConfig", "cache_configs", "kind_names"]
