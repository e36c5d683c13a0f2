"""Inferencers: the `Inferencer` protocol over our caches, with whole or chunked prefill, and decoding.

All rows of a batch have the same number of tokens, as the protocols require. `Generator` has ragged batches,
conversations and metrics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.kv_cache import (
    DecodeOutput,
    Inferencer,
    KVCache,
    KVState,
    PrefillOutput,
    QuantizedKVCache,
    SampleStrategy,
)
from caramba_fast.infer.sampling import sample
from caramba_fast.infer.stopping import ids_that_end
from caramba_fast.models.protocol import LanguageModel
from caramba_fast.models.registry import as_language_model

_GREEDY = GenerateConfig(temperature=0.0)


class GreedySampling:
    """Picks the most likely token."""

    def sample(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B,) int64; raises ValueError if the largest logit of a row is NaN or infinite."""
        return sample(logits, _GREEDY, None)


class RandomSampling:
    """Samples after temperature and filters.

    Args:
        temperature, top_k, top_p, min_p: as in `GenerateConfig`; temperature 0 is greedy.
        generator: random generator; None for torch's global one.

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
        """(B, V) -> (B,) int64; raises ValueError if the largest logit of a row is NaN or infinite."""
        return sample(logits, self.config, self.generator)


class CausalInferencer:
    """An `Inferencer` over a language model.

    Args:
        model: a `LanguageModel`, or what `as_language_model` wraps.

    Raises:
        TypeError: it is neither; the message lists what is missing.
    """

    def __init__(self, model: Any) -> None:
        self.model = as_language_model(model)
        self.eos_token_ids = ids_that_end(self.model)

    @torch.no_grad()
    def prefill(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | ModelKVCache,
        sample_strategy: SampleStrategy,
    ) -> PrefillOutput:
        """Processes the query in parallel and samples the token that follows it.

        Args:
            query_token_ids: (B, T) integers, the tokens that are not in the cache.
            kv_cache: a `QuantizedKVCache` (or its ModelKVCache) with the tokens before them; it is extended.
            sample_strategy: picks the next token from the last logits.

        Returns:
            ids (B, 1) and logits (B, T, V).

        Raises:
            TypeError, ValueError: wrong types or shapes, or no room; the cache is as it was.
        """
        cache, ids = self._checked(query_token_ids, kv_cache, sample_strategy)
        with cache.unchanged_by_errors(ids.shape[1]):
            logits = self._forward(ids, cache)
            return PrefillOutput(sample_strategy.sample(logits[:, -1])[:, None], logits)

    @torch.no_grad()
    def decode(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | ModelKVCache,
        max_new_tokens: int,
        sample_strategy: SampleStrategy,
    ) -> DecodeOutput:
        """Generates after the query until ``max_new_tokens``, or until every row has ended.

        The last token generated is not in the cache: it is the next call's query. Rows that end before others are
        filled with the model's pad id (else the EOS id), which is also fed.

        Args:
            query_token_ids: (B, 1) integers, the last token of each row (more, if more are not in the cache).
            max_new_tokens: 1 or more.

        Returns:
            ids (B, N) and the logits (B, N, V) they were sampled from, N ≤ max_new_tokens.

        Raises:
            TypeError, ValueError: as `prefill`. After any error the cache is as it was.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}; 1 or more is needed")
        cache, ids = self._checked(query_token_ids, kv_cache, sample_strategy)
        with cache.unchanged_by_errors(ids.shape[1] + max_new_tokens):
            return self._decode(ids, cache, max_new_tokens, sample_strategy)

    def _decode(
        self, ids: Tensor, cache: ModelKVCache, limit: int, strategy: SampleStrategy
    ) -> DecodeOutput:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        eos = torch.tensor(self.eos_token_ids, dtype=torch.int64, device=ids.device)
        tokens, scores = list[Tensor](), list[Tensor]()
        for _ in range(limit):
            scores.append(self._forward(ids, cache)[:, -1])
            live = scores[-1].masked_fill(ended[:, None], 0.0)  # an ended row may hold anything
            new = strategy.sample(live).masked_fill(ended, self._fill)
            tokens.append(new)
            ended |= torch.isin(new, eos)
            if self.eos_token_ids and bool(ended.all()):
                break
            ids = new[:, None]
        return DecodeOutput(torch.stack(tokens, dim=1), torch.stack(scores, dim=1))

    def _forward(self, ids: Tensor, cache: ModelKVCache) -> Tensor:
        """(B, T) -> (B, T, V); callers restore the cache if it fails."""
        return self.model.forward(ids, cache)

    @property
    def _fill(self) -> int:
        pad = self.model.pad_token_id
        if pad is not None and 0 <= pad < self.model.vocab_size:
            return pad
        return next(iter(self.eos_token_ids), 0)

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
    """A `CausalInferencer` that prefills at most ``chunk_size`` tokens at a time, which bounds memory.

    With a cache of ``prefill="stored"`` or kind fp32, chunks do not change the result; with "exact", only the first
    chunk attends to exact K and V. Raises ValueError if chunk_size is not positive.
    """

    def __init__(self, model: Any, chunk_size: int = 512) -> None:
        super().__init__(model)
        if type(chunk_size) is not int or chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size!r}; 1 or more is needed")
        self.chunk_size = chunk_size

    def _forward(self, ids: Tensor, cache: ModelKVCache) -> Tensor:
        parts = [self.model.forward(part, cache) for part in ids.split(self.chunk_size, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


__all__ = [
    "CausalInferencer",
    "ChunkwiseInferencer",
    "DecodeOutput",
    "GreedySampling",
    "Inferencer",
    "KVCache",
    "KVState",
    "LanguageModel",
    "PrefillOutput",
    "QuantizedKVCache",
    "RandomSampling",
    "SampleStrategy",
]
