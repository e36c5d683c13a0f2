"""caramba_fast: decode from quantized KV caches that are read as they are stored.

Names are imported when first used, so ``import caramba_fast`` costs what ``import torch`` costs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch as _torch  # noqa: F401 - the one heavy import everyone pays for anyway

__version__ = "0.1.0"

_HOME: dict[str, str] = {
    "append_": "ops",
    "backends": "ops",
    "decode_attention": "ops",
    "dequantize": "ops",
    "merge_state": "ops",
    "quantize": "ops",
    "use_backend": "ops",
    "BackendError": "ops",
    "KVView": "ops",
    "KVCacheKind": "config",
    "KVCacheTensorConfig": "config",
    "LayerKVCache": "cache",
    "ModelKVCache": "cache",
    "LanguageModel": "models",
    "Transformer": "models",
    "load_demo": "models",
    "load_model": "models",
    "GenerateConfig": "infer",
    "Generator": "infer",
    "generate": "infer",
}
_PACKAGES = ("cache", "config", "formats", "infer", "models", "ops", "quality")

__all__ = sorted([*_HOME, *_PACKAGES, "__version__"])  # noqa: PLE0605 - names, all of them str

if TYPE_CHECKING:
    from caramba_fast.cache import LayerKVCache, ModelKVCache
    from caramba_fast.config import KVCacheKind, KVCacheTensorConfig
    from caramba_fast.infer import GenerateConfig, Generator, generate
    from caramba_fast.models import LanguageModel, Transformer, load_demo, load_model
    from caramba_fast.ops import (
        BackendError,
        KVView,
        append_,
        backends,
        decode_attention,
        dequantize,
        merge_state,
        quantize,
        use_backend,
    )


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
