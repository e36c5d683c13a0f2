"""ContextModel: models called as ``model(tokens, ctx=InferContext)``, as language models.

The context gives such a model the caches; `InferContext.attend` stores K and V and attends in one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import AnyLayerShape, LayerCache, LayerShape, ModelKVCache
from caramba_fast.cache.interface import KeysAndValues
from caramba_fast.models.attention import dense_attention
from caramba_fast.models.protocol import refuse_recording
from caramba_fast.models.query_rms import with_query_rms
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.ops.options import AttendOptions


@dataclass
class InferContext:
    """Context of one forward pass.

    Attributes:
        caches: one per layer, or None: the tokens attend only to each other.
        positions: (B, T) int64 position of each token in its row.
        pos_offset: cached tokens of the longest row.
        query_lens: real tokens of each row, the rest is padding at the end; None if all are real.
        exact: a prompt on an empty cache attends to its exact K and V.
        q_chunk: query tokens that attention processes at a time; None for the op's default.
        local_window: sliding window in tokens, the query's own included; None for all.
    """

    caches: Sequence[LayerCache] | None
    positions: Tensor
    pos_offset: int = 0
    query_lens: Sequence[int] | None = None
    exact: bool = True
    q_chunk: int | None = None
    local_window: int | None = None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions]
    ) -> Tensor:
        """Appends K and V to the layer's cache and attends over all of it.

        Args:
            layer: index of the layer in ``caches``.
            q: (B, H_q, T, D); k, v: (B, H_kv, T, D), with positions applied.
            options: of `LayerKVCache.attend`, such as softmax_scale.

        Returns:
            (B, H_q, T, D_v).

        Raises:
            ValueError: an option that attention without a cache does not have; errors as in `LayerKVCache.attend`.
        """
        if self.caches is None:
            return self._without_cache(q, k, v, **options)
        cache = self.caches[layer]
        if not isinstance(cache, KeysAndValues):
            raise TypeError(f"layer {layer} has a {type(cache).__name__}; attend is for K and V")
        exact = self.exact and cache.is_empty and not options.keys() - {"softmax_scale"}
        cache.append(k, v, self.query_lens, will_attend=not exact)
        if exact:
            return self._among_new(q, k, v, options.get("softmax_scale"))
        if self.local_window is not None:
            options.setdefault("window_size", (self.local_window - 1, 0))
        if self.q_chunk is not None and q.shape[2] > max(MAX_QUERY_TOKENS, self.q_chunk):
            options.setdefault("q_chunk", self.q_chunk)
        return cache.attend(q, **options)

    def _without_cache(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions]
    ) -> Tensor:
        left, right = options.pop("window_size", None) or (-1, -1)
        scale = options.pop("softmax_scale", None)
        options.pop("q_chunk", None)  # changes no result
        others = [name for name, value in options.items() if value is not None]
        others += ["window_size"] if right not in (-1, 0) else []
        if others:
            raise ValueError(
                f"{', '.join(others)}: attention without a cache has a softmax_scale and a window_size=(n, 0); give "
                "the model a kv_cache"
            )
        windows = [n for n in (self.local_window, left + 1 if left >= 0 else None) if n is not None]
        return dense_attention(q, k, v, window=min(windows, default=None), scale=scale)

    def _among_new(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return dense_attention(q, k, v, window=self.local_window, scale=scale)


class ContextModel(nn.Module):
    """A model called as ``model(tokens, ctx=InferContext)``, as a `LanguageModel`.

    Arguments left out are taken from attributes of the same name of the model or its ``config``.

    Args:
        model: maps tokens (B, T) and a context to logits (B, T, V).
        cache_layout: cache shapes of its layers.
        vocab_size: number of token ids.
        eos_token_id, pad_token_id: ids, or None.
        q_chunk, local_window: as in `InferContext`.

    Raises:
        TypeError: it takes no ``ctx``, or cache_layout or vocab_size is missing.
        ValueError: q_chunk or local_window below 1.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        cache_layout: Sequence[AnyLayerShape] | None = None,
        vocab_size: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        *,
        q_chunk: int | None = None,
        local_window: int | None = None,
    ) -> None:
        super().__init__()
        if not takes_context(model):
            raise TypeError(f"{type(model).__name__} cannot be called as model(tokens, ctx=...)")
        for name, value in (("q_chunk", q_chunk), ("local_window", local_window)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; 1 or more is allowed")
        self.model = model
        layout = cache_layout or _found(model, "cache_layout")
        size = vocab_size or _found(model, "vocab_size")
        missing = [n for n, x in (("cache_layout", layout), ("vocab_size", size)) if not x]
        if missing:
            raise TypeError(
                f"{type(model).__name__} lacks {', '.join(missing)}: give them to ContextModel, or as "
                "attributes of the model (cache_layout: one caramba_fast.cache.LayerShape a layer)"
            )
        self._layout: list[AnyLayerShape] = list(layout)
        self.vocab_size = int(size)
        self.eos_token_id = _first(eos_token_id, _found(model, "eos_token_id"))
        self.pad_token_id = _first(pad_token_id, _found(model, "pad_token_id"))
        self.q_chunk, self.local_window = q_chunk, local_window

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """Shape of each layer's cache."""
        return with_query_rms(self, self._layout)

    @property
    def device(self) -> torch.device:
        """Device of the weights, else the model's ``device``, else the CPU."""
        weight = next(self.parameters(), None)
        given = weight.device if weight is not None else _found(self.model, "device")
        return torch.device(given or "cpu")

    @property
    def why_not_recorded(self) -> str:
        """Why a decode step cannot be replayed as a CUDA graph."""
        return "a model with a context is told lengths on the host, which a graph would keep"

    def forward(
        self,
        query_token_ids: Tensor,
        kv_cache: ModelKVCache | None = None,
        *,
        query_lens: Sequence[int] | None = None,
        logits_index: Tensor | None = None,
    ) -> Tensor:
        """(B, T) ids -> (B, T, V) logits, or (B, 1, V) with ``logits_index``, as in `LanguageModel`."""
        batch, length = query_token_ids.shape
        steps = torch.arange(length, device=query_token_ids.device).expand(batch, length)
        refuse_recording(self.device, self.why_not_recorded)
        settings: dict[str, Any] = {"q_chunk": self.q_chunk, "local_window": self.local_window}
        if kv_cache is None:
            context = InferContext(None, steps, **settings)
        else:
            context = InferContext(
                kv_cache.layers, kv_cache.seq_lens[:, None] + steps, kv_cache.pos, query_lens,
                exact=kv_cache.prefill == "exact", **settings,
            )  # fmt: skip
        logits = self.model(query_token_ids, ctx=context)
        if logits_index is None:
            return logits
        return logits[torch.arange(batch, device=logits.device), logits_index][:, None]


def takes_context(model: Any) -> bool:
    """Whether ``model`` can be called with ``ctx=``."""
    if not callable(model) or isinstance(model, type):
        return False
    called = model.forward if isinstance(model, nn.Module) else model
    try:
        return "ctx" in inspect.signature(called).parameters
    except (TypeError, ValueError):
        return False


def _found(model: Any, name: str) -> Any:
    value = getattr(model, name, None)
    return value if value is not None else getattr(getattr(model, "config", None), name, None)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


__all__ = ["ContextModel", "InferContext", "LayerShape"]
