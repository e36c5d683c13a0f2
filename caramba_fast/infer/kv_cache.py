"""The protocols of the inferencer guide, and QuantizedKVCache: its `KVCache` over our caches of any kind.

Our inferencers are in `caramba_fast.infer.inferencer`; the model's protocol is `caramba_fast.models.LanguageModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from caramba_fast.cache import DecoupledLayerKVCache, LayerCache, LayerKVCache, ModelKVCache
from caramba_fast.config import KVCacheKind, cache_configs
from caramba_fast.models.protocol import LanguageModel
from caramba_fast.models.registry import as_language_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.cache.model import ModelCacheOptions


class KVState(NamedTuple):
    """Keys and values of one transformer layer.

    Attributes:
        keys: (B, H_kv, T, D).
        values: (B, H_kv, T, D_v).
    """

    keys: Tensor
    values: Tensor


class PrefillOutput(NamedTuple):
    """What `Inferencer.prefill` returns.

    Attributes:
        token_ids: (B, 1) int64, the token that follows the query.
        token_logits: (B, num_query_tokens, V); position i is what token i + 1 is sampled from.
    """

    token_ids: Tensor
    token_logits: Tensor


class DecodeOutput(NamedTuple):
    """What `Inferencer.decode` returns.

    Attributes:
        token_ids: (B, num_generated_tokens) int64.
        token_logits: (B, num_generated_tokens, V), what each of them was sampled from.
    """

    token_ids: Tensor
    token_logits: Tensor


@runtime_checkable
class SampleStrategy(Protocol):
    """Picks tokens from logits."""

    def sample(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B,) int64 token ids."""


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of all layers; every row has the same number of tokens."""

    def update(self, kv_states: Sequence[KVState]) -> None:
        """Appends keys and values, one state per layer, all of the same number of tokens."""

    def crop(self, num_tokens_crop: int) -> None:
        """Removes the latest ``num_tokens_crop`` tokens: 0 to `get_num_tokens`."""

    def get_num_tokens(self) -> int:
        """Number of tokens stored."""

    def get_kv_states(self) -> list[KVState]:
        """The stored states, one per layer; empty if nothing was ever stored."""


@runtime_checkable
class Inferencer(Protocol):
    """Processes query tokens after those of a `KVCache`, and generates."""

    def prefill(
        self, query_token_ids: Tensor, kv_cache: KVCache, sample_strategy: SampleStrategy
    ) -> PrefillOutput:
        """Processes (B, num_query_tokens) ids in parallel, extends the cache, samples one token."""

    def decode(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        max_new_tokens: int,
        sample_strategy: SampleStrategy,
    ) -> DecodeOutput:
        """Processes the tokens that are not in the cache, then generates until ``max_new_tokens`` or EOS."""


class QuantizedKVCache:
    """A `KVCache` of any kind, over a `ModelKVCache`.

    For decoupled attention, keys are the semantic ones followed by the geometric ones.

    Args:
        model_cache: the caches of all layers; the model's forward pass extends it directly.
        dtype: dtype of `get_kv_states`.
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
        **options: Unpack[ModelCacheOptions],
    ) -> QuantizedKVCache:
        """An empty cache for ``model``.

        Args:
            kind: a cache spec such as "q8" or "q8/q4" (`caramba_fast.config.spec`).
            options: prefill, page_size, num_pages, … of `ModelKVCache`.

        Raises:
            ValueError: an unknown kind, or sizes that are not positive.
        """
        model = as_language_model(model)
        settings = {"device": model.device, **cache_configs(kind), **options}
        return cls(ModelKVCache(model.cache_layout, batch_size, max_seq_len, **settings), dtype)

    def update(self, kv_states: Sequence[KVState]) -> None:
        """Stores (B, H_kv, T, D) keys and values after those of each layer.

        Raises:
            ValueError: a wrong number of states, shapes that do not fit, or no room; nothing was stored.
            TypeError: the tokens are spread over ranks.
        """
        layers = self._with_all_tokens()
        if len(kv_states) != len(layers):
            raise ValueError(
                f"kv_states has {len(kv_states)} entries; the cache has {len(layers)} layers"
            )
        counts = {int(part.shape[-2]) for state in kv_states for part in state if part.ndim > 1}
        if len(counts) != 1:
            raise ValueError(
                f"kv_states hold {sorted(counts)} tokens; all must hold the same number"
            )
        with self.model_cache.unchanged_by_errors(*counts):
            for layer, state in zip(layers, kv_states, strict=True):
                _store(layer, KVState(*state))
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
        """Number of tokens in every row."""
        return self.model_cache.pos

    def get_kv_states(self) -> list[KVState]:
        """Dequantized K and V of every layer; empty if nothing was ever stored.

        Raises TypeError if the tokens are spread over ranks.
        """
        if not self._has_stored and not self.get_num_tokens():
            return []
        states = []
        for layer in self._with_all_tokens():
            *keys, values = layer.get(self.dtype)
            states.append(KVState(torch.cat(keys, dim=-1) if len(keys) > 1 else keys[0], values))
        return states

    def _with_all_tokens(self) -> list[LayerCache]:
        layers = list(self.model_cache)
        if any(not isinstance(layer, LayerCache) for layer in layers):
            raise TypeError(
                "the tokens of this cache are spread over ranks; update and get_kv_states need one that holds all of "
                "them (prefill and decode of an inferencer do not)"
            )
        return layers


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
