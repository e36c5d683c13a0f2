"""Text in, text out from a checkpoint folder: a thin layer over `caramba_fast.infer`."""

from caramba_fast.inference.sampling import apply_temperature, sample_top_p

__all__ = ["apply_temperature", "sample_top_p"]
