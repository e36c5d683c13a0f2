"""CallPlan: an op call over the streams of one layer, checked and flattened once, then run with other tensor contents.

FlashInfer's plan/run pattern: checking and building about thirty arguments takes longer than a short op, and a decode
step makes the same calls as the step before. Caches keep their plans; the public functions of the ops make a new one in
every call. The backend keeps its part, too: Triton's launches, or the arguments unpacked by the C++ extension.
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
    """The flat arguments of one validated call.

    It serves calls with the same streams and options, and tensors of the same shapes, dtypes and devices.

    Attributes:
        op: the op.
        stored: codes and scales of every stream.
        kinds: the kind of every stream.
        stated: the options that describe the streams.
        leading: how many of the changing tensors come before the stored ones in the argument list.
        replay: repeats the call kept by the backend; None if the backend keeps none.
        backend: the backend that was forced at that time, if any.
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
        """Calls the op on the active backend with the tensors that change and the given options, without None."""
        n = self.leading
        return self.op(
            *tensors[:n], *self.stored, *tensors[n:], *self.kinds, **self.stated, **options
        )

    def rehearse(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """As `run`; also keeps the call for `again` if the backend supports it."""
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
        """Handles the error of a kept call: `rehearse` if its streams have moved in memory; else re-raises."""
        if MOVED not in str(error):
            raise error
        return self.rehearse(tensors, options)


def _changing(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return (*tensors, *[x for x in options.values() if isinstance(x, Tensor)])


def _is_watched(tensors: Sequence[Tensor]) -> bool:
    """Whether a dispatch mode or autograd has to see the op itself."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
