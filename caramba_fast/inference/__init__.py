"""Text in, text out from a checkpoint folder: the call form of small inference modules.

A thin face over `caramba_fast.infer`, which has batches, conversations, quantized caches and metrics.
"""

from caramba_fast.inference.sampling import apply_temperature, sample_top_p

__all__ = ["apply_temperature", "sample_top_p"]
