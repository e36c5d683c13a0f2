"""A layer's keys and values as dense tensors, as attention over the cache would read them.

`LayerKVCache.get` reads codes. Attention also has the first tokens (sinks) and the newest (tail) in fp16, where
a cache keeps them; here they replace the values of their codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.cache import CacheTensor, LayerKVCache
from caramba_fast.ops.transform import undo_on_key, undo_on_value


def as_read(layer: LayerKVCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V (B, H_kv, pos, D) in ``dtype``, with tail and sinks; 0 past a row's length.

    A tail reaches ``residual_len`` tokens back from each query. One dense copy serves all queries of a step, so it
    is cut for the last one: with several new tokens, the earlier read some values from codes that single steps
    would read in fp16.
    """
    found = []
    for (name, stream), x in zip(layer.streams.items(), layer.get(dtype), strict=True):
        if stream.sink is not None:
            _replace(layer, name, stream, x, 0, min(stream.sink.shape[2], layer.pos), stream.sink)
        if stream.tail is not None:
            first = max(min(layer.lengths.host) - layer.residual_len, 0)
            _replace(layer, name, stream, x, first, layer.pos, stream.tail, layer.residual_len)
        found.append(x)
    return found[0], found[1]


def _replace(
    layer: LayerKVCache,
    name: str,
    stream: CacheTensor,
    x: Tensor,
    start: int,
    stop: int,
    ring: Tensor,
    back: int | None = None,
) -> None:
    """Writes what ``ring`` holds for slots start…stop into x, where rows hold tokens.

    Args:
        ring: (B, lanes, R, lane_dim) in the stored basis; slot j lies at j modulo R.
        back: only the newest ``back`` tokens of each row; None for all.
    """
    slots = torch.arange(start, stop, device=layer.device)
    exact = stream.lanes.unpack(ring[:, :, slots % ring.shape[2]].to(torch.float32))
    if name == "v":
        exact = undo_on_value(exact, stream.transform)
    else:
        exact = undo_on_key(exact, slots.expand(layer.batch_size, -1), stream.transform)
    lengths = layer.seq_lens[:, None]
    held = slots < lengths
    if back is not None:
        held &= slots >= lengths - back
    part = x[:, :, start:stop]
    part.copy_(torch.where(held[:, None, :, None], exact.to(x.dtype), part))
