"""CallPlan: a call of an op over the streams of one layer, checked and made flat once, run with other numbers.

The pattern is FlashInfer's plan and run. A decode step makes the same call in every layer as the step before it, while
checks and the making of some thirty arguments take longer than a short op. A cache keeps the plans of its layers; the
public functions of the ops plan anew, and so check, with every call. The backend keeps its part as well: what Triton
launched, or what the C++ extension made of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba_fast.ops.planned import MOVED, Call
from caramba_fast.ops.registry import Op, forced_backend
from caramba_fast.ops.view import KVView


@dataclass(slots=True)
class CallPlan:
    """The flat arguments of one call that was found right.

    It serves another call on the same streams whose tensors have the same shapes, dtypes and devices, with the same
    options.

    Attributes:
        op: what is called.
        stored: codes and scales of every stream.
        kinds: the kind of every stream.
        stated: the options of the op that describe the streams.
        leading: how many of the tensors that change from call to call go before what is stored.
        replay: repeats the call as its backend keeps it; None where it keeps none.
        backend: that was forced then, if any.
    """

    op: Op
    stored: tuple[Tensor | None, ...]
    kinds: tuple[str, ...]
    stated: Mapping[str, Any]
    leading: int
    replay: Any = None
    backend: str | None = None

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

    def rehearse(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """As `run`, and keeps the call for `again` where the backend can."""
        if torch.compiler.is_compiling():
            return self.run(tensors, options)
        keeper = self.op.keeper(tensors[0].device)
        changing = _changing(tensors, options)
        plain = all(type(x) is Tensor for x in changing)
        if keeper is None or not plain or _is_watched(changing):
            return self.run(tensors, options)
        with keeper.recording() as recorded:
            found = self.run(tensors, options)
        stay = (*self.stored, *(x for x in self.stated.values() if isinstance(x, Tensor)))
        names = tuple(name for name, x in options.items() if isinstance(x, Tensor))
        call = Call(self.leading, len(tensors), names)
        self.replay, self.backend = recorded.replay(changing, stay, call), forced_backend()
        return found

    def again(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """As `run`, for a call that the plan serves."""
        if self.replay is not None and self.backend == forced_backend():
            changing = _changing(tensors, options)
            try:
                found = None if _is_watched(changing) else self.replay(changing)
            except RuntimeError as error:
                return self.anew(error, tensors, options)
            if found is not None:
                return found
        n = self.leading
        return self.op.call(
            *tensors[:n], *self.stored, *tensors[n:], *self.kinds, **self.stated, **options
        )

    def anew(
        self, error: RuntimeError, tensors: Sequence[Tensor], options: Mapping[str, Any]
    ) -> Any:
        """As `rehearse`, where a kept call failed as its streams lie elsewhere now; raises any other error."""
        if MOVED not in str(error):
            raise error
        return self.rehearse(tensors, options)


def _changing(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """All tensors of a call that the next one may have others for."""
    return (*tensors, *[x for x in options.values() if isinstance(x, Tensor)])


def _is_watched(tensors: Sequence[Tensor]) -> bool:
    """Whether somebody has to see the op itself: a dispatch mode, or autograd."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
