"""Generation: settings, sampling, and the Generator."""

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.generator import Generator, generate
from caramba_fast.infer.metrics import GenerationMetrics

__all__ = ["GenerateConfig", "GenerationMetrics", "Generator", "generate"]
