"""Combines the partial attention of all ranks: one all-gather per layer, then an exact merge.

Each rank sends its output and lse as one byte tensor, and every rank merges what it receives in rank order
(`merge_state`), so that all ranks get bitwise the same result. An ``all_gather`` of ``n`` bytes brings ``(W - 1) n``
bytes to each of W ranks. An ``all_reduce`` of exp-weighted outputs would bring ``2 (W - 1) / W * n``, less from four
ranks on, but needs the largest lse first, which is a second, dependent collective; a decode step moves kilobytes, and
the cost of a collective is then its latency.

A rank attends over its own pages, with the calls that `placement` lists. Keys less than ``residual_len`` behind a query
are read in fp16 from a ring, whichever rank has their codes. Every rank has a complete copy of the small ring; one rank
attends to it. It is the ring of an ordinary layer cache without pages, whose codes are discarded. With a window of
``residual_len`` tokens, attention sees only keys in the ring. With per-channel quantization, the number of such tokens
differs between queries: runs of queries that read the same groups from the ring are computed one after the other, and
everything before these groups is masked as padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import LayerCache, PageAllocator, PageTable
from caramba_fast.cache.plans import LayerPlans
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.distributed.group import RankGroup
from caramba_fast.distributed.placement import PAGE_MULTIPLE, Call, Queries
from caramba_fast.ops import merge_state
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS

State = tuple[Tensor, Tensor]
LSE_BYTES = 4


def gather_and_merge(out: Tensor, lse: Tensor, group: RankGroup) -> State:
    """The attention over the keys of all ranks, bitwise the same on every rank, in the shapes and dtypes given.

    Args:
        out: (B, H_q, T, D_v) float32, float16 or bfloat16, this rank's partial output.
        lse: (B, H_q, T) float32, -inf if this rank has no key that the query sees.
    """
    if group.size == 1:
        return out, lse
    parts = group.all_gather(packed(out, lse))
    width = out.shape[-1] * out.element_size()
    outs = parts[..., :width].contiguous().view(out.dtype).float()
    lses = parts[..., width:].contiguous().view(torch.float32).squeeze(-1)
    merged, total = merge_all(outs, lses)
    return merged.to(out.dtype), total


def packed(out: Tensor, lse: Tensor) -> Tensor:
    """(B, H_q, T, bytes) uint8: the bytes of an output, followed by those of its lse."""
    parts = (out.contiguous().view(torch.uint8), lse.contiguous()[..., None].view(torch.uint8))
    return torch.cat(parts, dim=-1)


def merge_all(outs: Tensor, lses: Tensor) -> State:
    """Merges partial outputs (N, ..., T, D) with lse (N, ..., T) float32, pairwise as a binary tree."""
    while len(outs) > 1:
        half = len(outs) // 2
        out, lse = merge_state(
            outs[:half], lses[:half], outs[half : 2 * half], lses[half : 2 * half]
        )
        rest = slice(2 * half, None)
        outs, lses = torch.cat((out, outs[rest])), torch.cat((lse, lses[rest]))
    return outs[0], lses[0]


def with_extras(
    state: State,
    queries: Sequence[Tensor],
    scales: Sequence[float],
    extras: dict[str, Any],
    softcap: float,
) -> State:
    """Adds null keys and sinks (``s_aux``), which every query sees, once, after the ranks' parts are merged.

    Args:
        state: out (B, H_q, T, D_v) and lse (B, H_q, T).
        queries: (B, H_q, T, D) of each key stream; ``scales`` multiply their products with keys.
        extras: those given of ``null_...`` (H_kv, D) of each key stream in order and of v, and ``s_aux`` (H_q,).
        softcap: logit softcap, 0 for none.
    """
    out, lse = state[0].float(), state[1]
    nulls = [x for name, x in extras.items() if name.startswith("null_") and x is not None]
    if nulls:
        groups = queries[0].shape[1] // len(nulls[0])
        per_head = [x.float().repeat_interleave(groups, 0) for x in nulls]
        logits = torch.stack([
            (q.float() * key[:, None]).sum(-1) * scale
            for q, key, scale in zip(queries, per_head[:-1], scales, strict=True)
        ]).sum(0)  # fmt: skip
        logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
        out, lse = merge_state(out, lse, per_head[-1][:, None].expand_as(out).contiguous(), logits)
    s_aux = extras.get("s_aux")
    if s_aux is not None:
        sink = s_aux.float()[None, :, None].expand_as(lse).contiguous()
        out, lse = merge_state(out, lse, torch.zeros_like(out), sink)
    return out.to(state[0].dtype), lse


def default_scale(q: Tensor) -> float:
    """``1 / sqrt(D)``."""
    return 1 / math.sqrt(q.shape[-1])


def nothing(queries: Sequence[Tensor], v_dim: int) -> State:
    """The state of a rank without keys: out 0 and lse -inf."""
    q = queries[0]
    return q.new_zeros((*q.shape[:3], v_dim)), q.new_full(
        q.shape[:3], -torch.inf, dtype=torch.float32
    )


def attend_to_pages(
    cache: LayerCache, queries: Sequence[Tensor], calls: Sequence[Call], options: dict[str, Any]
) -> State:
    """Attention over the pages of this rank, ``cache``, in local slots.

    Args:
        queries: (B, H_q, T, D) of each key stream.
        calls: which queries see which keys.
        options: options of the ops other than masking.

    Returns:
        out (B, H_q, T, D_v) in the queries' dtype and lse (B, H_q, T) float32; 0 and -inf for queries without keys.
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
    if queries[0].shape[2] <= MAX_QUERY_TOKENS:
        options.pop("q_chunk", None)
    streams = cache.streams.values()
    sides = any(stream.sink is not None or stream.tail is not None for stream in streams)
    plans = _of_rows(cache, call) if sides and not call.whole else cache.plans
    out, lse = plans.attend(queries, call.seqlens, options)
    return out.reshape(*shape, -1), lse.reshape(shape)


def _of_rows(cache: LayerCache, call: Call) -> LayerPlans:
    """The layer's plans with the sinks and rings of the call's rows."""
    streams = {name: stream.select_rows(call.rows, None) for name, stream in cache.streams.items()}
    return LayerPlans(streams, cache.n_kv_heads)


#: Tokens of the ring cache's only page, which holds zeros: the smallest page (or a group with per-channel codes).
ZEROS = PAGE_MULTIPLE


class NoPages(PageTable):
    """The page table of a cache without codes.

    Writes are discarded; reads always get the same page of zeros, which no query sees.
    """

    def __init__(self, batch_size: int, pages: int, size: int, device: torch.device) -> None:
        super().__init__(batch_size, pages, size, PageAllocator(1), device)
        self._zeros = torch.zeros_like(self.tensor)

    def columns(self, longest: int) -> Tensor:  # noqa: ARG002 - there is one page, whatever the length
        """(B, pages) int32, all the page of zeros."""
        return self._zeros

    def reserve(self, held: Sequence[int], added: Sequence[int]) -> list[tuple[int, int]]:  # noqa: ARG002
        """Nothing to do, as in `shrink` and `reorder`."""
        return []

    def shrink(self, lengths: Sequence[int]) -> None:
        """Nothing to do."""

    def reorder(self, order: Sequence[int]) -> None:
        """Nothing to do."""

    def select_rows(self, rows: Sequence[int]) -> NoPages:
        """A table for the given rows."""
        return NoPages(len(rows), self.tensor.shape[1], self.page_size, self.tensor.device)


def ring_config(config: KVCacheTensorConfig) -> KVCacheTensorConfig:
    """Storage of the ring's cache: ``config`` without sinks."""
    return config.model_copy(update={"sink_len": 0})


def without_ring(config: KVCacheTensorConfig, *, sinks: bool) -> KVCacheTensorConfig:
    """Storage of the pages: ``config`` without the fp16 tail, and with or without its sinks."""
    change = {"residual_len": 0} if sinks else {"residual_len": 0, "sink_len": 0}
    return config.model_copy(update=change)


def as_ring(cache: LayerCache) -> LayerCache:
    """Turns a new paged cache of one page into one that stores only its ring."""
    assert cache.pages is not None
    for stream in cache.streams.values():
        for buffer in stream.token_buffers:
            buffer.zero_()
    rows, pages = cache.pages.tensor.shape
    cache.pages = NoPages(rows, pages, cache.pages.page_size, cache.device)
    return cache


def attend_to_ring(
    ring: LayerCache,
    queries: Sequence[Tensor],
    before: int,
    asked: Queries,
    options: dict[str, Any],
) -> State:
    """Attention over the keys that are read from the ring, those in the queries' window."""
    if asked.group > 1:
        found = _attend_to_groups(ring, queries, asked, options)
        if not before:
            ring.narrow_tails()
        return found
    reach, left = ring.residual_len - 1, asked.left
    window = (reach if left < 0 else min(reach, left), 0)
    options = {**options, "window_size": window, "return_softmax_lse": True}
    recent: Any = ring.attend_from(tuple(queries), before, options)
    return recent[0], recent[1]


def _attend_to_groups(
    ring: LayerCache, queries: Sequence[Tensor], asked: Queries, options: dict[str, Any]
) -> State:
    """`attend_to_ring` for per-channel codes: runs of queries that read the same groups of their rows."""
    assert ring.pages is not None
    start, count = np.array(asked.start), np.array(asked.count)
    first = asked.encoded(start[:, None] + np.arange(asked.tokens)).clip(min=0)
    changes = np.flatnonzero((np.diff(first) != 0).any(0)) + 1
    parts = []
    for begin, end in pairwise([0, *changes.tolist(), asked.tokens]):
        real = (count - begin).clip(0, end - begin)

        def integers(values: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(ring.device)

        given = {
            **options,
            "block_table": ring.pages.columns(ring.pos),
            "cache_leftpad": integers(first[:, begin]),
            "query_lens": integers(real) if (real < end - begin).any() else None,
            "residual_len": ring.residual_len,
            "window_size": (asked.left, 0) if asked.left >= 0 else None,
        }
        part = [q[:, :, begin:end] for q in queries]
        parts.append(ring.plans.attend(part, integers(start + begin + real), given))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
