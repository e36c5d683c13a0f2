"""decode_attention.by_channel in Triton: the same kernels, whose key and value streams say what they are."""

from .decode_attention import decode_attention

__all__ = ["decode_attention"]
