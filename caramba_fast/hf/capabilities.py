"""What a model of transformers can do, learned by trying it, and what it cannot, said before it is silently wrong."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from caramba_fast.cache import AnyLayerShape, LayerShape
from caramba_fast.hf.compat import (
    EMPTY,
    is_chunked,
    is_hybrid,
    keeps_only_tokens,
    lenders,
    stock_layers,
)
from caramba_fast.hf.packed_trial import (
    MOST_DIFFERENCE,
    dequantizations,
    padding_error,
    why_not_packed,
)
from caramba_fast.hf.probe import cannot_be_served, probe, query_rms
from caramba_fast.hf.scope import decoder_configs


class Capabilities:
    """What a model can do. Each trial, a few small forward passes, runs when its result is first asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return capabilities_of, (self.model,)  # a copy of the model is asked itself

    @property
    def model(self) -> PreTrainedModel:
        """The model, which is not kept alive."""
        model = self._model()
        assert model is not None
        return model

    # -- what it is -----------------------------------------------------------------------

    @cached_property
    def configs(self) -> list[Any]:
        """The configs whose attention can be ours."""
        return decoder_configs(self.model)

    @cached_property
    def lenders(self) -> frozenset[int]:
        """Layers whose keys and values later layers attend to as well."""
        return lenders(self._config)

    @cached_property
    def chunks(self) -> dict[int, int]:
        """Layers that attend within chunks: their index and tokens of a chunk."""
        return {
            index: int(layer.sliding_window)
            for index, layer in enumerate(stock_layers(self._config))
            if getattr(layer, "sliding_window", None) is not None
            and is_chunked(self._config, index)
        }

    @cached_property
    def max_positions(self) -> int | None:
        """The length of a table of positions (learned, or GPT-J's angles): beyond it there is none to read."""
        return _max_positions(self.model)

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    # -- what it caches -------------------------------------------------------------------

    @cached_property
    def _probed(self) -> tuple[dict[int, AnyLayerShape], int]:
        return probe(self.model)

    @property
    def shapes(self) -> dict[int, AnyLayerShape]:
        """What each layer that caches stores, by its number in the model.

        Raises:
            TypeError: its layers do not keep keys and values the way a transformers Cache does.
        """
        return self._probed[0]

    @property
    def attention_shapes(self) -> dict[int, LayerShape]:
        """Those of K and V."""
        return {i: shape for i, shape in self.shapes.items() if isinstance(shape, LayerShape)}

    @cached_property
    def places(self) -> list[int]:
        """The numbers of the layers that cache."""
        return list(self.shapes)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._probed[1]

    @cached_property
    def query_rms(self) -> dict[int, Tensor]:
        """Root mean square of the queries that meet each channel of keys, (H_kv, D), by the layer's number."""
        shapes, found = self.attention_shapes, query_rms(self.model, self.configs)
        return {
            i: rms
            for i, rms in found.items()
            if i in shapes
            and rms.shape == (shapes[i].n_kv_heads, shapes[i].k_dim // shapes[i].n_kv_heads)
        }

    def keys_query_rms(self, layer: int) -> dict[str, Tensor]:
        """Of one layer, as `LayerShape.query_rms` gives it; nothing once the model is gone and nobody has asked."""
        if "query_rms" not in self.__dict__ and self._model() is None:
            return {}
        found = self.query_rms.get(layer)
        return {} if found is None else {"k": found}

    # -- what attention over its caches can be ------------------------------------------------

    @cached_property
    def why_dense(self) -> str | None:
        """Why our attention cannot read its layers as they are stored; None if it can."""
        return why_not_packed(self.model, self.configs, self.shapes, self.lenders)

    @cached_property
    def dequantizations(self) -> int:
        """How often a prompt and a step, with the attention it has, ask a `CarambaCache` for tensors.

        Raises:
            TypeError: it has layers that are not packed.
        """
        check_cacheable(self.model)
        return dequantizations(self.model)

    def check_padding(self) -> None:
        """Raises ValueError where padding in front of a row changes what the model says of it.

        Some decoders count positions over padding, whatever mask and position ids say: ragged batches would be
        silently wrong.
        """
        if self._padding_error > MOST_DIFFERENCE:
            raise ValueError(
                f"{type(self.model).__name__} cannot take rows of different lengths at once: its positions count "
                "padding; give it one row at a time, or rows of equal length"
            )

    @cached_property
    def _padding_error(self) -> float:
        return padding_error(self.model)


_KNOWN: weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[Any], Capabilities]] = (
    weakref.WeakKeyDictionary()
)


def capabilities_of(model: PreTrainedModel) -> Capabilities:
    """`Capabilities` of a model, remembered while it lives and its embeddings keep their sizes."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    sizes = [None if end is None else end.weight.shape for end in ends]
    known = _KNOWN.get(model)
    if known is None or known[0] != sizes:
        known = _KNOWN[model] = (sizes, Capabilities(model))
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


# -- what it is refused for ------------------------------------------------------------------


def check_servable(model: Any) -> None:
    """Raises TypeError with the reason where our caches cannot serve ``model`` through the adapter."""
    reason = _reason(model)
    if reason is None and (getattr(model, "_is_stateful", False) or not _keeps_tokens(model)):
        reason = "its state is not (only) keys and values of tokens (it is recurrent or hybrid)"
    if reason:
        raise cannot_be_served(model, reason)


def _keeps_tokens(model: Any) -> bool:
    """Whether all stock layers keep keys and values of tokens and nothing else, where there are stock layers."""
    if not model._supports_default_dynamic_cache():
        return True
    layers = stock_layers(model.config.get_text_config(decoder=True))
    return all(keeps_only_tokens(layer) or isinstance(layer, EMPTY) for layer in layers)


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
    if reason:
        raise cannot_be_served(model, reason)


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
    if model.get_input_embeddings().weight.is_meta:
        return "its weights are on the meta device: load them first"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "its forward takes no past_key_values: it keeps no keys and values"
    return None


def unwrapped(model: Any) -> Any:
    """The model inside of what `torch.compile` and PEFT make; any other as it is."""
    while not isinstance(model, PreTrainedModel):
        get = getattr(model, "get_base_model", None)
        inside = get() if callable(get) else getattr(model, "_orig_mod", None)
        if inside is None or inside is model:
            break
        model = inside
    return model


def _wrapped(model: Any) -> str | None:
    """How to get at the transformers model that ``model`` wraps; None if it wraps none."""
    inside = unwrapped(model)
    if inside is not model and isinstance(inside, PreTrainedModel):
        return "model._orig_mod, or model.get_base_model()"
    for name in ("module", "model"):  # what DataParallel and a pipeline call it
        if isinstance(getattr(model, name, None), PreTrainedModel):
            return f"model.{name}"
    return None


#: Kinds of RoPE whose frequencies depend on the longest position there is.
CHANGING_ROPE = ("dynamic", "longrope")


def rope_limit(model: PreTrainedModel, kinds: Sequence[str]) -> int | None:
    """Tokens up to which a RoPE of these kinds has the same frequencies; None without one."""
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    found = [
        part.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for part in parts
        if (part.get("rope_type") or part.get("type")) in kinds
    ]
    return min(found, default=None)


def rereads_beyond(model: PreTrainedModel) -> int | None:
    """Tokens of a text beyond which a model's own `generate` reads all of it again, and turns all keys otherwise.

    Phi-3 and its like do, whose longrope has other frequencies there; None for models that do not.
    """
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    if own is GenerationMixin.prepare_inputs_for_generation:
        return None
    return rope_limit(model, ("longrope",))


def check_shortened(model: PreTrainedModel, held: Sequence[int], left: Sequence[int]) -> None:
    """Raises ValueError where cached keys are turned otherwise than those of so short a text would be.

    Args:
        held, left: tokens of each row in the cache, and those that are to stay.
    """
    same = rereads_beyond(model)
    if same is not None and 0 < max(left) <= same < max(held):
        raise ValueError(
            f"{type(model).__name__} turns all keys otherwise up to {same} tokens, and those in the cache are turned "
            f"as for {max(held)}: {max(left)} of them cannot stay; keep more than {same}, or begin anew with reset()"
        )


def check_turned_alike(model: PreTrainedModel, held: Sequence[int], new: Sequence[int]) -> None:
    """Raises ValueError where what a row says would depend on other rows, or on how its text comes in passes.

    Args:
        held, new: tokens of each row in the cache, and in this pass.
    """
    lengths, name = [a + b for a, b in zip(held, new, strict=True)], type(model).__name__
    growing = {a + b for a, b in zip(held, new, strict=True) if b}
    same = rereads_beyond(model)
    if same is not None and 0 < max(held) <= same < max(lengths):
        raise ValueError(
            f"{name} turns all keys otherwise once there are more than {same} tokens, and the {max(held)} in the cache "
            f"are turned as for fewer; give a longer prompt at once (prefill_chunk=None), or use "
            "model.generate(), which reads the text again there"
        )
    limit = rope_limit(model, CHANGING_ROPE) if same is None else None
    if limit is not None and max(growing, default=0) > limit:
        if len(growing) > 1:
            raise ValueError(
                f"{name} turns keys by the longest row from {limit} tokens on (its RoPE changes with the length): rows "
                "of different lengths have to be shorter; give it one row at a time, or rows of equal length"
            )
        every = rope_limit(model, ("dynamic",)) is not None  # else there are two ways alone
        if max(new) > 1 and max(held) and (every or max(held) < limit):
            raise ValueError(
                f"{name} turns keys by the newest token from {limit} tokens on (its RoPE changes with the length), and "
                f"{max(new)} come at once behind {max(held)} in the cache: give the text at once (prefill_chunk=None), "
                "without a draft"
            )
    config = model.config.get_text_config(decoder=True)
    tuned = getattr(config, "attn_temperature_tuning", False)
    scaled = getattr(config, "floor_scale", None) if tuned else None
    if scaled is not None and len(growing) > 1 and max(growing) >= scaled:
        raise ValueError(
            f"{name} scales attention by the longest row from {scaled} tokens on (attn_temperature_tuning): rows of "
            "different lengths have to be shorter; give it one row at a time, or rows of equal length"
        )
