"""Cache settings; depends only on `caramba_fast.formats`."""

from caramba_fast.config.kvcache import KVCacheKind, KVCacheTensorConfig
from caramba_fast.config.spec import cache_configs, kind_names, short_name, spec_name

__all__ = [
    "KVCacheKind",
    "KVCacheTensorConfig",
    "cache_configs",
    "kind_names",
    "short_name",
    "spec_name",
]
