"""append_.by_channel in Triton: the same kernel, whose streams say what they are."""

from .append import append_

__all__ = ["append_"]
