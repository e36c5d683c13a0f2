"""What a model caches, found by asking it: one forward pass over three equal tokens.

Configs name sizes in many ways, and per layer in some families; the tensors a layer hands to its cache do not.
With equal tokens every layer's keys before RoPE are equal too (attention over equal values gives that value), so
the keys at positions 1 and 2 are those at position 0, turned: that tells which dims RoPE turns, and how fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import AnyLayerShape, LayerShape, StreamStatistics
from caramba_fast.config import Rotary
from caramba_fast.hf.compat import (
    HYBRIDS,
    LinearAttentionLayer,
    is_hybrid,
    keeps_only_tokens,
    query_length,
    stock_layers,
)

ALLOWED = (
    "decoder-only causal language models that keep keys and values in a transformers Cache are"
)
#: Relative error up to which turned keys count as equal: bfloat16 keeps 8 bits.
CLOSE = 0.02


def cannot_be_served(model: Any, reason: str) -> TypeError:
    """The error to raise for a model, and why."""
    return TypeError(f"{type(model).__name__} cannot be served: {reason}; {ALLOWED} supported")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and as it is written where it is compiled; leaves every module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def probe(model: PreTrainedModel) -> tuple[dict[int, AnyLayerShape], int]:
    """What each layer of the model that caches stores, by its number, and the width of the logits.

    Raises:
        TypeError: its layers do not keep keys and values the way a transformers Cache does.
    """
    cache = Cache(layers=_recording(model))
    embeddings: Any = model.get_input_embeddings()
    token = min(5, len(embeddings.weight) - 1)
    ids = torch.full((1, 3), token, dtype=torch.int64, device=embeddings.weight.device)
    try:
        with evaluating(model):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
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
    turns, biases = list(_frequencies(model)), _key_biases(model)
    shapes: dict[int, AnyLayerShape] = {
        i: _shape(k, v, turns, biases.get(i)) for i, (k, v) in kept.items()
    }
    return shapes, int(logits.shape[-1])


def _recording(model: PreTrainedModel) -> list[Any]:
    """The layers of the model's own cache; those of keys and values take note of what comes."""
    layers = stock_layers(model.config.get_text_config(decoder=True))
    return [
        RecordingLayer()
        if keeps_only_tokens(layer)
        else recording(layer)
        if is_hybrid(layer)
        else layer
        for layer in layers
    ]


def _shape(
    keys: Tensor, values: Tensor, turns: list[Tensor], bias: StreamStatistics | None
) -> LayerShape:
    heads, dim = keys.shape[1], keys.shape[3]
    rope = _rotary(keys[0].double().cpu(), turns)
    if rope is None or (bias is not None and bias.mean.shape != (heads, dim)):
        bias = None
    return LayerShape(heads * dim, heads * values.shape[3], heads, rope, bias)


# -- RoPE --------------------------------------------------------------------------------------


def _frequencies(model: PreTrainedModel) -> Iterator[Tensor]:
    """Every table of inverse frequencies the model holds, in float64."""
    seen: list[Tensor] = []
    for module in model.modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if not name.endswith("inv_freq") or "original" in name or not isinstance(value, Tensor):
                continue
            table = value.detach().double().cpu().flatten()
            if not any(torch.equal(table, other) for other in seen):
                seen.append(table)
                yield table


def _rotary(keys: Tensor, turns: list[Tensor]) -> Rotary | None:
    """The RoPE that makes keys (H, 3, D) at positions 1 and 2 of those at 0; None if none does."""
    best, least = None, CLOSE
    dim = keys.shape[-1]
    for table in turns:
        if 2 * len(table) > dim:
            continue
        for make in (Rotary.half_split, Rotary.interleaved):
            for first in sorted({0, dim - 2 * len(table)}):
                rotary = make(table.tolist(), first)
                error = _turning_error(keys, rotary)
                if error < least:
                    best, least = rotary, error
    return best


def _turning_error(keys: Tensor, rotary: Rotary) -> float:
    a, b = torch.tensor(rotary.pairs).T
    expected = keys[:, :1].repeat(1, 2, 1)
    angle = torch.tensor([[1.0], [2.0]], dtype=torch.float64) * torch.tensor(
        rotary.inv_freq, dtype=torch.float64
    )
    first, second = expected[..., a], expected[..., b]
    expected[..., a] = first * angle.cos() - second * angle.sin()
    expected[..., b] = second * angle.cos() + first * angle.sin()
    return float((expected - keys[:, 1:]).norm() / keys[:, 1:].norm().clamp(min=1e-30))


# -- biases of keys ----------------------------------------------------------------------------


def _key_biases(model: PreTrainedModel) -> dict[int, StreamStatistics]:
    """What ``k_proj.bias`` says of each layer's keys, where a norm feeds it and none follows it."""
    found = {}
    for module in model.modules():
        attention: Any = getattr(module, "self_attn", None)
        norm: Any = getattr(module, "input_layernorm", None)
        projection = getattr(attention, "k_proj", None)
        index, dim = getattr(attention, "layer_idx", None), getattr(attention, "head_dim", None)
        if not isinstance(projection, nn.Linear) or projection.bias is None:
            continue
        if not isinstance(index, int) or not isinstance(dim, int) or hasattr(attention, "k_norm"):
            continue
        if getattr(norm, "weight", None) is None or projection.bias.numel() % dim:
            continue
        weight = projection.weight.detach().float()
        moved = (weight * norm.weight.detach().float()).norm(dim=1)
        bias = projection.bias.detach().float()
        if getattr(norm, "bias", None) is not None:
            bias = bias + weight @ norm.bias.detach().float()
        found[index] = StreamStatistics.exact(bias.view(-1, dim).cpu(), moved.view(-1, dim).cpu())
    return found


class RecordingLayer(CacheLayerMixin):
    """Keeps K and V as they come: what a model would store."""

    is_sliding = False

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes note of them and returns them."""
        self.keys, self.values = key_states, value_states
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """No token precedes."""
        return 0

    def get_mask_sizes(self, given: Any, *_: Any) -> tuple[int, int]:
        """The queries alone."""
        return query_length(given), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name it had in transformers 4


class _Recording(RecordingLayer):
    """The part of `recording` that is ours."""

    def __init__(self, states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        CacheLayerMixin.__init__(self)

    def lazy_initialization(self, *_: Any, **states: Any) -> None:
        """Only the linear part of a layer has states to make room for."""
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)


_RECORDING = {stock: type(stock.__name__, (_Recording, stock), {}) for stock in HYBRIDS}


def recording(layer: Any) -> RecordingLayer:
    """A layer that keeps K and V as they come, in place of a stock ``layer`` that `is_hybrid`."""
    made: RecordingLayer = _RECORDING[type(layer)](layer.number_of_states)
    return made
