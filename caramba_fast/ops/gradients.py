"""What our ops and caches compute has no derivative: a backward pass raises, instead of leaving parts out."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from caramba_fast.ops.checks import tangents_go_along

T = TypeVar("T", bound=Tensor)

STORED = (
    "attention read keys and values that a packed cache stores, through which no gradient flows; to train, use no "
    "cache (in transformers use_cache=False, or a DynamicCache), and to evaluate, use torch.no_grad()"
)


class _NoGradient(torch.autograd.Function):
    """Ties a tensor computed without autograd to its sources, so that a backward pass through it raises."""

    @staticmethod
    def forward(why: str, made: list[Tensor], *_: Tensor) -> Tensor:  # noqa: ARG004
        return made[0]  # passed in a list, so that autograd does not treat it as an input

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.why = inputs[0]

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


def refuse_tangents(op: str, *sources: Any) -> None:
    """Raises RuntimeError if forward-mode differentiation goes through one of ``sources``."""
    if tangents_go_along():
        for x in sources:
            if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise RuntimeError(no_derivative(op))


def no_derivative(op: str) -> str:
    """The message for a derivative through ``op``."""
    return f"{op} has no derivative: call it under torch.no_grad(), and train with torch's own operations"


def without_gradient(made: Tensor, *sources: Tensor) -> Tensor:
    """Marks attention over a cache as computed from ``sources``; compiled, it is left to torch, which warns."""
    wanted = [] if torch.compiler.is_compiling() else requiring(*sources)
    return tied(made, wanted) if wanted else made


def result_of(op: str, found: Tensor, *sources: Any) -> Tensor:
    """The result of an op called by a user, through which a derivative with respect to ``sources`` raises."""
    if torch.compiler.is_compiling():
        return found
    refuse_tangents(op, *sources)
    wanted = requiring(*sources)
    return tied(found, wanted, no_derivative(op)) if wanted else found


def results_of(op: str, found: tuple[Tensor, Tensor], *sources: Any) -> tuple[Tensor, Tensor]:
    """`result_of` for both results of an op; ``sources`` that are no tensors are skipped."""
    return result_of(op, found[0], *sources), result_of(op, found[1], *sources)
