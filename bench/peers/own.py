"""This package's cache, with append and attend as in a model."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.bench.peers.problem import Problem
from caramba_fast.bench.peers.session import Session
from caramba_fast.cache import LayerKVCache
from caramba_fast.config.spec import cache_configs

#: Tokens appended at once while a cache is filled.
CHUNK = 2048


class Own(Session):
    """A `LayerKVCache` with a cache spec."""

    grows = True

    def __init__(self, problem: Problem, spec: str) -> None:
        super().__init__(problem)
        shape = problem.shape
        width = shape.kv_heads * shape.dim
        self.cache = LayerKVCache(
            shape.batch, shape.kv + shape.slack, width, width, n_kv_heads=shape.kv_heads,
            **cache_configs(spec),
        )  # fmt: skip
        for start in range(0, problem.past, CHUNK):
            stop = min(start + CHUNK, problem.past)
            self.cache.append(*problem.tokens(start, stop), will_attend=False)
        self.new = problem.new
        self.out = torch.empty(0)

    def step(self) -> None:
        """Appends and attends."""
        self.cache.append(*self.new)
        self.out = self.cache.attend(self.problem.q)

    def output(self) -> Tensor:
        """As `Session.output`."""
        return self.out.float()

    @property
    def stored(self) -> int:
        """Codes and scales of the tokens, and all of tail and sinks."""
        shape, cache = self.problem.shape, self.cache
        slots = next(iter(cache.streams.values())).codes.shape[2]
        unused = (slots - shape.kv) * shape.batch * cache.bytes_per_token
        return int(cache.nbytes - unused)

    def rewind(self) -> None:
        """As `Session.rewind`."""
        self.cache.truncate(self.problem.past)
