"""Blocks of edge cases, and a comparison of bits, for the tests of all backends."""

from __future__ import annotations

import torch
from torch import Tensor


def awkward_blocks(block: int = 32) -> dict[str, Tensor]:
    """Named float32 tensors (rows, 2 * block), finite."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(64, 2 * block, generator=generator)
    tied = normal.clone()
    tied[:, 3], tied[:, block - 1] = 5.0, -5.0
    tied[1::2] *= -1
    steps = torch.linspace(-8, 8, 2 * block).repeat(8, 1) * torch.arange(1, 9)[:, None]
    return {
        "random": normal,
        "huge": normal * 1e37,
        "near the largest float": torch.full((2, 2 * block), 3.4e38) * normal[:2].sign(),
        "tiny": normal * 1e-37,
        "subnormal": normal * 1e-42,
        "zero": torch.zeros(3, 2 * block),
        "negative zero": -torch.zeros(3, 2 * block),
        "one value": torch.zeros(2, 2 * block).index_fill(1, torch.tensor([5, block + 7]), -2.5),
        "tied extremes": tied,
        "all positive": normal.abs(),
        "all negative": -normal.abs(),
        "half steps": steps,
        "mixed magnitudes": normal * torch.logspace(-20, 20, 64)[:, None],
    }


def damaged_blocks(block: int = 32) -> Tensor:
    """(3, 2 * block): the first block of each row holds NaN, +inf or -inf, the second is sound."""
    rows = torch.randn(3, 2 * block, generator=torch.Generator().manual_seed(2))
    rows[:, 4] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    return rows


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits; any NaN equals any NaN, -0.0 differs from 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(
        ((a.contiguous().view(whole) == b.contiguous().view(whole)) | (a.isnan() & b.isnan())).all()
    )
