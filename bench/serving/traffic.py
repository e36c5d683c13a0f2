"""Bytes one decode step reads and moves, by how many ranks share the heads and how many the tokens.

These formulas give the figures of docs/scaling.md; tests compare them with what real ranks pass to collectives. A step
feeds one token to every row. Bytes received are exact for the ``all_gather`` of context parallelism, and the least a
ring needs for the ``all_reduce`` of tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caramba_fast.distributed.partial_attention import LSE_BYTES
from caramba_fast.distributed.placement import PAGE_SIZE, PageSpread

#: All-reduces per block under tensor parallelism: after attention and after the MLP.
ALL_REDUCES = 2


@dataclass(frozen=True)
class StepShape:
    """The properties of a model and its cache that bytes depend on.

    Attributes:
        v_head_dim: values of one head.
        itemsize: bytes of an activation.
        token_bytes: codes and scales of one token of one layer.
        tail_tokens, tail_token_bytes: tokens read in fp16 instead, and their bytes in one layer.
        split_weights: bytes of the projections of all blocks, which tensor parallelism splits.
        whole_weights: bytes of the output layer and the norms, which every rank reads whole.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    v_head_dim: int
    itemsize: int
    token_bytes: float
    tail_tokens: int = 0
    tail_token_bytes: int = 0
    split_weights: int = 0
    whole_weights: int = 0


@dataclass(frozen=True)
class StepBytes:
    """One decode step on one rank, over all layers; ``cache_read`` is that of the rank that holds most.

    ``weights_read`` are projections, output layer and norms. ``given`` bytes are passed to ``collectives`` calls, and
    ``received`` ones come from other ranks.
    """

    cache_read: int
    weights_read: int
    given: int
    received: int
    collectives: int


def decode_step(
    shape: StepShape,
    tokens: int,
    *,
    batch: int = 1,
    tensor: int = 1,
    context: int = 1,
    page_size: int = PAGE_SIZE,
) -> StepBytes:
    """Bytes of one step over ``tensor`` * ``context`` ranks.

    ``tensor`` ranks share the heads, ``context`` ranks the tokens of each head; ``tokens`` of a row include the new
    one. Raises ValueError for kv heads that do not divide by ``tensor``, or a count below 1.
    """
    if min(tokens, batch, tensor, context) < 1:
        raise ValueError(
            f"tokens is {tokens}, batch {batch}, tensor {tensor}, context {context}; 1 or more is needed"
        )
    if shape.kv_heads % tensor:
        raise ValueError(f"{shape.kv_heads} kv heads do not divide by {tensor} ranks")
    part = partial_bytes(shape.heads // tensor, shape.v_head_dim, shape.itemsize, batch)
    reduced = batch * shape.hidden * shape.itemsize
    merges = shape.layers if context > 1 else 0
    reductions = shape.layers * ALL_REDUCES if tensor > 1 else 0
    return StepBytes(
        cache_read=round(_cache_read(shape, tokens, context, page_size) * batch / tensor),
        weights_read=shape.split_weights // tensor + shape.whole_weights,
        given=merges * part + reductions * reduced,
        received=merges * part * (context - 1) + reductions * _ring(reduced, tensor),
        collectives=merges + reductions,
    )


def partial_bytes(heads: int, v_head_dim: int, itemsize: int, queries: int) -> int:
    """Bytes of one rank's part of one layer: output and lse of ``queries`` query tokens."""
    return queries * heads * (v_head_dim * itemsize + LSE_BYTES)


def reduced_instead(shape: StepShape, context: int, batch: int = 1) -> tuple[int, int]:
    """Collectives and bytes received if the ranks' parts were summed instead of gathered.

    One all-reduce for the largest lse, another for outputs and sums of exponentials weighted with it.
    """
    if context == 1:
        return 0, 0
    part = partial_bytes(shape.heads, shape.v_head_dim, shape.itemsize, batch)
    largest = batch * shape.heads * LSE_BYTES
    received = _ring(largest, context) + _ring(part, context)
    return 2 * shape.layers, shape.layers * received


def _ring(nbytes: int, size: int) -> int:
    """Bytes each rank receives in a ring all-reduce: all but its own share, twice."""
    return 2 * (size - 1) * nbytes // size


def _cache_read(shape: StepShape, tokens: int, context: int, page_size: int) -> float:
    """Bytes of one row on the rank that reads most, over all layers and heads."""
    spread = PageSpread(tokens, context, page_size)
    tail = min(tokens, shape.tail_tokens)
    held = [int(spread.count(rank, np.array(tokens - tail))) for rank in range(context)]
    read = [count * shape.token_bytes for count in held]
    read[spread.first_rank] += tail * shape.tail_token_bytes
    return max(read) * shape.layers
