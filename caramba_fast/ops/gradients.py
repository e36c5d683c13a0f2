"""What our ops and caches compute has no derivative: a backward pass raises, instead of leaving parts out."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)

STORED = (
    "attention read keys and values that a packed cache stores, through which no gradient flows; to train, use no "
    "cache (in transformers use_cache=False, or a DynamicCache), and to evaluate, use torch.no_grad()"
)


class _NoGradient(torch.autograd.Function):
    """Ties a tensor computed without autograd to its sources, so that a backward pass through it raises."""

    @staticmethod
    def forward(ctx: Any, why: str, made: list[Tensor], *_: Tensor) -> Tensor:
        ctx.why = why
        return made[0]  # passed in a list, so that autograd does not treat it as an input

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(ctx.why)


def requiring(*sources: Any) -> list[Tensor]:
    """The tensors among ``sources`` whose gradient is being recorded."""
    if not torch.is_grad_enabled():
        return []
    return [x for x in sources if isinstance(x, Tensor) and x.requires_grad]


def tied(made: T, sources: list[Tensor], why: str = STORED) -> T:
    """``made``, computed from ``sources`` without a derivative: a backward pass through it raises ``why``."""
    given = [made.detach() if type(made) is Tensor else made]
    found: T = _NoGradient.apply(why, given, *sources)
    return found


def without_gradient(made: Tensor, *sources: Tensor) -> Tensor:
    """Marks attention over a cache as computed from ``sources``; compiled, it is left to torch, which warns."""
    wanted = [] if torch.compiler.is_compiling() else requiring(*sources)
    return tied(made, wanted) if wanted else made


def results_of(op: str, found: tuple[Tensor, Tensor], *sources: Any) -> tuple[Tensor, Tensor]:
    """`without_gradient` for both results of an op called by a user; ``sources`` that are no tensors are skipped."""
    wanted = [] if torch.compiler.is_compiling() else requiring(*sources)
    if not wanted:
        return found
    why = f"{op} has no derivative: call it under torch.no_grad(), and train with torch's own operations"
    return tied(found[0], wanted, why), tied(found[1], wanted, why)
