"""A transformers ``Cache`` over our layer caches: K and V go in as they are made, and come back dense.

The model's own attention then runs on what was stored. It serves every model that calls ``cache.update``; the
dense copy lives for one layer's attention only.

A layer's keys and values as dense tensors, as attention over the cache would read them.

`LayerKVCache.get` reads codes. Attention also has the first tokens (sinks) and the newest (tail) in fp16, where
a cache keeps them; here they replace the values of their codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import CacheTensor, LayerKVCache, ModelKVCache
from caramba_fast.hf.row_layout import Frame
from caramba_fast.ops.transform import undo_on_key, undo_on_value


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
    for (name, stream), x in zip(layer.streams.items(), stored, strict=True):
        if stream.sink is not None:
            count = min(stream.sink.shape[2], layer.pos)
            place = torch.arange(count, device=layer.device).expand(layer.batch_size, -1)
            slots = (place + start[:, None]) % layer.pos  # of rows that are shorter, any
            real = place + start[:, None] < layer.seq_lens[:, None]
            _replace(x, slots, real, _values(name, stream, stream.sink, place, slots, start))
        if stream.tail is not None:
            first = max(min(layer.lengths.host) - layer.residual_len, 0)
            slots = torch.arange(first, layer.pos, device=layer.device).expand(layer.batch_size, -1)
            length = layer.seq_lens[:, None]
            real = (slots < length) & (slots >= length - layer.residual_len)
            place = slots % stream.tail.shape[2]
            _replace(x, slots, real, _values(name, stream, stream.tail, place, slots, start))
        found.append(x)
    return found[0], found[1]


def _values(
    name: str, stream: CacheTensor, ring: Tensor, place: Tensor, slots: Tensor, start: Tensor
) -> Tensor:
    """(B, H_kv, N, D) float32 in the model's basis: what ``ring`` (B, lanes, R, lane_dim) holds.

    Args:
        place: (B, N) where in the ring.
        slots: (B, N) whose tokens these are.
        start: (B,) first slot of each row.
    """
    taken = torch.take_along_dim(ring, place.to(torch.int64)[:, None, :, None], 2)
    exact = stream.lanes.unpack(taken.to(torch.float32))
    if name == "v":
        return undo_on_value(exact, stream.transform)
    return undo_on_key(exact, slots - start[:, None], stream.transform)


def _replace(x: Tensor, slots: Tensor, real: Tensor, values: Tensor) -> None:
    """Writes values (B, H, N, D) to slots (B, N) of x (B, H, S, D), where ``real`` (B, N)."""
    index = slots.to(torch.int64)[:, None, :, None]
    kept = torch.take_along_dim(x, index, 2)
    new = torch.where(real[:, None, :, None], values.to(x.dtype), kept)
    x.scatter_(2, index.expand_as(new), new)


class DenseLayer(CacheLayerMixin):
    """One layer of one forward pass.

    Args:
        store: our cache of the layer; it may hold tokens.
        frame: how rows lie in this forward pass.
        exact: on an empty cache, hand back K and V as they came, not as they are stored.
    """

    is_sliding = False  # windows are in the mask: all tokens are kept and returned

    def __init__(self, store: LayerKVCache, frame: Frame, exact: bool) -> None:
        super().__init__()
        self.store, self.frame = store, frame
        self.exact = exact and store.is_empty
        self.is_initialized = not store.is_empty

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: our cache has its memory already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T', D) keys and values and returns those of all columns."""
        frame, store = self.frame, self.store
        k, v = (frame.queries_to_end(x, 2).to(store.device) for x in (key_states, value_states))
        store.append(k, v, frame.new if frame.padded_queries else None, will_attend=False)
        if self.exact:
            return key_states, value_states
        stored = as_read(store, key_states.dtype)
        k, v = (frame.keys_to_front(x).to(key_states.device) for x in stored)
        return k, v

    def get_seq_length(self, *_: Any) -> int:
        """Columns before the queries."""
        return self.frame.past

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Columns `update` will return, and the first one's index."""
        return self.frame.total, 0

    def get_max_length(self) -> int:
        """Tokens a row can hold."""
        return self.store.max_seq_len

    get_max_cache_shape = get_max_length  # the name it had in transformers 4


class DenseCache(Cache):
    """What a model is given as ``past_key_values`` in one forward pass.

    Args:
        kv_cache: our caches, one for each index in ``places``.
        frame: how rows lie.
        places: for each of our caches, which of the model's layers it belongs to.
    """

    def __init__(self, kv_cache: ModelKVCache, frame: Frame, places: list[int]) -> None:
        exact = kv_cache.prefill == "exact"
        found: dict[int, DenseLayer] = {}
        for place, store in zip(places, kv_cache, strict=True):
            assert isinstance(store, LayerKVCache)
            found[place] = DenseLayer(store, frame, exact)
        some = found[places[0]]  # layers without K and V of their own answer about lengths
        super().__init__(layers=[found.get(i, some) for i in range(max(places) + 1)])
