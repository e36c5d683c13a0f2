"""The inferencer protocols over our caches: whole or chunk-wise prefill, decoding, quantized K and V.

Rows of a batch move together here, as the protocols have it: one number of tokens for all of them.
Ragged batches, conversations and metrics are the `Generator`'s.

What a speculative decoder may ask of an inference engine: the protocols of the inferencer guide.

Code written against these names works with any engine that has them; ours are in
`caramba_fast.infer.inferencer`. The model's own protocol is `caramba_fast.models.LanguageModel`.

QuantizedKVCache: the `KVCache` of the inferencer protocols over our caches, in any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from caramba_fast.cache import DecoupledLayerKVCache, LayerCache, LayerKVCache, ModelKVCache
from caramba_fast.config import KVCacheKind, cache_configs
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.sampling import sample
from caramba_fast.models.protocol import LanguageModel
from caramba_fast.models.registry import as_language_model


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
    """Keys and values of all layers, of which every row holds the same number of tokens."""

    def update(self, kv_states: Sequence[KVState]) -> None:
        """Appends new keys and values, one state a layer, all of the same number of tokens."""

    def crop(self, num_tokens_crop: int) -> None:
        """Removes the latest ``num_tokens_crop`` tokens: 0 to `get_num_tokens`."""

    def get_num_tokens(self) -> int:
        """Tokens stored."""

    def get_kv_states(self) -> list[KVState]:
        """What is stored, one state a layer; an empty list when nothing ever was."""


@runtime_checkable
class Inferencer(Protocol):
    """Processes query tokens behind what a `KVCache` holds, and generates."""

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
        """Processes the tokens the cache lacks, then generates until ``max_new_tokens`` or EOS."""


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


_GREEDY = GenerateConfig(temperature=0.0)


class GreedySampling:
    """The likeliest token."""

    def sample(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B,) int64; raises ValueError where a row's logits are not finite."""
        return sample(logits, _GREEDY, None)


class RandomSampling:
    """A token by its probability, after temperature and filters.

    Args:
        temperature, top_k, top_p, min_p: as in `GenerateConfig`, which checks them; temperature 0 is greedy.
        generator: draws; None takes torch's global one.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        given: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        given = {name: value for name, value in given.items() if value is not None}
        self.config = GenerateConfig(temperature=temperature, **given)
        self.generator = generator

    def sample(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B,) int64; raises ValueError where a row's logits are not finite."""
        return sample(logits, self.config, self.generator)


class CausalInferencer:
    """An `Inferencer` that hands the tokens to a language model.

    Args:
        model: a `LanguageModel`, or what `as_language_model` makes one of.

    Raises:
        TypeError: it is neither; the message lists what is missing.
    """

    def __init__(self, model: Any) -> None:
        self.model = as_language_model(model)
        self.eos_token_ids = _eos_ids(self.model)

    @torch.no_grad()
    def prefill(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | ModelKVCache,
        sample_strategy: SampleStrategy,
    ) -> PrefillOutput:
        """Processes the query in parallel and samples the token that follows it.

        Args:
            query_token_ids: (B, T) integers, the tokens the cache lacks.
            kv_cache: a `QuantizedKVCache` (or its ModelKVCache) that holds what precedes them, and is extended
                by them.
            sample_strategy: picks the next token from the last logits.

        Returns:
            ids (B, 1) and logits (B, T, V).

        Raises:
            TypeError, ValueError: wrong types or shapes, or no room; the cache is as it was.
        """
        cache, ids = self._checked(query_token_ids, kv_cache, sample_strategy)
        before = cache.row_lengths
        try:
            logits = self._forward(ids, cache)
            return PrefillOutput(sample_strategy.sample(logits[:, -1])[:, None], logits)
        except BaseException:
            cache.restore(before)
            raise

    @torch.no_grad()
    def decode(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | ModelKVCache,
        max_new_tokens: int,
        sample_strategy: SampleStrategy,
    ) -> DecodeOutput:
        """Generates behind the query until ``max_new_tokens`` or the end of every row.

        The last token generated is not in the cache: it is the next call's query. Rows that ended
        before others hold the model's pad id (else the EOS id), and are fed it.

        Args:
            query_token_ids: (B, 1) integers, the last token of each row (more, if the cache lacks more).
            max_new_tokens: 1 or more.

        Returns:
            ids (B, N) and the logits (B, N, V) they were sampled from, N ≤ max_new_tokens.

        Raises:
            TypeError, ValueError: as `prefill`; an error on the way leaves the cache as it was before.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}; 1 or more is needed")
        cache, ids = self._checked(query_token_ids, kv_cache, sample_strategy)
        before = cache.row_lengths
        try:
            return self._decode(ids, cache, max_new_tokens, sample_strategy)
        except BaseException:
            cache.restore(before)
            raise

    def _decode(
        self, ids: Tensor, cache: ModelKVCache, limit: int, strategy: SampleStrategy
    ) -> DecodeOutput:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        eos = torch.tensor(self.eos_token_ids, dtype=torch.int64, device=ids.device)
        tokens, scores = list[Tensor](), list[Tensor]()
        for _ in range(limit):
            scores.append(self._forward(ids, cache)[:, -1])
            live = scores[-1].masked_fill(
                ended[:, None], 0.0
            )  # behind its end a row may be anything
            new = strategy.sample(live).masked_fill(ended, self._fill)
            tokens.append(new)
            ended |= torch.isin(new, eos)
            if self.eos_token_ids and bool(ended.all()):
                break
            ids = new[:, None]
        return DecodeOutput(torch.stack(tokens, dim=1), torch.stack(scores, dim=1))

    def _forward(self, ids: Tensor, cache: ModelKVCache) -> Tensor:
        """(B, T) -> (B, T, V); if it fails, the cache is as it was."""
        before = cache.row_lengths
        try:
            return self.model.forward(ids, cache)
        except BaseException:
            cache.restore(before)
            raise

    @property
    def _fill(self) -> int:
        pad = self.model.pad_token_id
        return pad if pad is not None and pad >= 0 else next(iter(self.eos_token_ids), 0)

    def _checked(
        self, ids: Tensor, kv_cache: object, strategy: object
    ) -> tuple[ModelKVCache, Tensor]:
        cache = kv_cache.model_cache if isinstance(kv_cache, QuantizedKVCache) else kv_cache
        if not isinstance(cache, ModelKVCache):
            raise TypeError(
                f"kv_cache is a {type(kv_cache).__name__}; a QuantizedKVCache or ModelKVCache is needed"
            )
        if not isinstance(strategy, SampleStrategy):
            raise TypeError(
                f"sample_strategy is {strategy!r}; GreedySampling(), RandomSampling(...) or an object "
                "with sample(logits) is needed"
            )
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError("query_token_ids must be a (B, T) integer tensor")
        if ids.ndim != 2 or ids.shape[0] != cache.batch_size or ids.shape[1] < 1:
            raise ValueError(
                f"query_token_ids has shape {tuple(ids.shape)}; ({cache.batch_size}, T) with T >= 1 "
                "is needed"
            )
        return cache, ids.to(device=self.model.device, dtype=torch.int64)


class ChunkwiseInferencer(CausalInferencer):
    """A `CausalInferencer` whose prefill feeds at most ``chunk_size`` tokens at a time.

    It bounds what a long prompt needs beside the cache. With a cache of ``prefill="stored"``, or one of
    kind fp32, chunks do not change the result; with "exact", only the first chunk attends to exact K and V.

    Raises:
        ValueError: chunk_size is not positive.
    """

    def __init__(self, model: Any, chunk_size: int = 512) -> None:
        super().__init__(model)
        if type(chunk_size) is not int or chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size!r}; 1 or more is needed")
        self.chunk_size = chunk_size

    def _forward(self, ids: Tensor, cache: ModelKVCache) -> Tensor:
        before = cache.row_lengths
        try:
            parts = [self.model.forward(part, cache) for part in ids.split(self.chunk_size, dim=1)]
        except BaseException:
            cache.restore(before)
            raise
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _eos_ids(model: LanguageModel) -> tuple[int, ...]:
    found = getattr(model, "eos_token_ids", None)
    if found is None:
        try:
            found = model.eos_token_id
        except ValueError:  # some models raise where others say None
            return ()
    return (found,) if isinstance(found, int) else tuple(found or ())


__all__ = [
    "CausalInferencer",
    "ChunkwiseInferencer",
    "GreedySampling",
    "QuantizedKVCache",
    "RandomSampling",
]
