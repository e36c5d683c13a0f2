"""Attention within chunks (Llama 4): a query sees the keys of its own chunk, counted from its row's first token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from caramba_fast.hf.packed_layer import CarambaLayer


def attend_in_chunks(
    layer: CarambaLayer,
    query: Tensor,
    chunk: int,
    leftpad: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of the T newest tokens, each to its own chunk.

    A chunk's start is one more beginning of a row, ``cache_leftpad`` of the op, so queries are taken together as
    long as no row enters another chunk.

    Args:
        layer: keys are not centered in it: their phases would count from the row's start.
        query: (B, H_q, T, D).
        chunk: tokens of a chunk.
        leftpad: (B,), where rows start; None for slot 0.
        options: of `LayerKVCache.attend`.

    Returns:
        (B, H_q, T, D_v).
    """
    store = layer.store
    assert store is not None
    rows = [0] * store.batch_size if leftpad is None else leftpad.tolist()
    tokens, first = query.shape[2], layer.length - query.shape[2]
    parts = []
    for begin, end in _pieces(rows, first, tokens, chunk):
        position = first + begin
        starts = [max(row + (position - row) // chunk * chunk, row) for row in rows]
        own = layer.slots_of(torch.tensor(starts, dtype=torch.int32).to(store.device))
        part = query[:, :, begin:end]
        parts.append(store.attend(part, before=tokens - end, cache_leftpad=own, **options))
    return torch.cat(parts, dim=2)


def _pieces(rows: Sequence[int], first: int, tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Stretches of the query tokens within which no row enters another chunk."""
    cuts = {0, tokens}
    for row in set(rows):
        cuts.update(range((row - first) % chunk, tokens, chunk))
    ordered = sorted(cuts)
    return list(itertools.pairwise(ordered))
