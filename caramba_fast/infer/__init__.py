"""Generation: settings, sampling, beams, speculation, inferencer protocols, and the Generator."""

from caramba_fast.infer.config import GenerateConfig, SpeculativeConfig
from caramba_fast.infer.generator import Generator, generate
from caramba_fast.infer.inferencer import (
    CausalInferencer,
    ChunkwiseInferencer,
    GreedySampling,
    RandomSampling,
)
from caramba_fast.infer.kv_cache import (
    DecodeOutput,
    Inferencer,
    KVCache,
    KVState,
    PrefillOutput,
    QuantizedKVCache,
    SampleStrategy,
)
from caramba_fast.infer.output import GenerateOutput, GenerationMetrics
from caramba_fast.infer.run import Hooks
from caramba_fast.infer.speculative import SpeculationStats, SpeculativeGenerator
from caramba_fast.models.protocol import LanguageModel

__all__ = [
    "CausalInferencer",
    "ChunkwiseInferencer",
    "DecodeOutput",
    "GenerateConfig",
    "GenerateOutput",
    "GenerationMetrics",
    "Generator",
    "GreedySampling",
    "Hooks",
    "Inferencer",
    "KVCache",
    "KVState",
    "LanguageModel",
    "PrefillOutput",
    "QuantizedKVCache",
    "RandomSampling",
    "SampleStrategy",
    "SpeculationStats",
    "SpeculativeConfig",
    "SpeculativeGenerator",
    "generate",
]
