"""A transformers ``Cache`` over our layer caches: K and V go in as they are made, and come back dense.

The model's own attention then runs on what was stored. It serves every model that calls ``cache.update``; the
dense copy lives for one layer's attention only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import LayerKVCache, ModelKVCache
from caramba_fast.hf.dense import as_read
from caramba_fast.hf.frame import Frame


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


class RecordingLayer(CacheLayerMixin):
    """Keeps K and V as they come: what a model would store."""

    is_sliding = False

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes note of them and returns them."""
        self.keys, self.values = key_states, value_states
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """No token precedes."""
        return 0

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[int, int]:
        """The queries alone; transformers 4 gives their positions instead of their number."""
        return (len(query_length) if isinstance(query_length, torch.Tensor) else query_length), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length
