"""decoupled_append_.by_channel in Triton: the same kernel, whose streams say what they are."""

from .decoupled_append import decoupled_append_

__all__ = ["decoupled_append_"]
