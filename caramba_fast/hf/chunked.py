"""Attention within chunks (Llama 4): a query sees the keys of its own chunk, counted from its row's first token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from caramba_fast.hf.packed_layer import CarambaLayer
    from caramba_fast.hf.step_cache import StepLayer


def attend_in_chunks(
    layer: CarambaLayer | StepLayer,
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
    tokens = query.shape[2]
    rows, first = layer.rows_for(tokens, leftpad)
    counts = layer.real_queries or [tokens] * len(rows)
    parts = []
    for begin, end in pieces(first, counts, tokens, chunk):
        starts = [
            r + max((f + begin) // chunk * chunk, 0) for r, f in zip(rows, first, strict=True)
        ]
        own = layer.slots_of(torch.tensor(starts, dtype=torch.int32).to(store.device))
        part = query[:, :, begin:end]
        parts.append(store.attend(part, before=tokens - end, cache_leftpad=own, **options))
    return torch.cat(parts, dim=2)


def pieces(
    first: Sequence[int], counts: Sequence[int], tokens: int, chunk: int
) -> list[tuple[int, int]]:
    """Stretches of ``tokens`` query columns within which no row enters another chunk.

    Args:
        first: which token of its row the first column is.
        counts: columns of each row that are no padding.
    """
    cuts = {0, tokens}
    for start, count in zip(first, counts, strict=True):
        cuts.update(range(-start % chunk, count, chunk))
    ordered = sorted(cuts)
    return list(itertools.pairwise(ordered))
