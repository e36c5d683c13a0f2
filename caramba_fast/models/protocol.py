"""LanguageModel: the protocol of models that can generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from caramba_fast.cache import AnyLayerShape, ModelKVCache


@runtime_checkable
class LanguageModel(Protocol):
    """A decoder that reads and extends a `ModelKVCache`."""

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id, or None."""

    @property
    def pad_token_id(self) -> int | None:
        """Id that pads short rows of a batch, or None."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; logits have as many entries."""

    @property
    def device(self) -> torch.device:
        """The device of the token ids."""

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """Shape of each layer's cache."""

    def forward(
        self,
        query_token_ids: Tensor,
        kv_cache: ModelKVCache | None = None,
        *,
        query_lens: Sequence[int] | None = None,
        logits_index: Tensor | None = None,
    ) -> Tensor:
        """(B, T) token ids -> (B, T, V) logits, or (B, 1, V) with ``logits_index`` (B,).

        The cache holds the tokens before the query tokens and is extended by them. ``query_lens`` is how many of the T
        tokens of each row are real; the rest is padding at the end.
        """


def refuse_recording(device: torch.device, reason: str) -> None:
    """Raises RuntimeError(``reason``) while a CUDA graph is recorded; for models that use lengths on the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(reason)
