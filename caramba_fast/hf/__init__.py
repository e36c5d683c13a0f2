"""Hugging Face integration: transformers models and tokenizers for generation and serving.

The only layer that imports transformers. Importing it registers its adapter and loaders with `models.registry`.
"""

from caramba_fast.hf import compat as _compat  # noqa: F401, I001 - first: it says what is missing
from transformers import PreTrainedModel

from caramba_fast.hf.integration import accelerate, register, restore
from caramba_fast.hf.adapter import HuggingFaceModel
from caramba_fast.hf.capabilities import is_adapted, without_wrapper
from caramba_fast.hf.loading import load_pretrained, load_tokenizer
from caramba_fast.hf.packed_cache import CarambaCache
from caramba_fast.hf.static_cache import CarambaStaticCache
from caramba_fast.models.registry import (
    register_adapter,
    register_loader,
    register_tokenizer_loader,
)

register()
register_adapter(lambda model: isinstance(model, PreTrainedModel), HuggingFaceModel)
register_adapter(is_adapted, lambda model: HuggingFaceModel(without_wrapper(model)))
register_loader(load_pretrained)
register_tokenizer_loader(load_tokenizer)

__all__ = [
    "CarambaCache",
    "CarambaStaticCache",
    "HuggingFaceModel",
    "accelerate",
    "load_pretrained",
    "load_tokenizer",
    "register",
    "restore",
]
