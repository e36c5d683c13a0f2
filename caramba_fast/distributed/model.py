"""A language model whose caches, weights, or both, are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import AnyLayerShape, ModelKVCache
from caramba_fast.distributed.cache import spread_layout
from caramba_fast.distributed.context import Context
from caramba_fast.distributed.group import RankGroup
from caramba_fast.distributed.spread import PAGE_SIZE


class ParallelModel:
    """A `LanguageModel` that is another one with caches of another layout; every rank runs one.

    Args:
        model: a language model.
        layout: what each layer caches on this rank.
        group: the ranks.
    """

    #: Steps decide on the host where a token goes, and collectives go through the host.
    why_not_recorded = "the model runs on several ranks"

    def __init__(self, model: Any, layout: Sequence[AnyLayerShape], group: RankGroup) -> None:
        self.model, self.group, self._layout = model, group, list(layout)

    @property
    def eos_token_id(self) -> int | None:
        """As the model's, like all that follow."""
        return self.model.eos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids, where the model knows several."""
        eos = self.eos_token_id
        return getattr(self.model, "eos_token_ids", () if eos is None else (eos,))

    @property
    def pad_token_id(self) -> int | None:
        """Padding id, or None."""
        return self.model.pad_token_id

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        return self.model.device

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """What each layer caches on this rank."""
        return list(self._layout)

    def forward(
        self, query_token_ids: Tensor, kv_cache: ModelKVCache | None = None, **options: Any
    ) -> Tensor:
        """The model's logits, the same on every rank; arguments as in `LanguageModel.forward`.

        Raises:
            RankLostError: a rank is gone; it is named.
        """
        with self.group.guarded():
            logits: Tensor = self.model.forward(query_token_ids, kv_cache, **options)
        return logits

    __call__ = forward


def context_parallel(
    model: Any,
    group: RankGroup,
    *,
    page_size: int = PAGE_SIZE,
    rank_tokens: Sequence[int] | None = None,
) -> ParallelModel:
    """The model with caches whose tokens are spread over ranks: ``Generator(context_parallel(model, group))``.

    Every rank has the whole model and runs the same; with the same seed all draw the same tokens. What ends a run by
    the clock (``max_time``) or chooses by it (``cache_kind="auto"``) may differ between ranks and is to be left out.

    Args:
        model: a `LanguageModel`, such as the native Transformer, also after `tensor_parallel` over other ranks.
        group: the ranks.
        page_size, rank_tokens: as in `Context`.

    Raises:
        ValueError: a page size or counts that are not allowed.
    """
    context = Context(group, page_size, rank_tokens)
    return ParallelModel(model, spread_layout(model.cache_layout, context), group)
