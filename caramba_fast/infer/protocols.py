"""What a speculative decoder may ask of an inference engine: the protocols of the inferencer guide.

Code written against these names works with any engine that has them; ours are in
`caramba_fast.infer.inferencer`. The model's own protocol is `caramba_fast.models.LanguageModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from caramba_fast.models.protocol import LanguageModel


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


__all__ = [
    "DecodeOutput",
    "Inferencer",
    "KVCache",
    "KVState",
    "LanguageModel",
    "PrefillOutput",
    "SampleStrategy",
]
