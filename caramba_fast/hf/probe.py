"""Small forward passes that find out what a model caches and how large its queries are.

Configs name sizes in many ways; the tensors passed to a cache are unambiguous.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import AnyLayerShape, LayerShape
from caramba_fast.hf.compat import (
    CACHE,
    HYBRIDS,
    LinearAttentionLayer,
    is_hybrid,
    keeps_only_tokens,
    query_length,
    stock_layers,
)
from caramba_fast.hf.scope import inside, our_attention
from caramba_fast.models.query_rms import (
    FAILURES,
    SquareMeans,
    probing_ids,
    without_dropout,
)

ALLOWED = (
    "decoder-only causal language models that keep keys and values in a transformers Cache are"
)


def cannot_be_served(model: Any, reason: str) -> TypeError:
    """The TypeError for a model that is not supported, with the reason."""
    return TypeError(f"{type(model).__name__} cannot be served: {reason}; {ALLOWED} supported")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model runs without dropout and uncompiled; every module is restored on exit."""
    with torch.compiler.set_stance("force_eager"), without_dropout(model):
        yield


@torch.no_grad()
def probe(model: PreTrainedModel) -> tuple[dict[int, AnyLayerShape], int]:
    """What each caching layer of the model stores, by layer index, and the width of the logits.

    Raises TypeError if the layers do not keep keys and values the way a transformers Cache does.
    """
    cache = Cache(layers=_recording(model))
    embeddings: Any = model.get_input_embeddings()
    token = min(5, len(embeddings.weight) - 1)
    ids = torch.full((1, 3), token, dtype=torch.int64, device=embeddings.weight.device)
    try:
        with evaluating(model):
            logits = model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits
    except (ValueError, AttributeError, TypeError, NotImplementedError, IndexError) as error:
        reason = f"its layers do not work with a cache of keys and values alone ({error})"
        raise cannot_be_served(model, reason) from error
    layers: list[Any] = list(cache.layers)
    kept: dict[int, Any] = {
        i: (layer.keys, layer.values)
        for i, layer in enumerate(layers)
        if isinstance(layer, RecordingLayer) and layer.keys is not None
    }
    if not kept:
        raise cannot_be_served(model, "it stored nothing in its cache")
    for index, (k, v) in kept.items():
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != 3:
            raise cannot_be_served(
                model,
                f"layer {index} stores {tuple(k.shape)} and {tuple(v.shape)}, not (B, H, T, D) keys and values",
            )
    shapes: dict[int, AnyLayerShape] = {
        i: LayerShape(k.shape[1] * k.shape[3], v.shape[1] * v.shape[3], k.shape[1])
        for i, (k, v) in kept.items()
    }
    return shapes, int(logits.shape[-1])


def _recording(model: PreTrainedModel) -> list[Any]:
    """The layers of the model's own cache, with those of keys and values replaced by recording ones."""
    layers = stock_layers(model.config.get_text_config(decoder=True))
    return [
        RecordingLayer()
        if keeps_only_tokens(layer)
        else recording(layer)
        if is_hybrid(layer)
        else layer
        for layer in layers
    ]


class RecordingLayer(CacheLayerMixin):
    """Records the K and V that a model would store."""

    is_sliding = False

    def lazy_initialization(self, *_: Any) -> None:
        """Does nothing."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Records keys and values and returns them."""
        self.keys, self.values = key_states, value_states
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """0: nothing is cached."""
        return 0

    def get_mask_sizes(self, given: Any, *_: Any) -> tuple[int, int]:
        """Only the new tokens."""
        return query_length(given), 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4


class _Recording(RecordingLayer):
    def __init__(self, states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        CacheLayerMixin.__init__(self)

    def lazy_initialization(self, *_: Any, **states: Any) -> None:
        """Allocates states only for the linear-attention part of the layer."""
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)


_RECORDING = {stock: type(stock.__name__, (_Recording, stock), {}) for stock in HYBRIDS}


def recording(layer: Any) -> RecordingLayer:
    """A layer that records K and V, as a replacement for a stock ``layer`` that `is_hybrid`."""
    made: RecordingLayer = _RECORDING[type(layer)](layer.number_of_states)
    return made


def query_rms(model: PreTrainedModel, configs: list[Any]) -> dict[int, Tensor]:
    """RMS of the queries of each attention layer, (H_kv, D) by layer index, from one forward pass without a cache.

    ``configs`` are those whose attention can be ours, which sees the queries; other layers are left out. Empty, with a
    warning, if the model's forward pass fails without a cache.
    """
    means = SquareMeans()
    embeddings: Any = model.get_input_embeddings()
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = most if isinstance(most, int) else None
    ids = probing_ids(len(embeddings.weight), embeddings.weight.device, most)
    # Leaving inference mode enables gradients, so no_grad() comes after it.
    with torch.inference_mode(False), torch.no_grad(), evaluating(model), our_attention(configs):
        inside.queries = means.add
        try:
            model(input_ids=ids, use_cache=False)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            warnings.warn(
                f"{type(model).__name__}: a forward pass without a cache failed ({error}), so it is not known how "
                "large its queries are; 4-bit keys divide their bytes by ranges alone",
                stacklevel=2,
            )
            return {}
        finally:
            inside.queries = None
    return means.roots()
