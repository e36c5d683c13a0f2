"""A layer's keys and values as dense tensors, as attention over the cache would read them.

`LayerKVCache.get` reads codes. Attention also has the first tokens (sinks) and the newest (tail) in fp16, where
a cache keeps them; here they replace the values of their codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.cache import CacheTensor, LayerKVCache
from caramba_fast.ops.hadamard import rotated


def as_read(
    layer: LayerKVCache, dtype: torch.dtype, cache_leftpad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """K and V (B, H_kv, pos, D) in ``dtype``, with tail and sinks; 0 past a row's length.

    A tail reaches ``residual_len`` tokens back from each query. One dense copy serves all queries of a step, so it
    is cut for the last one: with several new tokens, the earlier read some values from codes that single steps
    would read in fp16.

    Args:
        cache_leftpad: (B,) int32, leading slots that hold padding, as they were given to `append`.
    """
    found = []
    stored = layer.get(dtype, cache_leftpad)
    start = torch.zeros_like(layer.seq_lens) if cache_leftpad is None else cache_leftpad
    for stream, x in zip(layer.streams.values(), stored, strict=True):
        if stream.sink is not None:
            count = min(stream.sink.shape[2], layer.pos)
            place = torch.arange(count, device=layer.device).expand(layer.batch_size, -1)
            slots = (place + start[:, None]) % layer.pos  # of rows that are shorter, any
            real = place + start[:, None] < layer.seq_lens[:, None]
            _replace(x, slots, real, _values(stream, stream.sink, place))
        if stream.tail is not None:
            first = max(min(layer.lengths.host) - layer.residual_len - layer.group + 1, 0)
            slots = torch.arange(first, layer.pos, device=layer.device).expand(layer.batch_size, -1)
            length = layer.seq_lens[:, None]
            last = (
                slots - slots % layer.group + layer.group - 1
            )  # of its group: they leave together
            real = (slots < length) & (last >= length - layer.residual_len)
            place = slots % stream.tail.shape[2]
            _replace(x, slots, real, _values(stream, stream.tail, place))
        found.append(x)
    return found[0], found[1]


def _values(stream: CacheTensor, ring: Tensor, place: Tensor) -> Tensor:
    """(B, H_kv, N, D) float32 in the model's basis: what ``ring`` (B, lanes, R, lane_dim) holds.

    Args:
        place: (B, N) where in the ring.
    """
    taken = torch.take_along_dim(ring, place.to(torch.int64)[:, None, :, None], 2)
    exact = stream.lanes.unpack(taken.to(torch.float32))
    return rotated(exact, stream.config.rotate)


def _replace(x: Tensor, slots: Tensor, real: Tensor, values: Tensor) -> None:
    """Writes values (B, H, N, D) to slots (B, N) of x (B, H, S, D), where ``real`` (B, N)."""
    index = slots.to(torch.int64)[:, None, :, None]
    kept = torch.take_along_dim(x, index, 2)
    new = torch.where(real[:, None, :, None], values.to(x.dtype), kept)
    x.scatter_(2, index.expand_as(new), new)
