"""CallPlan: a call of an op over the streams of one layer, checked and made flat once, run with other numbers.

The pattern is FlashInfer's plan and run. A decode step makes the same call in every layer as the step before it, while
checks and the making of some thirty arguments take longer than a short op. A cache keeps the plans of its layers; the
public functions of the ops plan anew, and so check, with every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from caramba_fast.ops.registry import Op
from caramba_fast.ops.view import KVView


class CallPlan(NamedTuple):
    """The flat arguments of one call that was found right.

    It serves another call on the same streams whose tensors have the same shapes, dtypes and devices, with the same
    options.

    Attributes:
        op: what is called.
        stored: codes and scales of every stream.
        kinds: the kind of every stream.
        stated: the options of the op that describe the streams.
        leading: how many of the tensors that change from call to call go before what is stored.
    """

    op: Op
    stored: tuple[Tensor | None, ...]
    kinds: tuple[str, ...]
    stated: Mapping[str, Any]
    leading: int

    @staticmethod
    def of(
        op: Op, views: Sequence[KVView], stated: Mapping[str, Any], leading: int = 0
    ) -> CallPlan:
        """The plan of a call over ``views``."""
        stored = tuple(part for view in views for part in (view.codes, view.scales))
        return CallPlan(op, stored, tuple(view.kind for view in views), stated, leading)

    def run(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """Calls the op, on the backend in force.

        Args:
            tensors: those that change from call to call.
            options: as given, without None.
        """
        n = self.leading
        return self.op(
            *tensors[:n], *self.stored, *tensors[n:], *self.kinds, **self.stated, **options
        )
