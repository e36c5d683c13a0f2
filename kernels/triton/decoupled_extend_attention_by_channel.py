"""decoupled_extend_attention.by_channel in Triton: the same kernels, whose key and value streams say what they are."""

from .decoupled_extend_attention import decoupled_extend_attention

__all__ = ["decoupled_extend_attention"]
