"""What a model cannot do, said before it would be silently wrong.

What a model caches, found by asking it: one forward pass over three equal tokens.

Configs name sizes in many ways, and per layer in some families; the tensors a layer hands to its cache do not.
With equal tokens every layer's keys before RoPE are equal too (attention over equal values gives that value), so
the keys at positions 1 and 2 are those at position 0, turned: that tells which dims RoPE turns, and how fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import AnyLayerShape, LayerShape, StreamStatistics
from caramba_fast.config import Rotary
from caramba_fast.hf.compat import HYBRIDS, is_hybrid, keeps_only_tokens, lenders, stock_layers

ALLOWED = (
    "decoder-only causal language models that keep keys and values in a transformers Cache are"
)
#: Relative difference padding may make to logits; a position too many makes more.
MOST_PADDING_ERROR = 0.05

T = TypeVar("T")
_LINEAR_LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", object)


class PerModel(Generic[T]):
    """What was found of each model by trying it, kept while it lives and its embeddings keep their sizes."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[PreTrainedModel, tuple[list[Any], T]] = WeakKeyDictionary()

    def of(self, model: PreTrainedModel, find: Callable[[PreTrainedModel], T]) -> T:
        """What ``find`` found, the first time or again."""
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        sizes = [None if end is None else end.weight.shape for end in ends]
        known = self._found.get(model)
        if known is None or known[0] != sizes:
            known = self._found[model] = (sizes, find(model))
        return known[1]


_PADDING_ERROR = PerModel[float]()


def check_servable(model: Any) -> None:
    """Raises TypeError with the reason where our caches cannot serve ``model`` through the adapter."""
    reason = _reason(model)
    if reason is None and getattr(model, "_is_stateful", False):
        reason = "its state is not (only) keys and values of tokens (it is recurrent or hybrid)"
    _refuse(model, reason)


def check_cacheable(model: Any) -> None:
    """Raises TypeError with the reason where ``model`` has no use for a `CarambaCache`."""
    reason = _reason(model)
    if reason is None:
        layers = (
            stock_layers(model.config.get_text_config(decoder=True))
            if model._supports_default_dynamic_cache()
            else []
        )
        if not any(keeps_only_tokens(layer) or is_hybrid(layer) for layer in layers):
            kinds = (
                ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no DynamicCache"
            )
            reason = (
                "none of its layers keeps keys and values of tokens alone (it is recurrent, or brings its own cache: "
                f"{kinds}), so nothing could be packed"
            )
    _refuse(model, reason)


def _reason(model: Any) -> str | None:
    if not isinstance(model, PreTrainedModel):
        inner = _wrapped(model)
        hint = f": give us the model inside, {inner}" if inner else ""
        return f"it is no transformers PreTrainedModel{hint}"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(model.config, "add_cross_attention", False):
        return "it has cross-attention (add_cross_attention)"
    if not model.can_generate():
        return "it has no language-model head, so it cannot generate"
    if model.get_input_embeddings().weight.is_meta:
        return "its weights are on the meta device: load them first"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "its forward takes no past_key_values: it keeps no keys and values"
    return None


def _wrapped(model: Any) -> str | None:
    """How to get at the transformers model that ``model`` wraps; None if it wraps none."""
    if isinstance(getattr(model, "_orig_mod", None), PreTrainedModel):
        return "model._orig_mod, and compile it afterwards"
    get = getattr(model, "get_base_model", None)
    if callable(get) and isinstance(get(), PreTrainedModel):
        return "model.get_base_model() (adapters stay in it, and PeftModel.generate uses it)"
    if isinstance(getattr(model, "module", None), PreTrainedModel):
        return "model.module"
    return None


def _refuse(model: Any, reason: str | None) -> None:
    if reason:
        raise TypeError(f"{type(model).__name__} cannot be served: {reason}; {ALLOWED} supported")


def check_padding(model: PreTrainedModel) -> None:
    """Raises ValueError where padding in front of a row changes what the model says of it.

    Some decoders count positions over padding, whatever mask and position ids say: ragged batches would be
    silently wrong. Two small forward passes, once while the model lives.
    """
    if _PADDING_ERROR.of(model, _padding_error) > MOST_PADDING_ERROR:
        raise ValueError(
            f"{type(model).__name__} cannot take rows of different lengths at once: its positions count "
            "padding; give it one row at a time, or rows of equal length"
        )


@torch.no_grad()
def _padding_error(model: PreTrainedModel) -> float:
    embeddings: Any = model.get_input_embeddings()
    device, most = embeddings.weight.device, len(embeddings.weight)
    ids = torch.tensor([[i % most for i in (0, 0, 7, 11, 13)]], device=device)
    mask = torch.tensor([[0, 0, 1, 1, 1]], device=device)
    places = torch.tensor([[0, 0, 0, 1, 2]], device=device)
    takes = "position_ids" in inspect.signature(model.forward).parameters

    def last_logits(start: int) -> Tensor:
        options = {"position_ids": places[:, start:]} if takes else {}
        out = model(
            input_ids=ids[:, start:], attention_mask=mask[:, start:], use_cache=False, **options
        )
        return out.logits[:, -1].float()

    with evaluating(model):
        padded, alone = last_logits(0), last_logits(2)
    return float((padded - alone).norm() / alone.norm().clamp(min=1e-30))


def max_positions(model: PreTrainedModel) -> int | None:
    """The length of a table of positions (learned, or GPT-J's angles): beyond it there is none to read."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    tokens = model.get_input_embeddings()
    for module in model.modules():
        table = module.weight if isinstance(module, nn.Embedding) and module is not tokens else None
        if table is None:
            table = getattr(module, "embed_positions", None)
        if isinstance(table, Tensor) and 0 <= len(table) - longest <= 2:  # OPT keeps two in front
            return longest
    return None


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

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[int, int]:
        """The queries alone; transformers 4 gives their positions instead of their number."""
        return (len(query_length) if isinstance(query_length, torch.Tensor) else query_length), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length


class _Recording(RecordingLayer):
    """The part of `recording` that is ours."""

    def __init__(self, states: int) -> None:
        _LINEAR_LAYER.__init__(self, number_of_states=states)
        CacheLayerMixin.__init__(self)

    def lazy_initialization(self, *_: Any, **states: Any) -> None:
        """Only the linear part of a layer has states to make room for."""
        if states:
            _LINEAR_LAYER.lazy_initialization(self, **states)


_RECORDING = {stock: type(stock.__name__, (_Recording, stock), {}) for stock in HYBRIDS}


def recording(layer: Any) -> RecordingLayer:
    """A layer that keeps K and V as they come, in place of a stock ``layer`` that `is_hybrid`."""
    made: RecordingLayer = _RECORDING[type(layer)](layer.number_of_states)
    return made
