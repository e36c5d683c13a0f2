"""caramba_fast: quantized KV caches with fused decode attention.

Names are imported when first used: ``import caramba_fast`` costs next to nothing, and the first name ``import torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES: dict[str, tuple[str, ...]] = {
    "ops": (
        "BackendError",
        "KVView",
        "append_",
        "backends",
        "decode_attention",
        "decoupled_append_",
        "decoupled_decode_attention",
        "decoupled_extend_attention",
        "dequantize",
        "extend_attention",
        "merge_state",
        "quantize",
        "use_backend",
    ),
    "config": (
        "KVCacheKind",
        "KVCacheTensorConfig",
    ),
    "cache": (
        "DecoupledLayerKVCache",
        "LayerKVCache",
        "ModelKVCache",
    ),
    "models": (
        "LanguageModel",
        "Transformer",
        "as_language_model",
        "load",
        "load_demo",
        "load_model",
    ),
    "hf": (
        "CarambaCache",
        "CarambaStaticCache",
        "accelerate",
        "restore",
    ),
    "policy": ("choose_cache",),
    "infer": (
        "GenerateConfig",
        "GenerateOutput",
        "Generator",
        "SpeculativeConfig",
        "SpeculativeGenerator",
        "generate",
    ),
    "serve": (
        "AsyncEngine",
        "Engine",
        "EngineConfig",
    ),
}
_PACKAGES = (
    "cache",
    "config",
    "distributed",
    "formats",
    "hf",
    "infer",
    "models",
    "ops",
    "policy",
    "quality",
    "serve",
)
_HOME = {name: home for home, names in _NAMES.items() for name in names}

#: Names of earlier versions.
_GONE = frozenset(("Calibration", "Rotary", "Transform", "calibrate"))

__all__ = sorted([*_HOME, *_PACKAGES, "__version__"])  # noqa: PLE0605 - names, all of them str

if TYPE_CHECKING:
    from caramba_fast.cache import DecoupledLayerKVCache as DecoupledLayerKVCache
    from caramba_fast.cache import LayerKVCache as LayerKVCache
    from caramba_fast.cache import ModelKVCache as ModelKVCache
    from caramba_fast.config import KVCacheKind as KVCacheKind
    from caramba_fast.config import KVCacheTensorConfig as KVCacheTensorConfig
    from caramba_fast.hf import CarambaCache as CarambaCache
    from caramba_fast.hf import CarambaStaticCache as CarambaStaticCache
    from caramba_fast.hf import accelerate as accelerate
    from caramba_fast.hf import restore as restore
    from caramba_fast.infer import GenerateConfig as GenerateConfig
    from caramba_fast.infer import GenerateOutput as GenerateOutput
    from caramba_fast.infer import Generator as Generator
    from caramba_fast.infer import SpeculativeConfig as SpeculativeConfig
    from caramba_fast.infer import SpeculativeGenerator as SpeculativeGenerator
    from caramba_fast.infer import generate as generate
    from caramba_fast.models import LanguageModel as LanguageModel
    from caramba_fast.models import Transformer as Transformer
    from caramba_fast.models import as_language_model as as_language_model
    from caramba_fast.models import load as load
    from caramba_fast.models import load_demo as load_demo
    from caramba_fast.models import load_model as load_model
    from caramba_fast.ops import BackendError as BackendError
    from caramba_fast.ops import KVView as KVView
    from caramba_fast.ops import append_ as append_
    from caramba_fast.ops import backends as backends
    from caramba_fast.ops import decode_attention as decode_attention
    from caramba_fast.ops import decoupled_append_ as decoupled_append_
    from caramba_fast.ops import decoupled_decode_attention as decoupled_decode_attention
    from caramba_fast.ops import decoupled_extend_attention as decoupled_extend_attention
    from caramba_fast.ops import dequantize as dequantize
    from caramba_fast.ops import extend_attention as extend_attention
    from caramba_fast.ops import merge_state as merge_state
    from caramba_fast.ops import quantize as quantize
    from caramba_fast.ops import use_backend as use_backend
    from caramba_fast.policy import choose_cache as choose_cache
    from caramba_fast.serve import AsyncEngine as AsyncEngine
    from caramba_fast.serve import Engine as Engine
    from caramba_fast.serve import EngineConfig as EngineConfig


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if (
        name in _GONE
    ):  # no AttributeError, of which `from caramba_fast import ...` would lose the words
        raise ImportError(
            f"caramba_fast.{name} was removed: 'q8', 'q4' and 'nf4' store keys by channel, which needs no calibration"
        )
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
