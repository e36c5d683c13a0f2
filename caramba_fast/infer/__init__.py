"""Generation: settings, sampling, beams, speculation, and the Generator."""

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.generator import Generator, generate
from caramba_fast.infer.metrics import GenerationMetrics
from caramba_fast.infer.output import GenerateOutput
from caramba_fast.infer.run import Hooks
from caramba_fast.infer.spec_config import SpeculativeConfig
from caramba_fast.infer.speculative import SpeculationStats, SpeculativeGenerator

__all__ = [
    "GenerateConfig",
    "GenerateOutput",
    "GenerationMetrics",
    "Generator",
    "Hooks",
    "SpeculationStats",
    "SpeculativeConfig",
    "SpeculativeGenerator",
    "generate",
]
