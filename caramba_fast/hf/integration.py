"""accelerate, restore and register: our cache and attention in plain ``model.generate()``."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import AttentionMaskInterface

from caramba_fast.hf import rotary
from caramba_fast.hf.attention import caramba_attention
from caramba_fast.hf.capabilities import check_cacheable, unwrapped
from caramba_fast.hf.changing_rope import rereads_beyond
from caramba_fast.hf.compat import CACHE, CROP_REMOVES
from caramba_fast.hf.masks import caramba_mask
from caramba_fast.hf.packed_cache import CarambaCache, StoringCache, expect
from caramba_fast.hf.packed_trial import is_compiled
from caramba_fast.hf.scope import NAME, decoder_configs, implementation, set_implementation
from caramba_fast.hf.settings import FIELDS, CacheArgument, CacheSettings, StorageOptions
from caramba_fast.hf.static_cache import CarambaStaticCache
from caramba_fast.infer.cache_choice import chosen_cache
from caramba_fast.infer.options import PolicyOptions
from caramba_fast.infer.policy_fields import CachePolicyFields

if TYPE_CHECKING:
    from typing_extensions import Unpack

SIZES = ("max_seq_len", "batch_size")
MEASURING = ("calibration_ids", "recall", "seed")
#: Options used only with ``cache="auto"``.
POLICY_OPTIONS = (*SIZES, *MEASURING, *CachePolicyFields.model_fields)


class AccelerateOptions(StorageOptions, PolicyOptions, total=False):
    """Options of `accelerate`: those of the cache and, with ``cache="auto"``, of `caramba_fast.choose_cache`."""

    max_seq_len: int
    batch_size: int
    calibration_ids: Tensor | Sequence[int] | None
    recall: Any
    seed: int


#: Options of the cache itself, passed on to the chosen cache.
KEPT = ("prefill",)


def cache_by_policy(model: PreTrainedModel, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The spec that the policy chooses, and the remaining options, which are for the cache; errors as `choose_cache`.

    Besides options of the policy, ``max_seq_len`` defaults to the model's ``max_position_embeddings``, at most 4096,
    and ``batch_size`` to 1.
    """
    from caramba_fast.hf.adapter import HuggingFaceModel  # noqa: PLC0415 - only this needs it

    kept = {name: value for name, value in options.items() if name not in POLICY_OPTIONS}
    fields = {name: options[name] for name in CachePolicyFields.model_fields if name in options}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    sizes: dict[str, Any] = {"max_seq_len": min(int(longest), 4096), "batch_size": 1}
    sizes.update({name: options[name] for name in SIZES if name in options})
    more: dict[str, Any] = {name: kept[name] for name in KEPT if name in kept}
    more.update({name: options[name] for name in MEASURING if name in options})
    more["fields"] = {name: kept[name] for name in FIELDS if name in kept}
    settings = CachePolicyFields(**fields)
    return chosen_cache(HuggingFaceModel(model), settings, **sizes, **more).spec, kept


def register() -> str:
    """Registers ``attn_implementation="caramba_fast"`` with transformers and returns that name. Idempotent.

    The mask function is registered with the attention: without one of the same name, transformers would pass no masks,
    and padding and windows would silently be ignored.
    """
    AttentionInterface.register(NAME, caramba_attention)
    AttentionMaskInterface.register(NAME, caramba_mask)
    return NAME


ATTRIBUTE = "_caramba_fast"
HOOK, INPUTS = "_prepare_cache_for_generation", "prepare_inputs_for_generation"
#: Values of ``cache_implementation`` for which a call gets our cache.
OURS_FOR = (None, "dynamic", "offloaded", "static")

M = TypeVar("M")


@dataclass
class Accelerated:
    """State that `accelerate` attaches to a model.

    Attributes:
        settings: how the cache is stored.
        implementations: the configs whose attention was changed, with the previous implementation.
        fused: the modules whose RoPE was replaced by one fused op.
    """

    settings: CacheSettings
    implementations: list[tuple[Any, str]]
    fused: list[str]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Registers our attention, which the configs of an unpickled model name and this process may not know yet."""
        register()
        vars(self).update(fused=[])  # missing in old pickles
        vars(self).update(state)


def accelerate(model: M, cache: CacheArgument = "q4", **options: Unpack[AccelerateOptions]) -> M:
    """Makes ``model.generate()`` use a quantized cache, which fused attention reads without dequantizing it first.

    Args:
        model: a decoder-only transformers model, possibly wrapped by PEFT or `torch.compile`. The inner model is
            changed in place (its weights are not); `restore` undoes that. A second call replaces the settings.
        cache: "q4", "q8", "q8/q4" (K/V), dict(k="q8", v="q4"), …, or "auto" for the fastest one that passes the
            quality gates (`caramba_fast.policy`).
        options: prefill, and fields of `KVCacheTensorConfig`; with "auto" also those of
            `caramba_fast.choose_cache`: max_seq_len, batch_size, quality gates, ….

    Returns:
        The model.

    Raises:
        TypeError: the model cannot be served (encoder-decoder, no cache, …); the message says why.
        ValueError: unknown kind or option. After any error the model is unchanged.
    """
    inside: PreTrainedModel = unwrapped(model)
    check_cacheable(inside)
    given: dict[str, Any] = {**options}
    if cache == "auto":
        cache, given = cache_by_policy(inside, given)
    wrong = sorted(set(given) & set(POLICY_OPTIONS))
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: only of use with cache='auto', it is {cache!r}")
    settings = CacheSettings.of(cache, **given)
    before = restore(inside)
    try:
        _install(inside, settings)
    except BaseException:
        restore(inside)
        if before is not None:
            _install(inside, before)
        raise
    if getattr(inside.generation_config, "use_cache", None) is False:
        warnings.warn(
            "model.generation_config.use_cache is False: generate() keeps no cache, and ours is not used",
            stacklevel=2,
        )
    return model


#: Accelerated models. Several may share a config, which keeps our attention until the last of them is restored.
_ACCELERATED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def _install(model: PreTrainedModel, settings: CacheSettings) -> None:
    setattr(model, ATTRIBUTE, Accelerated(settings, _implementations(model), rotary.fuse(model)))
    # not a bound method: pickle would look that up on the model before the attribute exists
    setattr(model, HOOK, functools.partial(_prepare_cache, model))
    if rereads_beyond(model) is not None:
        setattr(model, INPUTS, functools.partial(_prepare_inputs, model))
    _use_our_attention(model)
    _ACCELERATED.add(model)


def restore(model: Any) -> CacheSettings | None:
    """Undoes `accelerate`; returns the settings the model had, or None if it was not accelerated."""
    model = unwrapped(model)
    state: Accelerated | None = vars(model).get(ATTRIBUTE)
    if state is None:
        return None
    _ACCELERATED.discard(model)
    shared = _shared_configs()
    for config, name in state.implementations:
        if id(config) not in shared:
            set_implementation(config, name)
    others: list[Accelerated] = [vars(other)[ATTRIBUTE] for other in _ACCELERATED]
    rotary.unfuse(rotary.fused().difference(*(other.fused for other in others)))
    vars(model).pop(HOOK, None)
    vars(model).pop(INPUTS, None)
    delattr(model, ATTRIBUTE)
    return state.settings


def _shared_configs() -> dict[int, str]:
    """Ids of the configs of accelerated models -> the attention each had before any of the models was accelerated."""
    states: list[Accelerated] = [vars(model)[ATTRIBUTE] for model in _ACCELERATED]
    return {id(config): name for state in states for config, name in state.implementations}


def _configs(model: PreTrainedModel) -> list[Any]:
    found: dict[int, Any] = {id(model.config): model.config}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found.setdefault(id(module.config), module.config)
    return list(found.values())


def _implementations(model: PreTrainedModel) -> list[tuple[Any, str]]:
    shared = _shared_configs()
    return [
        (config, shared.get(id(config)) or implementation(config)) for config in _configs(model)
    ]


def _use_our_attention(model: PreTrainedModel) -> None:
    name = register()
    for config in decoder_configs(model):
        set_implementation(config, name)


#: Tokens beyond the prompt that a call has room for from the start; a cache grows with longer answers.
FIRST_TOKENS = 4096


def _first_room(config: GenerationConfig, model_kwargs: Mapping[str, Any], longest: int) -> int:
    """Tokens to allocate for a call of up to ``longest`` tokens, most of which may never come."""
    new, mask = config.max_new_tokens, model_kwargs.get("attention_mask")
    if new is None:
        new = longest - mask.shape[-1] if isinstance(mask, Tensor) else 0
    return longest - max(new - FIRST_TOKENS, 0)


def _prepare_cache(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    original = getattr(type(model), HOOK)
    state: Accelerated | None = vars(model).get(ATTRIBUTE)
    if state is None:  # a shallow copy of a model that has been restored
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    config, model_kwargs = bound.arguments["generation_config"], bound.arguments["model_kwargs"]
    longest = int(bound.arguments["max_cache_length"])
    if bound.arguments["generation_mode"] == GenerationMode.ASSISTED_GENERATION:
        longest += config.prompt_lookup_num_tokens or 0  # such drafts may go beyond the last token
    first = _first_room(config, model_kwargs, longest)
    given = model_kwargs.get(CACHE)
    if isinstance(given, CarambaCache):
        expect(given, first, longest)
    _dynamic_if_assisted(config, bound.arguments["generation_mode"])
    wanted = config.cache_implementation
    if given is not None or config.use_cache is False or wanted not in OURS_FOR:
        return original(*bound.args, **bound.kwargs)
    made: CarambaCache | CarambaStaticCache
    if wanted == "static":
        # as transformers does: a cache of another size would recompile the model
        longest = max(
            longest,
            getattr(config, "max_cache_len", None) or 0,
            getattr(model, "_previous_max_cache_length", -1),
        )
        made = CarambaStaticCache.of(model, state.settings, longest)
        model._previous_max_cache_length = longest  # type: ignore[assignment]
        if is_compiled(model):
            answers = max(config.num_beams or 1, config.num_return_sequences or 1)
            made.initialize(model, answers * int(bound.arguments["batch_size"]))
    else:
        made = CarambaCache.of(model, state.settings, offloading=wanted == "offloaded")
        expect(made, first, longest)
    if getattr(config, "is_assistant", False) and hasattr(made, "activate_past_recording"):
        made.activate_past_recording()  # rejected draft tokens are rolled back
    model_kwargs[CACHE] = made
    return None


def _prepare_inputs(
    model: PreTrainedModel, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
) -> dict[str, Any]:
    """`prepare_inputs_for_generation` of an accelerated model that recomputes its context when its RoPE changes.

    The model's own method drops the cache at that point, and transformers would make a stock one. Here our cache is
    reset and refilled instead. transformers looks for ``inputs_embeds`` in the signature.
    """
    given, own = kwargs.get(CACHE), getattr(type(model), INPUTS)
    found: dict[str, Any] = own(model, input_ids, inputs_embeds=inputs_embeds, **kwargs)
    if isinstance(given, StoringCache) and found.get(CACHE) is None:
        given.reset()
        found[CACHE] = given
        ids = found.get("input_ids")
        if found.get("cache_position") is not None and ids is not None:  # older transformers
            found["cache_position"] = torch.arange(ids.shape[1], device=ids.device)
    return found


def _dynamic_if_assisted(config: Any, mode: GenerationMode) -> None:
    """Uses a dynamic cache for assisted generation before transformers 5.1, which replaces any named cache by one."""
    assisted = mode == GenerationMode.ASSISTED_GENERATION
    if not CROP_REMOVES and assisted and config.cache_implementation == "static":
        warnings.warn(
            "assisted generation takes no static cache in this transformers; a CarambaCache is used",
            stacklevel=2,
        )
        config.cache_implementation = None
