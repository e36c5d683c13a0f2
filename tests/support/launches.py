"""Stand-in for Triton kernels where only their launches matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Launches:
    """Stands in for the kernels: records grids and arguments, runs nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return lambda *args, **options: self.seen.append((grid, _numbers(args), _numbers(options)))


def _numbers(value: Any) -> Any:
    """What a launch fixes: everything but the addresses of tensors the op itself makes."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_numbers, value))
    if isinstance(value, dict):
        return {name: _numbers(x) for name, x in value.items()}
    return value
