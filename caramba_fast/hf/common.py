"""Common: what the layers of one cache share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from caramba_fast.hf.holding import NAME, implementation
from caramba_fast.hf.settings import CacheSettings


@dataclass
class Common:
    """What all layers of a cache share.

    Attributes:
        model: the model's name, for messages.
        config: the decoder's, which names its attention.
        on_interface: whether that attention can be ours.
        settings: how K and V are stored.
        room: tokens a row is to have room for from the start, if known.
        limit: most tokens of a row; None for no limit.
        leftpad: (B,) int32, where rows start; None for slot 0. Replaced as a whole, never written into.
        dequantized: how many times keys or values were asked for as tensors.
        warned: whether that was warned of.
        told: layers of a static cache whose mask, in the pass that is coming, was made by our mask function.
    """

    model: str
    settings: CacheSettings
    config: Any = None
    on_interface: bool = True
    room: int | None = None
    limit: int | None = None
    leftpad: Tensor | None = None
    dequantized: int = 0
    warned: bool = False
    told: set[int] = field(default_factory=set)

    def why_dequantized(self) -> str:
        """Why a layer is asked for tensors."""
        if not self.on_interface:
            return "its attention is not on the attention interface of transformers"
        if self.config is not None and implementation(self.config) != NAME:
            return "it has its own attention; caramba_fast.accelerate(model) gives it one that reads packed"
        return "its attention (or its mask) needs keys and values as tensors"

    def check_length(self, tokens: int) -> None:
        """Raises ValueError for rows of ``tokens``, if that is more than a row may have."""
        if self.limit is not None and tokens > self.limit:
            raise ValueError(
                f"{self.model}: rows of {tokens} tokens do not fit a cache with max_seq_len={self.limit}; make a "
                "CarambaCache with a larger one, or without, which grows"
            )

    def rows_start_at(self, leftpad: Tensor | None, length: int) -> bool:
        """Where rows start that hold ``length`` tokens, (B,) or None for 0; False where that contradicts what is known.

        A row of which nothing but padding is stored yet may start later than it seemed.
        """
        known = self.leftpad
        if known is None and leftpad is None:
            return True
        if length == 0:
            self.leftpad = leftpad
            return True
        given = known if leftpad is None else leftpad
        assert given is not None
        zeros = torch.zeros_like(given)
        before = zeros if known is None else known.to(given.device)
        now = zeros if leftpad is None else leftpad
        if before.shape != now.shape:
            return False
        if torch.equal(
            before, now
        ):  # the tensor that is known stays: calls made with it can be repeated
            return True
        if not bool(((now == before) | ((before >= length) & (now >= length))).all()):
            return False
        self.leftpad = leftpad
        return True
