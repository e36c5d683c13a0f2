"""RoPE whose frequencies change with the sequence length ("dynamic", "longrope"): checks and state resets.

Cached keys keep their rotation, so the output depends on how tokens were split into passes and, with "dynamic" RoPE, on
the longest sequence that the modules have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from caramba_fast.cache import ModelKVCache

#: RoPE types whose frequencies depend on the longest position.
CHANGING_ROPE = ("dynamic", "longrope")
#: Cache -> tokens of its longest row in its first pass.
FIRST_PASS: WeakKeyDictionary[ModelKVCache, int] = WeakKeyDictionary()


def rope_limit(model: PreTrainedModel, kinds: Sequence[str]) -> int | None:
    """Number of tokens up to which RoPE of these types keeps its frequencies; None if the model has no such RoPE."""
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
    """Tokens beyond which the model's own `generate` recomputes its cache (Phi-3 and others with longrope), or None."""
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    if own is GenerationMixin.prepare_inputs_for_generation:
        return None
    return rope_limit(model, ("longrope",))


def check_shortened(model: PreTrainedModel, kv_cache: ModelKVCache, left: Sequence[int]) -> None:
    """Raises ValueError if cached keys are rotated differently from how they would be in rows of ``left`` tokens."""
    held, same, name = kv_cache.row_lengths, rereads_beyond(model), type(model).__name__
    first = FIRST_PASS.get(kv_cache, max(held))
    if same is not None and 0 < max(left) <= same < max(held):
        raise ValueError(
            f"{name} turns all keys otherwise up to {same} tokens, and those in the cache are turned "
            f"as for {max(held)}: {max(left)} of them cannot stay; keep more than {same}, or begin anew with reset()"
        )
    limit = rope_limit(model, CHANGING_ROPE) if same is None else None
    if limit is None or first <= limit:  # later tokens came one at a time
        return
    fewest = first if rope_limit(model, ("dynamic",)) is not None else limit + 1
    kept = min((n for n in left if n), default=fewest)
    if kept < fewest:
        raise ValueError(
            f"{name} turns keys by the length of the text from {limit} tokens on (its RoPE changes with the length), "
            f"and those in the cache are turned as for {first}: {kept} of them cannot stay; keep {fewest} or more, or "
            "begin anew with reset()"
        )


def check_turned_alike(model: PreTrainedModel, held: Sequence[int], new: Sequence[int]) -> None:
    """Raises ValueError if a row's output would depend on other rows, or on how its tokens are split into passes.

    ``held`` and ``new`` are tokens of each row in the cache, and in this pass.
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
        every = rope_limit(model, ("dynamic",)) is not None  # else only two sets of frequencies
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


def dynamic_ropes(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that keep the frequencies of the longest sequence they have seen, until there is a short one."""
    if rope_limit(model, ("dynamic",)) is None:
        return []
    return [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]


@contextmanager
def as_if_new(ropes: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which `dynamic_ropes` have their initial state, as if they had seen no sequence; restored on exit."""
    before = [(module, *_reset(module)) for module in ropes]
    try:
        yield
    finally:
        for module, buffers, lengths in before:
            for name, buffer in buffers.items():
                module.register_buffer(name, buffer, persistent=False)
            vars(module).update(lengths)


def _reset(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Resets a module to its initial frequencies; returns the buffers and lengths it had."""
    kinds = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
    buffers, lengths = {}, {"max_seq_len_cached": module.max_seq_len_cached}
    for layer, kind in kinds.items():
        if "dynamic" not in kind:
            continue
        prefix = f"{layer}_" if layer else ""
        name, length = f"{prefix}inv_freq", f"{prefix}max_seq_len_cached"
        buffers[name] = now = getattr(module, name)
        lengths[length] = getattr(module, length, module.max_seq_len_cached)
        first = getattr(module, f"{prefix}original_inv_freq").to(now.device)
        module.register_buffer(name, first, persistent=False)
        setattr(module, length, module.original_max_seq_len)
    return buffers, lengths
