"""QuantizedKVCache: the `KVCache` of the inferencer protocols over our caches, in any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from caramba_fast.cache import DecoupledLayerKVCache, LayerCache, LayerKVCache, ModelKVCache
from caramba_fast.config import KVCacheKind, cache_configs
from caramba_fast.infer.protocols import KVState
from caramba_fast.models.protocol import LanguageModel
from caramba_fast.models.registry import as_language_model


class QuantizedKVCache:
    """A `KVCache` that stores what it is given in any kind, over a `ModelKVCache`.

    For decoupled attention, keys are the semantic ones followed by the geometric ones.

    Args:
        model_cache: the caches of all layers; the model's forward pass extends it directly.
        dtype: of what `get_kv_states` returns.
    """

    def __init__(self, model_cache: ModelKVCache, dtype: torch.dtype = torch.float32) -> None:
        self.model_cache, self.dtype = model_cache, dtype
        self._has_stored = False

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        kind: KVCacheKind | str = "fp16",
        batch_size: int = 1,
        max_seq_len: int = 2048,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> QuantizedKVCache:
        """An empty cache for ``model``.

        Args:
            kind: a cache spec such as "q8" or "q8/q4" (`caramba_fast.config.spec`).
            options: prefill, page_size, num_pages, … of `ModelKVCache`.

        Raises:
            ValueError: an unknown kind, sizes that are not positive.
        """
        model = as_language_model(model)
        settings = {"device": model.device, **cache_configs(kind), **options}
        return cls(ModelKVCache(model.cache_layout, batch_size, max_seq_len, **settings), dtype)

    def update(self, kv_states: Sequence[KVState]) -> None:
        """Stores (B, H_kv, T, D) keys and values behind what each layer holds.

        Raises:
            ValueError: not one state a layer, shapes that do not fit, or no room; nothing was stored.
        """
        layers, before = self.model_cache.layers, self.model_cache.row_lengths
        if len(kv_states) != len(layers):
            raise ValueError(
                f"kv_states has {len(kv_states)} entries; the cache has {len(layers)} layers"
            )
        counts = {int(part.shape[-2]) for state in kv_states for part in state if part.ndim > 1}
        if len(counts) != 1:
            raise ValueError(
                f"kv_states hold {sorted(counts)} tokens; all must hold the same number"
            )
        try:
            for layer, state in zip(layers, kv_states, strict=True):
                _store(layer, KVState(*state))
        except BaseException:
            self.model_cache.restore(before)
            raise
        self._has_stored = True

    def crop(self, num_tokens_crop: int) -> None:
        """Removes the latest tokens of every row.

        Raises:
            TypeError: not an int.
            ValueError: negative, or more than `get_num_tokens`.
        """
        if type(num_tokens_crop) is not int:
            raise TypeError(f"num_tokens_crop is {num_tokens_crop!r}; an int is needed")
        held = self.get_num_tokens()
        if not 0 <= num_tokens_crop <= held:
            raise ValueError(
                f"num_tokens_crop is {num_tokens_crop}; 0 to {held} (tokens stored) is allowed"
            )
        self._has_stored = self._has_stored or held > 0
        self.model_cache.crop(num_tokens_crop)

    def get_num_tokens(self) -> int:
        """Tokens stored in every row."""
        return self.model_cache.pos

    def get_kv_states(self) -> list[KVState]:
        """Dequantized K and V of every layer; an empty list when nothing was ever stored."""
        if not self._has_stored and not self.get_num_tokens():
            return []
        states = []
        for layer in self.model_cache:
            *keys, values = layer.get(self.dtype)
            states.append(KVState(torch.cat(keys, dim=-1) if len(keys) > 1 else keys[0], values))
        return states


def _store(layer: LayerCache, state: KVState) -> None:
    keys, values = state
    if keys.ndim != 4 or values.ndim != 4:
        raise ValueError(
            f"keys and values are {tuple(keys.shape)} and {tuple(values.shape)}; "
            "(B, H_kv, T, D) is needed"
        )
    if isinstance(layer, DecoupledLayerKVCache):
        widths = [layer.k_sem.head_dim, layer.k_geo.head_dim]
        if keys.shape[-1] != sum(widths):
            raise ValueError(
                f"keys are {keys.shape[-1]} wide; {widths[0]} semantic and {widths[1]} geometric "
                "values a head are needed"
            )
        semantic, geometric = keys.split(widths, dim=-1)
        layer.append(semantic, geometric, values, will_attend=False)
    else:
        assert isinstance(layer, LayerKVCache)
        layer.append(keys, values, will_attend=False)
