"""extend_attention.by_channel in Triton: the same kernels, whose key and value streams say what they are."""

from .extend_attention import extend_attention

__all__ = ["extend_attention"]
