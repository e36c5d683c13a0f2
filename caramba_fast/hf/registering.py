"""register: our attention and mask functions among those of transformers."""

from __future__ import annotations

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from caramba_fast.hf.attention import caramba_attention
from caramba_fast.hf.holding import NAME
from caramba_fast.hf.masks import caramba_mask

__all__ = ["NAME", "register"]


def register() -> str:
    """Makes ``attn_implementation="caramba_fast"`` known to transformers; again changes nothing.

    Without a mask function of the same name transformers would pass no masks at all, and padding and windows
    would silently be lost: both are registered together.

    Returns:
        The name.
    """
    AttentionInterface.register(NAME, caramba_attention)
    AttentionMaskInterface.register(NAME, caramba_mask)
    return NAME
