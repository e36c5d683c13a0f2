"""LayerPlans: cached op calls of one layer, each checked and flattened once (`ops.plan`).

Widened tails and buffers that grow or move give a stream a new view, which invalidates the plans of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache.stream import CacheTensor
from caramba_fast.ops import KVView
from caramba_fast.ops.append import append_op, decoupled_append_op, plan_append
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS, plan_attention
from caramba_fast.ops.decode_attention import decode_op, decoupled_decode_op
from caramba_fast.ops.extend_attention import decoupled_extend_op, extend_op, window_of
from caramba_fast.ops.plan import CallPlan
from caramba_fast.ops.registry import Op

#: Most plans that a layer keeps: a server's batches have many recurring sizes.
MOST_PLANS = 64

#: Stream name -> the ``tail`` and ``sink`` to use instead of the stream's own, for calls on other rows.
Sides = Mapping[str, Mapping[str, Tensor]]
#: Start and stop of some rows of the streams' rings and sinks.
Rows = tuple[int, int]
#: The first slots, and rows; None for all.
Where = tuple[int | None, Rows | None]


class LayerOps(NamedTuple):
    """The ops of standard or decoupled layers."""

    append: Op
    decode: Op
    extend: Op


#: By the number of streams.
OPS = {
    2: LayerOps(append_op, decode_op, extend_op),
    3: LayerOps(decoupled_append_op, decoupled_decode_op, decoupled_extend_op),
}


class LayerPlans:
    """Op calls on the streams of one layer (by name, v last); the caller provides lengths and pages."""

    def __init__(self, streams: dict[str, CacheTensor], n_kv_heads: int) -> None:
        self.streams, self.n_kv_heads, self.ops = streams, n_kv_heads, OPS[len(streams)]
        self._views: list[KVView] = []
        self._front: list[KVView] = []  # the first slots of them
        self._slots = 0
        self._plans: dict[tuple[Any, ...], CallPlan] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerPlans, (self.streams, self.n_kv_heads)

    def append(
        self,
        new: Sequence[Tensor],
        start: Tensor,
        options: Mapping[str, Any],
        sides: Sides | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Writes (B, H_kv, T, D) of each stream after ``start`` (B,); options as in `ops.append_`, without None.

        The streams' rings and sinks are used, or only their ``rows``, or ``sides``.
        """
        tensors, lent = (*new, start), _lent(sides) if sides else {}
        if self.append_as_before(tensors, {**options, **lent} if lent else options, rows):
            return
        views = _with(sides, _of_rows(rows, self._current()), self.streams)
        named = dict(zip(self.streams, views, strict=True))
        plan = plan_append(self.ops.append, named, new, start, options)
        self._first(self.ops.append, plan, tensors, options, lent, (None, rows))

    def append_as_before(
        self, tensors: Sequence[Tensor], options: Mapping[str, Any], rows: Rows | None = None
    ) -> bool:
        """Runs the append and returns True if it differs from an earlier one only in tensor contents; else False."""
        plan = self._find(self.ops.append, tensors, options, (None, rows))
        if plan is None:
            return False
        if plan.replay is None:
            plan.op.call(*plan.stored, *tensors, *plan.kinds, **plan.stated, **options)
        else:
            self._again(plan, tensors, options)
        return True

    def attend(
        self,
        queries: Sequence[Tensor],
        cache_seqlens: Tensor,
        options: dict[str, Any],
        slots: int | None = None,
        sides: Sides | None = None,
        rows: Rows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out and lse over all slots, or the first ``slots``, for any number of query tokens.

        Arguments and options as in `ops.decode_attention`, or `ops.extend_attention` for more than 32 queries. The
        streams' rings and sinks are used, or only their ``rows``, or ``sides``.
        """
        extends = queries[0].shape[2] > MAX_QUERY_TOKENS
        op = self.ops.extend if extends else self.ops.decode
        options = window_of(options) if extends else options
        options = {name: value for name, value in options.items() if value is not None}
        tensors = (*queries, cache_seqlens)
        found: tuple[Tensor, Tensor]
        lent = _lent(sides) if sides else {}
        given = {**options, **lent} if lent else options
        where = (slots, rows)
        plan = self._find(op, tensors, given, where)
        if plan is None:
            views = _with(sides, _of_rows(rows, self._current(slots)), self.streams)
            named = dict(zip(self.streams, views, strict=True))
            plan = plan_attention(op, named, queries, cache_seqlens, self.n_kv_heads, options)
            found = self._first(op, plan, tensors, options, lent, where)
        elif plan.replay is None:
            found = plan.op.call(
                *queries, *plan.stored, cache_seqlens, *plan.kinds, **plan.stated, **given
            )
        else:
            found = self._again(plan, tensors, given)
        return found

    def _again(self, plan: CallPlan, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """Repeats a planned call, directly in the C++ extension if that keeps the call and nothing observes ops."""
        direct, op = plan.replay.direct, plan.op
        if direct is None or op.call is not op.overload or torch._C._len_torch_dispatch_stack():
            return plan.again(tensors, options)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return plan.again(tensors, options)
        try:
            return direct(*tensors, **{n: x for n, x in options.items() if isinstance(x, Tensor)})
        except RuntimeError as error:
            return plan.anew(error, tensors, options)

    def _first(
        self,
        op: Op,
        plan: CallPlan,
        tensors: Sequence[Tensor],
        options: Mapping[str, Any],
        lent: Mapping[str, Tensor],
        where: Where,
    ) -> Any:
        """Runs a new plan and keeps it; ``lent`` tensors may change from call to call, like options."""
        plan.stated = {name: value for name, value in plan.stated.items() if name not in lent}
        given = {**options, **lent}
        found = plan.rehearse(tensors, given)
        self._keep(op, tensors, given, where, plan)
        return found

    def _current(self, slots: int | None = None) -> list[KVView]:
        """The views of the streams, or of their first ``slots``; the same objects while none is replaced."""
        if torch.compiler.is_compiling():  # objects made while tracing belong to the trace
            views = [stream.view for stream in self.streams.values()]
            return views if slots is None else [view.slice(slots) for view in views]
        if not self._is_current():
            self._views = [stream.view for stream in self.streams.values()]
            self._slots, self._plans = 0, {}
        if slots is None:
            return self._views
        if slots != self._slots:
            self._slots, self._front = slots, [view.slice(slots) for view in self._views]
            self._plans = {name: plan for name, plan in self._plans.items() if name[1][0] is None}
        return self._front

    def _is_current(self) -> bool:
        """Whether the streams have the buffers that the plans were made for."""
        if not self._views:
            return False
        for stream, view in zip(self.streams.values(), self._views, strict=True):  # noqa: SIM110  # all() is slower
            if stream.last_view is not view:
                return False
        return True

    def _find(
        self, op: Op, tensors: Sequence[Tensor], options: Mapping[str, Any], where: Where
    ) -> CallPlan | None:
        if torch.compiler.is_compiling() or not self._is_current():
            return None
        try:
            return self._plans.get(_signature(op, tensors, options, where))
        except TypeError:  # an option that cannot be hashed: checked with every call
            return None

    def _keep(
        self,
        op: Op,
        tensors: Sequence[Tensor],
        options: Mapping[str, Any],
        where: Where,
        plan: CallPlan,
    ) -> None:
        if torch.compiler.is_compiling():
            return
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        with suppress(TypeError):
            self._plans[_signature(op, tensors, options, where)] = plan


def _lent(sides: Sides) -> dict[str, Tensor]:
    """Rings and sinks of other rows, under the names of the ops' arguments."""
    return {f"{name}_{part}": x for name, side in sides.items() for part, x in side.items()}


def _of_rows(rows: Rows | None, views: list[KVView]) -> list[KVView]:
    """The views with some rows of their rings and sinks."""
    if rows is None:
        return views
    part = slice(*rows)
    return [
        replace(
            view,
            tail=None if view.tail is None else view.tail[part],
            sink=None if view.sink is None else view.sink[part],
        )
        for view in views
    ]


def _with(sides: Sides | None, views: list[KVView], names: Iterable[str]) -> list[KVView]:
    if not sides:
        return views
    found = []
    for name, view in zip(names, views, strict=True):
        side = sides[name]
        tail, sink = side.get("tail", view.tail), side.get("sink", view.sink)
        found.append(replace(view, tail=tail, sink=sink))
    return found


def _signature(
    op: Op, tensors: Sequence[Tensor], options: Mapping[str, Any], where: Where
) -> tuple[Any, ...]:
    """Key of a plan: the op, where it works, and everything about the arguments except the contents of tensors.

    Plain loops instead of generators, because it runs twice per layer and step.
    """
    found: list[Any] = [op.name, where]
    for x in tensors:
        found += (type(x), x.shape, x.dtype, x.device)
    for name, value in options.items():
        if isinstance(value, Tensor):
            found += (name, type(value), value.shape, value.dtype, value.device)
        else:
            found += (name, type(value), value)
    return tuple(found)
