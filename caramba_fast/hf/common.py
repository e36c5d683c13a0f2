"""Common: what the layers of one cache share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from caramba_fast.hf.settings import CacheSettings


@dataclass
class Common:
    """What all layers of a cache share.

    Attributes:
        model: the model's name, for messages.
        settings: how K and V are stored.
        room: tokens a row is to have room for from the start, if known.
        leftpad: (B,) int32, where rows start; None for slot 0. Replaced as a whole, never written into.
        dequantized: how many times keys or values were asked for as tensors.
        warned: layers whose model was warned of it.
    """

    model: str
    settings: CacheSettings
    room: int | None = None
    leftpad: Tensor | None = None
    dequantized: int = 0
    warned: set[int] = field(default_factory=set)

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
