"""Generation: settings, sampling, beams, speculation, inferencer protocols, and the Generator."""

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.generator import Generator, generate
from caramba_fast.infer.inferencer import (
    CausalInferencer,
    ChunkwiseInferencer,
    GreedySampling,
    QuantizedKVCache,
    RandomSampling,
)
from caramba_fast.infer.metrics import GenerationMetrics
from caramba_fast.infer.output import GenerateOutput
from caramba_fast.infer.protocols import (
    DecodeOutput,
    Inferencer,
    KVCache,
    KVState,
    LanguageModel,
    PrefillOutput,
    SampleStrategy,
)
from caramba_fast.infer.run import Hooks
from caramba_fast.infer.spec_config import SpeculativeConfig
from caramba_fast.infer.speculative import SpeculationStats, SpeculativeGenerator

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
