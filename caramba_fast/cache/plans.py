"""LayerPlans: the calls of the ops that one layer cache makes, each checked and made flat once (`ops.plan`).

A plan holds for the streams it was made of. A tail that is widened, buffers that grow or move, and new constants of a
transform give a stream another view; with the first call that sees it all plans of the old ones are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.stream import CacheTensor
from caramba_fast.ops import KVView
from caramba_fast.ops.plan import CallPlan
from caramba_fast.ops.registry import Op

#: Calls of up to so many tokens have plans of their own: drafts are verified between single steps.
MOST_TOKENS = 33


class LayerPlans:
    """Plans by op and number of tokens; empty at first, and in copies and pickles."""

    def __init__(self) -> None:
        self._views: list[KVView] = []
        self._front: list[KVView] = []
        self._slots = 0
        self._plans: dict[tuple[str, int], CallPlan] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerPlans, ()

    def views(self, streams: Iterable[CacheTensor], slots: int | None = None) -> list[KVView]:
        """The views of the streams, or of their first ``slots``; the same objects while none is replaced."""
        views = [stream.view for stream in streams]
        if torch.compiler.is_compiling():  # what is made while tracing is of the trace
            return views if slots is None else [view.slice(slots) for view in views]
        if len(views) != len(self._views) or not all(map(is_, views, self._views)):
            self._views, self._slots, self._plans = views, 0, {}
        if slots is None:
            return self._views
        if slots != self._slots:
            self._slots, self._front = slots, [view.slice(slots) for view in views]
        return self._front

    def find(
        self,
        op: Op,
        tensors: Sequence[Tensor],
        views: Sequence[KVView],
        options: Mapping[str, Any],
    ) -> CallPlan | None:
        """The plan that serves a call, or None."""
        if torch.compiler.is_compiling():
            return None
        plan = self._plans.get(_name(op, tensors[0]))
        return plan if plan is not None and plan.serves(tensors, views, options) else None

    def keep(self, op: Op, first: Tensor, plan: CallPlan) -> CallPlan:
        """The plan, which is found from now on; ``first`` (B, H, T, D) is the first tensor of its call."""
        if not torch.compiler.is_compiling():
            self._plans[_name(op, first)] = plan
        return plan


def _name(op: Op, first: Tensor) -> tuple[str, int]:
    return op.name, min(first.shape[2], MOST_TOKENS) if first.ndim == 4 else 0
