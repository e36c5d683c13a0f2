"""A rank's own part of an attention, by the calls a plan lists (`caramba_fast.distributed.plans`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import LayerCache
from caramba_fast.distributed.merge import State
from caramba_fast.distributed.plans import Call
from caramba_fast.ops import (
    KVView,
    decode_attention,
    decoupled_decode_attention,
    decoupled_extend_attention,
    extend_attention,
)
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS

#: By the number of key streams: for few query tokens, and for many.
OPS: dict[int, tuple[Any, Any]] = {
    1: (decode_attention, extend_attention),
    2: (decoupled_decode_attention, decoupled_extend_attention),
}


def nothing(queries: Sequence[Tensor], v_dim: int) -> State:
    """What a rank that holds no key gives: out 0 and lse -inf."""
    q = queries[0]
    return q.new_zeros((*q.shape[:3], v_dim)), q.new_full(
        q.shape[:3], -torch.inf, dtype=torch.float32
    )


def attend_to_pages(
    cache: LayerCache, queries: Sequence[Tensor], calls: Sequence[Call], options: dict[str, Any]
) -> State:
    """The queries over the pages of this rank.

    Args:
        cache: paged; what this rank holds, its rows in local slots.
        queries: (B, H_q, T, D) of each key stream.
        calls: which of them see what.
        options: those of the ops that do not say who sees what.

    Returns:
        out (B, H_q, T, D_v) in the queries' dtype and lse (B, H_q, T) float32; 0 and -inf where a query sees no key
        of this rank.
    """
    if len(calls) == 1 and calls[0].whole:
        return _run(cache, list(queries), calls[0], options)
    out, lse = nothing(queries, cache.streams["v"].head_dim)
    for call in calls:
        rows = call.rows[:, None]
        picked = [q.transpose(1, 2)[rows, call.tokens].transpose(1, 2) for q in queries]
        part, part_lse = _run(cache, picked, call, options)
        places = rows.expand_as(call.tokens).flatten(), call.tokens.flatten()
        found = part.transpose(1, 2).flatten(0, 1), part_lse.transpose(1, 2).flatten(0, 1)
        if call.kept is not None:
            places, found = tuple(p[call.kept] for p in places), tuple(x[call.kept] for x in found)  # type: ignore[assignment]
        out.transpose(1, 2)[places] = found[0]
        lse.transpose(1, 2)[places] = found[1]
    return out, lse


def _run(cache: LayerCache, queries: list[Tensor], call: Call, options: dict[str, Any]) -> State:
    """One call: queries (J, H_q, N, D)."""
    assert cache.pages is not None
    table = cache.pages.columns(call.longest)
    options = {
        **options,
        "block_table": table if call.whole else table[call.rows],
        "query_lens": call.query_lens,
        "window_size": (call.left, 0) if call.left >= 0 else None,
    }
    shape = queries[0].shape[:3]
    if not call.grows:
        queries = [q.reshape(shape[0], shape[1] * shape[2], 1, -1) for q in queries]
    few, many = OPS[len(queries)]
    extends = queries[0].shape[2] > MAX_QUERY_TOKENS
    if not extends:
        options.pop("q_chunk", None)
    views = [_of_rows(stream.view, call) for stream in cache.streams.values()]
    out, lse = (many if extends else few)(
        *queries, *views, call.seqlens, n_kv_heads=cache.n_kv_heads, return_softmax_lse=True,
        **{name: value for name, value in options.items() if value is not None},
    )  # fmt: skip
    return out.reshape(*shape, -1), lse.reshape(shape)


def _of_rows(view: KVView, call: Call) -> KVView:
    """The view with the sinks of the call's rows; pages are those of any row."""
    if view.sink is None or call.whole:
        return view
    return replace(view, sink=view.sink[call.rows])
