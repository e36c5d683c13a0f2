"""What a transformers model supports, found by trials, and errors for what would otherwise be silently wrong."""

from __future__ import annotations

import inspect
import sys
import weakref
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from caramba_fast.cache import AnyLayerShape, LayerShape
from caramba_fast.hf.compat import (
    CACHE,
    EMPTY,
    is_chunked,
    is_hybrid,
    keeps_only_tokens,
    lenders,
    stock_layers,
)
from caramba_fast.hf.packed_trial import (
    dequantizations,
    makes_no_windows,
    padding_error,
    why_not_packed,
)
from caramba_fast.hf.probe import cannot_be_served, probe, query_rms
from caramba_fast.hf.scope import decoder_configs


class Capabilities:
    """What a model supports. Each trial, a few small forward passes, runs when its result is first needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return capabilities_of, (self.model,)  # a copy of the model gets its own trials

    @property
    def model(self) -> PreTrainedModel:
        """The model, held by a weak reference."""
        model = self._model()
        assert model is not None
        return model

    @cached_property
    def configs(self) -> list[Any]:
        """The configs whose attention can be switched to ours."""
        return decoder_configs(self.model)

    @cached_property
    def lenders(self) -> frozenset[int]:
        """Layers whose keys and values later layers also attend to."""
        return lenders(self._config)

    @cached_property
    def chunks(self) -> dict[int, int]:
        """Layers that attend within chunks: layer index -> tokens per chunk."""
        return {
            index: int(layer.sliding_window)
            for index, layer in enumerate(stock_layers(self._config))
            if getattr(layer, "sliding_window", None) is not None
            and is_chunked(self._config, index)
        }

    @cached_property
    def max_positions(self) -> int | None:
        """The length of the table of positions (learned embeddings, or GPT-J's angles); None if there is no table."""
        return _max_positions(self.model)

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @cached_property
    def _probed(self) -> tuple[dict[int, AnyLayerShape], int]:
        return probe(self.model)

    @property
    def shapes(self) -> dict[int, AnyLayerShape]:
        """What each caching layer stores, by its index in the model.

        Raises TypeError if the layers do not keep keys and values the way a transformers Cache does.
        """
        return self._probed[0]

    @property
    def attention_shapes(self) -> dict[int, LayerShape]:
        """The entries of `shapes` that are K and V."""
        return {i: shape for i, shape in self.shapes.items() if isinstance(shape, LayerShape)}

    @cached_property
    def places(self) -> list[int]:
        """Indices of the layers that cache."""
        return list(self.shapes)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._probed[1]

    @cached_property
    def query_rms(self) -> dict[int, Tensor]:
        """Layer index -> root mean square of the queries per key channel, (H_kv, D)."""
        shapes, found = self.attention_shapes, query_rms(self.model, self.configs)
        return {
            i: rms
            for i, rms in found.items()
            if i in shapes
            and rms.shape == (shapes[i].n_kv_heads, shapes[i].k_dim // shapes[i].n_kv_heads)
        }

    def keys_query_rms(self, layer: int) -> dict[str, Tensor]:
        """`query_rms` of one layer, for `LayerShape.query_rms`; empty if the model was freed before the trial."""
        if "query_rms" not in self.__dict__ and self._model() is None:
            return {}
        found = self.query_rms.get(layer)
        return {} if found is None else {"k": found}

    @cached_property
    def why_dense(self) -> str | None:
        """Why our attention cannot read its layers packed; None if it can."""
        return why_not_packed(self.model, self.configs, self.shapes, self.lenders)

    @cached_property
    def dequantizations(self) -> int:
        """How many times a prompt and a step dequantize a `CarambaCache`; TypeError if some layers are not packed."""
        check_cacheable(self.model)
        return dequantizations(self.model)

    @cached_property
    def _windows(self) -> list[int]:
        layers = enumerate(stock_layers(self._config))
        windows = ((i, getattr(layer, "sliding_window", None)) for i, layer in layers)
        return [int(n) for i, n in windows if n is not None and i not in self.chunks]

    @cached_property
    def _forgets(self) -> bool:
        # Masks that are not made for the attention interface cannot be examined.
        return not self.configs or makes_no_windows(self.model, self.configs)

    def forgets_beyond(self, tokens: int = sys.maxsize) -> int | None:
        """Length from which its own caches drop tokens that its masks may show (Moshi), if below ``tokens``."""
        window = min(self._windows, default=tokens)
        return window if window < tokens and self._forgets else None

    def check_remembered(self, tokens: int) -> None:
        """Raises ValueError if the output of rows of ``tokens`` would depend on when its caches drop tokens."""
        window = self.forgets_beyond(tokens)
        if window is not None:
            raise ValueError(
                f"a row would have {tokens} tokens; {type(self.model).__name__} has a window of {window} in its caches "
                "and none in its masks that is known, so that a token may see more or fewer others by how many come at "
                f"once: up to {window} tokens can be served, and more by model.generate() of an accelerated model"
            )

    def check_padding(self) -> None:
        """Raises ValueError if left padding changes a row's logits, so that ragged batches would be silently wrong.

        Some decoders count positions over padding in any case, or prepend columns to the mask.
        """
        if self._padding_error:
            raise ValueError(
                f"{type(self.model).__name__} cannot take rows of different lengths at once: its positions or masks "
                "count padding; give it one row at a time, or rows of equal length"
            )

    @cached_property
    def _padding_error(self) -> float:
        return padding_error(self.model)


#: Why a model with such an adapter is not served without its wrapper.
NEEDS_WRAPPER = "one of its adapters needs the PEFT wrapper: call generate() of the PEFT model"

_Known = dict[Any, tuple[list[Any], Capabilities]]
_KNOWN: weakref.WeakKeyDictionary[PreTrainedModel, _Known] = weakref.WeakKeyDictionary()


def capabilities_of(model: PreTrainedModel) -> Capabilities:
    """`Capabilities` of a model, cached while it is alive and its embeddings keep their sizes.

    With ``assistant_early_exit`` transformers leaves out the last layers for a while, so those of each depth are kept.
    """
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    sizes = [getattr(getattr(end, "weight", None), "shape", None) for end in ends]
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    depths = _KNOWN.setdefault(model, {})
    known = depths.get(depth)
    # generate() gives an assistant with another tokenizer a head without weights for a while.
    same = known is not None and all(
        size in (None, before) for size, before in zip(sizes, known[0], strict=True)
    )
    if known is None or not same:
        known = depths[depth] = (sizes, Capabilities(model))
    return known[1]


def _max_positions(model: PreTrainedModel) -> int | None:
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


def check_servable(model: Any) -> None:
    """Raises TypeError with the reason if our caches cannot serve ``model`` through the adapter."""
    reason = _reason(model)
    if reason is None and (getattr(model, "_is_stateful", False) or not _keeps_tokens(model)):
        reason = "its state is not (only) keys and values of tokens (it is recurrent or hybrid)"
    if reason is None and getattr(model.config.get_text_config(), "cross_attention_layers", None):
        reason = "some of its layers attend to images alone (cross_attention_layers); accelerate() takes it"
    adapters = getattr(model, "peft_config", None)
    listed = adapters.values() if isinstance(adapters, dict) else ()
    if reason is None and any(getattr(x, "alora_invocation_tokens", None) for x in listed):
        # Its layers act as those of the base model until the wrapper tells them where the invocation begins.
        reason = NEEDS_WRAPPER
    if reason:
        raise cannot_be_served(model, reason)


def _keeps_tokens(model: Any) -> bool:
    """Whether all of the model's stock cache layers, if it has any, keep only K and V of tokens (or nothing)."""
    if not model._supports_default_dynamic_cache():
        return True
    layers = stock_layers(model.config.get_text_config(decoder=True))
    return all(keeps_only_tokens(layer) or isinstance(layer, EMPTY) for layer in layers)


def check_cacheable(model: Any) -> None:
    """Raises TypeError with the reason if ``model`` cannot use a `CarambaCache`."""
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
        elif selecting := sorted({type(layer).__name__ for layer in layers if _selects(layer)}):
            reason = (
                "some of its layers attend to tokens that they select or compress themselves "
                f"({', '.join(selecting)}), which our attention does not do"
            )
    if reason:
        raise cannot_be_served(model, reason)


def _selects(layer: Any) -> bool:
    """Whether a stock layer keeps more than K and V, such as an indexer's keys: it attends to what it selects."""
    plain = keeps_only_tokens(layer) or is_hybrid(layer) or isinstance(layer, EMPTY)
    return isinstance(layer, CacheLayerMixin) and not plain


def _reason(model: Any) -> str | None:
    if isinstance(model, str):
        return (
            f"it is a name: load the model first, AutoModelForCausalLM.from_pretrained({model!r})"
        )
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
    embeddings = model.get_input_embeddings()
    if embeddings.weight.is_meta:
        if hasattr(embeddings, "_hf_hook"):
            return "its embeddings are offloaded: keep them on a device (device_map=...); layers may be offloaded"
        return "its weights are on the meta device: load them first"
    if model.dtype == torch.float64:
        return "its weights are float64: model.float() makes them float32"
    if CACHE not in inspect.signature(model.forward).parameters:
        return f"its forward takes no {CACHE}: it keeps no keys and values"
    return None


def unwrapped(model: Any) -> Any:
    """The model inside `torch.compile` and PEFT wrappers; any other model unchanged."""
    while not isinstance(model, PreTrainedModel):
        get = getattr(model, "get_base_model", None)
        inside = get() if callable(get) else getattr(model, "_orig_mod", None)
        if inside is None or inside is model:
            break
        model = inside
    return model


def is_adapted(model: Any) -> bool:
    """Whether it is a PEFT wrapper around a transformers model."""
    return hasattr(model, "get_base_model") and isinstance(unwrapped(model), PreTrainedModel)


#: Kinds of PEFT adapters that are applied with the help of the wrapper.
IN_THE_WRAPPER = ("XLORA", "POLY")


def without_wrapper(model: Any) -> Any:
    """The model inside a PEFT wrapper; its layers contain the adapters.

    Raises TypeError for methods that need the wrapper, such as prompt learning.
    """
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise cannot_be_served(model, "its learned prompt is not in the model inside")
    if getattr(getattr(config, "peft_type", None), "value", None) in IN_THE_WRAPPER:
        raise cannot_be_served(model, NEEDS_WRAPPER)
    return unwrapped(model)


def _wrapped(model: Any) -> str | None:
    """An expression for the transformers model that ``model`` wraps; None if it wraps none."""
    inside = unwrapped(model)
    if inside is not model and isinstance(inside, PreTrainedModel):
        return "model._orig_mod, or model.get_base_model()"
    for name in ("module", "model"):  # its name in DataParallel and in pipelines
        if isinstance(getattr(model, name, None), PreTrainedModel):
            return f"model.{name}"
    return None
