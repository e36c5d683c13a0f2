"""The task of every system: append T tokens to a cache and attend from them, over random keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from caramba_fast.bench.kernels import oracle
from caramba_fast.bench.kernels.workloads import LOGIT_DEVIATION
from caramba_fast.ops import KVView

#: (query heads, kv heads, values of a head).
WIDE, NARROW = (32, 8, 128), (14, 2, 64)
LENGTHS, BATCHES, TOKENS = (512, 4096, 32768), (1, 8), (1, 8)


@dataclass(frozen=True)
class Shape:
    """The shape of a problem.

    Attributes:
        batch, heads, kv_heads, dim: rows, query heads, kv heads, values of a head.
        kv: tokens cached, the new ones included.
        tokens: new tokens.
        threads: CPU threads of every system.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    kv: int
    tokens: int = 1
    threads: int = 1

    @property
    def name(self) -> str:
        """Name in tables."""
        heads = f"H{self.heads}/{self.kv_heads} D{self.dim}"
        return f"B{self.batch} {heads} KV{self.kv} T{self.tokens} threads{self.threads}"

    @property
    def values(self) -> int:
        """Values of K and V together."""
        return 2 * self.batch * self.kv_heads * self.kv * self.dim

    @property
    def slack(self) -> int:
        """Tokens beyond ``kv`` that steps may add before a cache is rewound: 3%, or four steps."""
        return max(4 * self.tokens, self.kv // 32)


class Problem:
    """Queries, keys and values of a shape in fp32; queries give logits of standard deviation 2.

    ``q`` is (B, H, T, D); ``k`` and ``v`` are (B, H_kv, S, D), the new tokens last.
    """

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape = shape
        size = (shape.batch, shape.kv_heads, shape.kv, shape.dim)
        self.k = torch.randn(size, generator=generator)
        self.v = torch.randn(size, generator=generator)
        queries = (shape.batch, shape.heads, shape.tokens, shape.dim)
        self.q = LOGIT_DEVIATION * torch.randn(queries, generator=generator)

    def tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V (B, H_kv, stop - start, D) of some tokens, contiguous."""
        return self.k[:, :, start:stop].contiguous(), self.v[:, :, start:stop].contiguous()

    @property
    def past(self) -> int:
        """Tokens cached before the step."""
        return self.shape.kv - self.shape.tokens

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """K and V (B, H_kv, T, D) that a step appends."""
        return self.tokens(self.past, self.shape.kv)

    @property
    def mask(self) -> Tensor | None:
        """(T, S) bool mask, true where a new token may attend; None for one token, which attends to all."""
        if self.shape.tokens == 1:
            return None
        positions = torch.arange(self.past, self.shape.kv)[:, None]
        return torch.arange(self.shape.kv) <= positions

    def error(self, out: Tensor) -> float:
        """Relative L2 error of (B, H, T, D) against float64 attention of the original K and V."""
        views = [KVView(x, None, "fp32") for x in (self.k, self.v)]
        return oracle.error(out, [self.q], views, kv_heads=self.shape.kv_heads)


def quick() -> tuple[Shape, ...]:
    """A few minutes: two lengths, then more rows, more tokens, the other heads and two threads."""
    base = Shape(1, *WIDE, 4096)
    return (
        base,
        replace(base, kv=512),
        replace(base, batch=8, kv=512),
        replace(base, tokens=8),
        Shape(1, *NARROW, 4096),
        replace(base, threads=2),
    )


def full() -> Iterator[Shape]:
    """Every combination, the most telling first: one new token, one row, the wide heads; then two threads."""
    for tokens, batch, heads, kv in product(TOKENS, BATCHES, (WIDE, NARROW), LENGTHS):
        yield Shape(batch, *heads, kv, tokens)
    for kv, batch in product(LENGTHS, BATCHES):
        yield Shape(batch, *WIDE, kv, threads=2)


def tiny() -> tuple[Shape, ...]:
    """One small shape to check the benchmark itself."""
    return (Shape(2, 4, 2, 32, 64), Shape(1, 4, 2, 32, 64, tokens=8))


GRIDS = {"quick": quick, "full": full, "tiny": tiny}
