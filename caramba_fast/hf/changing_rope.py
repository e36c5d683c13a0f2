"""RoPE whose frequencies change with the length of a text, and what is refused for it, or made as for a new model.

Keys in a cache stay turned as they were when they came. What such a model says depends on the passes in which its text
came, and, with "dynamic" RoPE, on the longest text that its modules have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from caramba_fast.cache import ModelKVCache

#: Kinds of RoPE whose frequencies depend on the longest position there is.
CHANGING_ROPE = ("dynamic", "longrope")
#: Tokens of the longest row of a cache that came in one pass, before all others.
FIRST_PASS: WeakKeyDictionary[ModelKVCache, int] = WeakKeyDictionary()


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


def check_shortened(model: PreTrainedModel, kv_cache: ModelKVCache, left: Sequence[int]) -> None:
    """Raises ValueError where cached keys are turned otherwise than those of so short a text would be.

    Args:
        kv_cache: has the keys.
        left: tokens of each row that are to stay.
    """
    held, same, name = kv_cache.row_lengths, rereads_beyond(model), type(model).__name__
    first = FIRST_PASS.get(kv_cache, max(held))
    if same is not None and 0 < max(left) <= same < max(held):
        raise ValueError(
            f"{name} turns all keys otherwise up to {same} tokens, and those in the cache are turned "
            f"as for {max(held)}: {max(left)} of them cannot stay; keep more than {same}, or begin anew with reset()"
        )
    limit = rope_limit(model, CHANGING_ROPE) if same is None else None
    if limit is None or first <= limit:  # behind them came one token after the other
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


def dynamic_ropes(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that keep the frequencies of the longest text they have seen, until there is a short one."""
    if rope_limit(model, ("dynamic",)) is None:
        return []
    return [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]


@contextmanager
def as_if_new(ropes: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, `dynamic_ropes` have seen no longer text; afterwards they are what they were."""
    before = [(module, *_reset(module)) for module in ropes]
    try:
        yield
    finally:
        for module, buffers, lengths in before:
            for name, buffer in buffers.items():
                module.register_buffer(name, buffer, persistent=False)
            vars(module).update(lengths)


def _reset(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gives a module its first frequencies; the buffers and lengths it had."""
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
