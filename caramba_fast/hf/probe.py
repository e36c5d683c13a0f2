"""What a model caches, found by asking it: one forward pass over three equal tokens.

Configs name sizes in many ways, and per layer in some families; the tensors a layer hands to its cache do not.
With equal tokens every layer's keys before RoPE are equal too (attention over equal values gives that value), so
the keys at positions 1 and 2 are those at position 0, turned: that tells which dims RoPE turns, and how fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.cache import AnyLayerShape, LayerShape, StreamStatistics
from caramba_fast.config import Rotary
from caramba_fast.hf.cache import RecordingLayer
from caramba_fast.hf.checks import ALLOWED, PerModel, evaluating, max_positions
from caramba_fast.hf.compat import is_hybrid, keeps_only_tokens, lenders, stock_layers
from caramba_fast.hf.hybrid_layer import recording

#: Relative error up to which turned keys count as equal: bfloat16 keeps 8 bits.
CLOSE = 0.02


@dataclass(frozen=True)
class Findings:
    """What the probe found.

    Attributes:
        shapes: what each caching layer caches.
        places: which of the model's layers those are.
        vocab_size: width of the logits.
        max_positions: tokens a row can have, where positions come from a table; None for no such limit.
        lenders: layers of the model whose keys and values later layers attend to as well.
    """

    shapes: list[AnyLayerShape]
    places: list[int]
    vocab_size: int
    max_positions: int | None
    lenders: frozenset[int] = frozenset()


_FOUND = PerModel[Findings]()


def probe(model: PreTrainedModel) -> Findings:
    """`Findings` of ``model``, remembered while it lives and its embeddings keep their sizes.

    Raises:
        TypeError: its layers do not keep keys and values the way a transformers Cache does.
    """
    return _FOUND.of(model, _probe)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Findings:
    cache = Cache(layers=_recording(model))
    embeddings: Any = model.get_input_embeddings()
    token = min(5, len(embeddings.weight) - 1)
    ids = torch.full((1, 3), token, dtype=torch.int64, device=embeddings.weight.device)
    try:
        with evaluating(model):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    except (ValueError, AttributeError, TypeError, NotImplementedError, IndexError) as error:
        raise TypeError(
            f"{type(model).__name__} cannot be served: its layers do not work with a cache of keys "
            f"and values alone ({error}); {ALLOWED} supported"
        ) from error
    layers: list[Any] = list(cache.layers)
    kept: list[tuple[int, Any]] = [
        (i, layer)
        for i, layer in enumerate(layers)
        if isinstance(layer, RecordingLayer) and layer.keys is not None
    ]
    if not kept:
        raise TypeError(
            f"{type(model).__name__} cannot be served: it stored nothing in its cache; {ALLOWED} supported"
        )
    _check_tensors(model, kept)
    turns, biases = list(_frequencies(model)), _key_biases(model)
    shapes: list[AnyLayerShape] = [
        _shape(i, layer.keys, layer.values, turns, biases) for i, layer in kept
    ]
    places, config = [i for i, _ in kept], model.config.get_text_config(decoder=True)
    return Findings(shapes, places, int(logits.shape[-1]), max_positions(model), lenders(config))


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


def _check_tensors(model: PreTrainedModel, kept: list[tuple[int, Any]]) -> None:
    for index, layer in kept:
        k, v = layer.keys, layer.values
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != 3:
            raise TypeError(
                f"{type(model).__name__} cannot be served: layer {index} stores {tuple(k.shape)} and "
                f"{tuple(v.shape)}, not (B, H, T, D) keys and values; {ALLOWED} supported"
            )


def _shape(
    index: int,
    keys: Tensor,
    values: Tensor,
    turns: list[Tensor],
    biases: dict[int, StreamStatistics],
) -> LayerShape:
    heads, dim = keys.shape[1], keys.shape[3]
    rope = _rotary(keys[0].double().cpu(), turns)
    bias = biases.get(index)
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
