"""Models: the LanguageModel protocol, the native Transformer, loaders, and the demo models."""

from caramba_fast.models.checkpoint import load_model
from caramba_fast.models.config import CheckpointError, ModelConfig, RopeParameters
from caramba_fast.models.context import ContextModel, InferContext
from caramba_fast.models.demos import (
    demo_path,
    demo_tokenizer,
    held_out_text,
    load_demo,
    load_tokenizer,
)
from caramba_fast.models.merged import merge_projections, split_projections
from caramba_fast.models.packed import pack_weights, unpack_weights
from caramba_fast.models.protocol import LanguageModel
from caramba_fast.models.registry import as_language_model, load, register_adapter
from caramba_fast.models.transformer import Transformer

__all__ = [
    "CheckpointError",
    "ContextModel",
    "InferContext",
    "LanguageModel",
    "ModelConfig",
    "RopeParameters",
    "Transformer",
    "as_language_model",
    "demo_path",
    "demo_tokenizer",
    "held_out_text",
    "load",
    "load_demo",
    "load_model",
    "load_tokenizer",
    "merge_projections",
    "pack_weights",
    "register_adapter",
    "split_projections",
    "unpack_weights",
]
