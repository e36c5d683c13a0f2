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

if TYPE_CHECKING:
    from caramba_fast.ops.view import KVView


class RepeatedCall:
    """The flat arguments of one call, and what another has to have in common with it to be served by them.

    Args:
        op: what is called.
        tensors: the ones that change from call to call; shape, dtype and device may not. The last is (B,) lengths.
        views: the streams; the very same, and the call is kept by the first one.
        options: as given; tensors among them the very same, everything else equal.
        flat: all options of the op, those of the streams included.
        leading: how many of ``tensors`` go before what is stored.
    """

    __slots__ = ("_layout", "_leading", "_op", "_options", "_others", "flat", "kinds", "stored")

    def __init__(
        self,
        op: Any,
        tensors: Sequence[Tensor],
        views: Sequence[KVView],
        options: Mapping[str, Any],
        flat: dict[str, Any],
        leading: int = 0,
    ) -> None:
        self._op, self._leading, self._others = op, leading, tuple(views[1:])
        self._layout = [(type(x), x.shape, x.dtype, x.device) for x in tensors]
        self._options, self.flat = dict(options), flat
        self.stored = [part for view in views for part in (view.codes, view.scales)]
        self.kinds = [view.kind for view in views]

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
            other = known.get(name)
            if value is not other and not _equal(value, other):
                return False
        for x, layout in zip(tensors, self._layout, strict=True):
            if (type(x), x.shape, x.dtype, x.device) != layout:
                return False
        return all(map(is_, views[1:], self._others))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Runs it with other numbers."""
        leading = self._leading
        return self._op(
            *tensors[:leading], *self.stored, *tensors[leading:], *self.kinds, **self.flat
        )


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


def may_repeat() -> bool:
    """Not while tracing: what is kept from it would be of the trace."""
    return not torch.compiler.is_compiling()
