"""Common: what the layers of one cache share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from caramba_fast.hf.settings import CacheSettings


@dataclass
class Common:
    """What all layers of a cache share.

    Attributes:
        model: the model's name, for messages.
        settings: how K and V are stored.
        room: tokens a row is to have room for from the start, if known.
        leftpad: (B,) int32, where rows start; None for slot 0.
        dequantized: how many times keys or values were asked for as tensors.
        warned: layers whose model was warned of it.
    """

    model: str
    settings: CacheSettings
    room: int | None = None
    leftpad: Tensor | None = None
    dequantized: int = 0
    warned: set[int] = field(default_factory=set)
