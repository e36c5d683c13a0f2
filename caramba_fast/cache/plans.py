"""LayerPlans: the calls of the ops that one layer makes, each checked and made flat once (`ops.plan`).

A plan holds for the streams it was made of. A tail that is widened and buffers that grow or move give a
stream another view; with the first call that sees it all plans of the old ones are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
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

#: Calls of up to so many tokens have plans of their own: drafts are verified between single steps.
MOST_TOKENS = 33
#: Plans a layer keeps; a server's batches have many sizes, and come back to them.
MOST_PLANS = 64

#: By stream, the ``tail`` and the ``sink`` of a view, where other rows than the streams' have them.
Sides = Mapping[str, Mapping[str, Tensor]]


class LayerOps(NamedTuple):
    """The ops of a kind of layer."""

    append: Op
    decode: Op
    extend: Op


#: By the number of streams.
OPS = {
    2: LayerOps(append_op, decode_op, extend_op),
    3: LayerOps(decoupled_append_op, decoupled_decode_op, decoupled_extend_op),
}


class LayerPlans:
    """Calls of the ops on the streams of one layer; lengths and pages are the caller's.

    Args:
        streams: by name, v last.
        n_kv_heads: kv heads stored.
    """

    def __init__(self, streams: dict[str, CacheTensor], n_kv_heads: int) -> None:
        self.streams, self.n_kv_heads, self.ops = streams, n_kv_heads, OPS[len(streams)]
        self._views: list[KVView] = []
        self._front: list[KVView] = []  # the first slots of them
        self._slots = 0
        self._plans: dict[tuple[str, int, int], CallPlan] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerPlans, (self.streams, self.n_kv_heads)

    def append(
        self,
        new: Sequence[Tensor],
        start: Tensor,
        options: Mapping[str, Any],
        sides: Sides | None = None,
    ) -> None:
        """Writes (B, H_kv, T, D) of each stream behind ``start`` (B,); options as of `ops.append_`, without None.

        Args:
            sides: rings and sinks of these rows in place of the streams' own.
        """
        tensors, views = (*new, start), self._with(sides, self._current())
        plan = self._find(self.ops.append, tensors, views, options)
        if plan is None:
            named = dict(zip(self.streams, views, strict=True))
            plan = plan_append(self.ops.append, named, new, start, options)
            if not sides:
                self._keep(self.ops.append, new[0], plan)
        plan.run(tensors, options)

    def planned_append(
        self, tensors: Sequence[Tensor], options: Mapping[str, Any]
    ) -> CallPlan | None:
        """The plan of an earlier append that differs from this one in numbers alone."""
        return self._find(self.ops.append, tensors, self._current(), options)

    def attend(
        self,
        queries: Sequence[Tensor],
        cache_seqlens: Tensor,
        options: dict[str, Any],
        slots: int | None = None,
        sides: Sides | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out and lse over what is stored, or its first ``slots``; any number of query tokens.

        Arguments and options as of `ops.decode_attention`; of `ops.extend_attention` for more than 32 queries.
        ``sides`` are rings and sinks of these rows in place of the streams' own.
        """
        extends = queries[0].shape[2] > MAX_QUERY_TOKENS
        op = self.ops.extend if extends else self.ops.decode
        options = window_of(options) if extends else options
        options = {name: value for name, value in options.items() if value is not None}
        tensors, views = (*queries, cache_seqlens), self._with(sides, self._current(slots))
        plan = self._find(op, tensors, views, options)
        if plan is None:
            named = dict(zip(self.streams, views, strict=True))
            plan = plan_attention(op, named, queries, cache_seqlens, self.n_kv_heads, options)
            if not sides:
                self._keep(op, queries[0], plan)
        found: tuple[Tensor, Tensor] = plan.run(tensors, options)
        return found

    def _current(self, slots: int | None = None) -> list[KVView]:
        """The views of the streams, or of their first ``slots``; the same objects while none is replaced."""
        views = [stream.view for stream in self.streams.values()]
        if torch.compiler.is_compiling():  # what is made while tracing is of the trace
            return views if slots is None else [view.slice(slots) for view in views]
        if not self._views or not all(map(is_, views, self._views)):
            self._views, self._slots, self._plans = views, 0, {}
        if slots is None:
            return self._views
        if slots != self._slots:
            self._slots, self._front = slots, [view.slice(slots) for view in views]
        return self._front

    def _with(self, sides: Sides | None, views: list[KVView]) -> list[KVView]:
        """Views with other rings and sinks: of one call, which is planned anew."""
        if not sides:
            return views
        named = zip(self.streams, views, strict=True)
        found = []
        for name, view in named:
            side = sides[name]
            tail, sink = side.get("tail", view.tail), side.get("sink", view.sink)
            found.append(replace(view, tail=tail, sink=sink))
        return found

    def _find(
        self, op: Op, tensors: Sequence[Tensor], views: Sequence[KVView], options: Mapping[str, Any]
    ) -> CallPlan | None:
        if torch.compiler.is_compiling():
            return None
        plan = self._plans.get(_name(op, tensors[0]))
        return plan if plan is not None and plan.serves(tensors, views, options) else None

    def _keep(self, op: Op, first: Tensor, plan: CallPlan) -> None:
        if not torch.compiler.is_compiling():
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[_name(op, first)] = plan


def _name(op: Op, first: Tensor) -> tuple[str, int, int]:
    if first.ndim != 4:
        return op.name, 0, 0
    return op.name, first.shape[0], min(first.shape[2], MOST_TOKENS)
