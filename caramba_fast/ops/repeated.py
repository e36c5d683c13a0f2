"""RepeatedCall: a call of an op that was checked and flattened once, for the calls that differ in numbers alone.

A decode step makes the same call in every layer as the step before. Checks and the making of some thirty arguments take
as long as a short op, so they are kept beside the stored tensors they are about (`KVView.calls`), and end with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

#: Calls of up to so many query tokens are told apart by their number.
MOST_TOKENS = 33

if TYPE_CHECKING:
    from caramba_fast.ops.view import KVView


class RepeatedCall:
    """The flat arguments of one call, and what another has to have in common with it to be served by them.

    Args:
        op: what is called.
        tensors: the ones that change from call to call; shape, dtype and device may not. The last is (B,) lengths.
        views: the streams; the very same, and the call is kept by the first one.
        options: as given; tensors among them alike in shape, dtype and device, everything else equal.
        stated: the options of the op that describe the streams.
        leading: how many of ``tensors`` go before what is stored.
    """

    __slots__ = (
        "_kinds",
        "_layout",
        "_leading",
        "_op",
        "_options",
        "_others",
        "_stated",
        "_stored",
    )

    def __init__(
        self,
        op: Any,
        tensors: Sequence[Tensor],
        views: Sequence[KVView],
        options: Mapping[str, Any],
        stated: Mapping[str, Any],
        leading: int = 0,
    ) -> None:
        self._op, self._leading, self._others = op, leading, tuple(views[1:])
        self._layout = [_layout(x) for x in tensors]
        self._options = {
            name: _layout(value) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        self._stated = dict(stated)
        self._stored = [part for view in views for part in (view.codes, view.scales)]
        self._kinds = [view.kind for view in views]

    def serves(
        self, tensors: Sequence[Tensor], views: Sequence[KVView], options: Mapping[str, Any]
    ) -> bool:
        """Whether a call with the same first view differs in nothing that was looked at.

        Loops, not generators: it runs twice or three times a layer and step.
        """
        known = self._options
        if len(options) != len(known) or len(tensors) != len(self._layout):
            return False
        for name, value in options.items():
            if name not in known or not _same(value, known[name]):
                return False
        for x, layout in zip(tensors, self._layout, strict=True):
            if type(x) is not layout[0] or (x.shape, x.dtype, x.device) != layout[1:]:
                return False
        return all(map(is_, views[1:], self._others))

    def __call__(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """Runs it with other numbers."""
        leading = self._leading
        return self._op(
            *tensors[:leading], *self._stored, *tensors[leading:], *self._kinds, **self._stated, **options
        )  # fmt: skip


def _layout(x: Tensor) -> tuple[Any, ...]:
    return (type(x), x.shape, x.dtype, x.device)


def _same(value: Any, known: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(_layout(value) == known)
    return value is known or (type(value) is type(known) and bool(value == known))


def call_name(op: str, first: Any) -> tuple[str, int]:
    """What a call is kept under, by its first tensor (B, H, T, D): decode steps beside longer stretches."""
    return op, min(first.shape[2], MOST_TOKENS) if getattr(first, "ndim", 0) == 4 else 0


def may_repeat() -> bool:
    """Not while tracing: what is kept from it would be of the trace."""
    return not torch.compiler.is_compiling()
