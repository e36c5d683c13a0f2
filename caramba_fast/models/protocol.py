"""What generation asks of a model.

Models whose forward pass depends on lengths the host knows must not be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from caramba_fast.cache import AnyLayerShape, ModelKVCache


@runtime_checkable
class LanguageModel(Protocol):
    """A decoder that reads and grows a `ModelKVCache`."""

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a text, or None."""

    @property
    def pad_token_id(self) -> int | None:
        """Id that fills up short rows of a batch, or None."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; logits have as many entries."""

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """What each layer caches."""

    def forward(
        self,
        query_token_ids: Tensor,
        kv_cache: ModelKVCache | None = None,
        *,
        query_lens: Sequence[int] | None = None,
        logits_index: Tensor | None = None,
    ) -> Tensor:
        """(B, T) token ids -> (B, T, V) logits, or (B, 1, V) with ``logits_index`` (B,).

        The cache holds what precedes the query tokens and is extended by them. ``query_lens``
        says how many of the T tokens of each row are real; the rest is padding at the end.
        """


def refuse_recording(device: torch.device, reason: str) -> None:
    """Raises RuntimeError with ``reason`` while a CUDA graph is recorded on this thread's stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(reason)
