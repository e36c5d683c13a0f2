"""decoupled_decode_attention.by_channel in Triton: the same kernels, whose key and value streams say what they are."""

from .decoupled_decode_attention import decoupled_decode_attention

__all__ = ["decoupled_decode_attention"]
