"""torch's attention over a cache in one of its dtypes, the alternative without this package."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.bench.kernels.comparators import grouped, sdpa
from caramba_fast.bench.peers.problem import Problem
from caramba_fast.bench.peers.session import Session

CALLS = {"sdpa": sdpa, "grouped matmul": grouped}


class Torch(Session):
    """A static cache in ``dtype``, as are queries; ``call`` is a name of `CALLS`."""

    def __init__(self, problem: Problem, call: str, dtype: torch.dtype) -> None:
        super().__init__(problem)
        self.call = CALLS[call]
        self.k, self.v = problem.k.to(dtype, copy=True), problem.v.to(dtype, copy=True)
        self.q = problem.q.to(dtype)
        self.new = tuple(x.to(dtype) for x in problem.new)
        self.mask = problem.mask
        self.out = torch.empty(0)

    def step(self) -> None:
        """Copies into the cache, then attends over it."""
        self.k[:, :, self.problem.past :] = self.new[0]
        self.v[:, :, self.problem.past :] = self.new[1]
        self.out = self.call(self.q, self.k, self.v, self.mask)

    def output(self) -> Tensor:
        """As `Session.output`."""
        return self.out.float()

    @property
    def stored(self) -> int:
        """As `Session.stored`."""
        return self.k.nbytes + self.v.nbytes
