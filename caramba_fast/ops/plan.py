"""CallPlan: a call of an op over the streams of one layer, checked and made flat once, run with other numbers.

The pattern is FlashInfer's plan and run. A decode step makes the same call in every layer as the step before it, while
checks and the making of some thirty arguments take longer than a short op. A cache keeps the plans of its layers; the
public functions of the ops plan anew, and so check, with every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from caramba_fast.ops.registry import Op
from caramba_fast.ops.view import KVView


class CallPlan:
    """The flat arguments of one call that was found right, and what another must share with it to need no check.

    Args:
        op: what is called.
        tensors: those that change from call to call; a call that is served has others of their shapes, dtypes and
            devices.
        views: the streams; a call that is served has the very same.
        options: as given, without None; in a call that is served, tensors among them are alike and all else is equal.
        stated: the options of the op that describe the streams.
        leading: how many of ``tensors`` go before what is stored.
    """

    __slots__ = (
        "_kinds",
        "_layouts",
        "_leading",
        "_op",
        "_options",
        "_stated",
        "_stored",
        "_views",
    )

    def __init__(
        self,
        op: Op,
        tensors: Sequence[Tensor],
        views: Sequence[KVView],
        options: Mapping[str, Any],
        stated: Mapping[str, Any],
        leading: int = 0,
    ) -> None:
        self._op, self._views, self._stated, self._leading = op, tuple(views), stated, leading
        self._stored = [part for view in views for part in (view.codes, view.scales)]
        self._kinds = [view.kind for view in views]
        self._layouts = [_layout(x) for x in tensors]
        self._options = {
            name: _layout(value) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }

    def serves(
        self, tensors: Sequence[Tensor], views: Sequence[KVView], options: Mapping[str, Any]
    ) -> bool:
        """Whether a call differs from the planned one in numbers alone.

        Loops, not generators: it runs twice a layer and step.
        """
        known = self._options
        if len(options) != len(known) or len(tensors) != len(self._layouts):
            return False
        for name, value in options.items():
            if name not in known or not _alike(value, known[name]):
                return False
        for x, layout in zip(tensors, self._layouts, strict=True):
            if type(x) is not layout[0] or (x.shape, x.dtype, x.device) != layout[1:]:
                return False
        return all(map(is_, views, self._views))

    def run(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """Calls the op, on the backend in force, with what ``serves`` was asked about."""
        leading = self._leading
        return self._op(
            *tensors[:leading], *self._stored, *tensors[leading:], *self._kinds, **self._stated, **options
        )  # fmt: skip


def _layout(x: Tensor) -> tuple[Any, ...]:
    return (type(x), x.shape, x.dtype, x.device)


def _alike(value: Any, known: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(_layout(value) == known)
    return value is known or (type(value) is type(known) and bool(value == known))
