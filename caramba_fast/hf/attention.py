"""The attention function: over packed keys and values if the cache provides them, else over tensors.

Over tensors it calls ``sdpa``, or computes itself what ``sdpa`` lacks: softcapping, attention sinks (prompts and stock
caches of Gemma 2 and gpt-oss), returned weights. On a CPU prompts use our kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from caramba_fast.hf.compat import CACHE, weights_are_recorded
from caramba_fast.hf.layers import PackedLayer, check_no_dropout
from caramba_fast.hf.lazy_tensors import PackedStates, values_of, without_gradient
from caramba_fast.hf.masks import PatternMask
from caramba_fast.hf.rotary import RotatedStates
from caramba_fast.hf.scope import attention_function, foreign, inside, once
from caramba_fast.hf.static_layer import attended_layer, check_no_codes
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS
from caramba_fast.ops.extend_attention import causal_attention, serves_prompts

#: Most attention weights that `soft_attention` computes at a time.
MOST_WEIGHTS = 2**24


def caramba_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that `AttentionInterface` has under our name.

    Args:
        module: the attention layer.
        query: (B, H_q, T, D).
        key, value: (B, H_kv, L, D), returned by `CarambaLayer.update`, or any tensors.
        attention_mask: from `caramba_mask`, or (B, 1, T, L) bool or additive, or None for causal.
        scaling: multiplies q·k; default 1 / sqrt(D).
        softcap, s_aux: logit softcapping and attention sinks (Gemma 2, gpt-oss); see `ops.decode_attention`.

    Returns:
        (B, T, H_q, D_v), contiguous, and the weights (B, H_q, T, L) if ``output_attentions`` asks for them, else None.
        If another thread runs the model while one of our passes has switched its attention: the result of the model's
        own attention.

    Raises:
        ValueError: a custom mask, or ``output_attentions``, with a static cache; a layer that attends to tokens
            selected by an indexer (``indices``, ``block_indices``: DeepSeek-V3.2, MiniMax-M3).
        RuntimeError: the codes of a static layer that did not make the last update.
    """
    if kwargs.get("indices") is not None or kwargs.get("block_indices") is not None:
        raise ValueError(
            f"{type(module).__name__} attends to the tokens that an indexer selects, which our attention does not do"
        )
    query, packed = values_of(query), isinstance(key, PackedStates)
    if type(key) is RotatedStates:  # from another cache, which returns its inputs unchanged
        key = key.dense()
    if inside.queries is not None and not torch.compiler.is_compiling():
        inside.queries(getattr(module, "layer_idx", None), query, key.shape[1])
    sinks = kwargs.get("sinks") if s_aux is None else s_aux
    weights = _wants_weights(module, kwargs)
    static = None if packed else attended_layer(key)
    if static is not None:
        static.check_call(query.shape[2], attention_mask, weights)
        out = static.attend(query, **_options(scaling, softcap, sinks))
        return without_gradient(out, query, *static.sources).transpose(1, 2).contiguous(), None
    if (
        packed
        and not weights
        and _reads_packed(module, query, key, value, attention_mask, dropout, kwargs)
    ):
        out = _packed(query, key, attention_mask, scaling, softcap, sinks)
        out = without_gradient(out, query, key, value)
        return out.transpose(1, 2).contiguous(), None
    theirs = None if torch.compiler.is_compiling() else foreign(getattr(module, "config", None))
    if theirs is not None:
        asked = {"softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: x for name, x in asked.items() if x is not None}
        return attention_function(theirs, module)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    kwargs.pop("sinks", None)
    check_no_codes(key)
    if dropout:
        check_no_dropout(key)
    if not torch.compiler.is_compiling():
        _warn_of_stock_cache(module, query, key)
    return _plain(
        module, query, key, value, attention_mask, scaling, softcap, sinks, dropout, weights, kwargs
    )


def _wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether ``output_attentions`` is set, by the call or the config; warns once that it is slow."""
    config = getattr(module, "config", None)
    wanted = kwargs.get("output_attentions")
    if not wanted:
        wanted = _asks_for_weights(config)
    if not wanted and not torch.compiler.is_compiling():
        wanted = weights_are_recorded()  # GPT-2 drops the keyword
    if wanted:
        once(
            config,
            "output_attentions",
            "output_attentions=True: attention is computed from dequantized keys and values, which is slow; "
            "restore(model) gives the model's own attention back",
        )
    return bool(wanted)


def _asks_for_weights(config: Any) -> Any:
    """``config.output_attentions`` from its ``__dict__``: the config's own lookup takes longer than a short op."""
    found = getattr(config, "__dict__", {}).get("_output_attentions")
    return getattr(config, "output_attentions", False) if found is None else found


def _warn_of_stock_cache(module: nn.Module, query: Tensor, key: Any) -> None:
    """Warns once per model that it has our attention but decodes with a cache that is not packed."""
    ours, inside.dequantized = inside.dense or inside.dequantized, False
    if type(key) is Tensor and query.shape[2] < key.shape[2] and not ours:
        once(
            getattr(module, "config", None),
            "stock cache",
            "a model with our attention decodes with a cache of transformers, which is not packed: forward passes of "
            f"one's own need {CACHE}=CarambaCache(model, ...); generate() of an accelerated model makes it, "
            "though not for the second pass of guidance_scale, whose cache stays as it is",
        )


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a missing mask means causal attention."""
    causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _reads_packed(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    kwargs: dict[str, Any],
) -> bool:
    if not isinstance(value, PackedStates) or key.layer is not value.layer:
        return False
    if (key.stream, value.stream) != ("k", "v"):
        return False
    if dropout or key.shape[2] != key.layer.length or not key.layer.serves(query.shape[2]):
        return False
    if kwargs.get("position_bias") is not None:
        return False
    if mask is None:
        return query.shape[2] == 1 or _is_causal(module, kwargs)
    return isinstance(mask, PatternMask)


def _packed(
    query: Tensor,
    key: Any,
    mask: Any,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """(B, H_q, T, D) over the layer of ``key`` -> (B, H_q, T, D_v); the mask is a `PatternMask` or None."""
    layer = key.layer
    options = _options(scaling, softcap, s_aux)
    # If all rows start at the first token, the mask has no leftpad, while the layer may hold zeros: use the layer's.
    own = (
        layer.slots_of(mask.leftpad)
        if mask is not None and mask.leftpad is not None
        else layer.leftpad
    )
    if mask is None:
        return layer.store.attend(query, cache_leftpad=own, **options)
    pattern = mask.pattern
    if pattern.chunk is not None and pattern.hides(layer.length):
        return attend_in_chunks(layer, query, pattern.chunk, mask.leftpad, options)
    options["cache_leftpad"] = own
    if pattern.window is not None and pattern.hides(layer.length):
        options["window_size"] = (pattern.window - 1, 0)
    return layer.store.attend(query, **options)


def _options(scaling: float | None, softcap: float | None, s_aux: Tensor | None) -> dict[str, Any]:
    """Arguments of the attention interface under the names of our ops."""
    options: dict[str, Any] = {}
    if scaling is not None:
        options["softmax_scale"] = float(scaling)
    if softcap:
        options["softcap"] = float(softcap)
    if s_aux is not None:
        options["s_aux"] = s_aux.reshape(-1).float()
    return options


def attend_in_chunks(
    layer: PackedLayer,
    query: Tensor,
    chunk: int,
    leftpad: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Chunked attention (Llama 4): (B, H_q, T, D) of the T newest tokens -> (B, H_q, T, D_v).

    Chunks of ``chunk`` tokens are counted from a row's first token, at slot ``leftpad`` (B,) or 0. The start of a chunk
    is passed to the op as the start of the row (``cache_leftpad``), so a call takes query columns within which no row
    enters another chunk. ``options`` are those of `LayerKVCache.attend`.
    """
    store = layer.store
    tokens = query.shape[2]
    rows, first = layer.rows_for(tokens, leftpad)
    counts = layer.real_queries or [tokens] * len(rows)
    parts = []
    for begin, end in pieces(first, counts, tokens, chunk):
        starts = [
            r + max((f + begin) // chunk * chunk, 0) for r, f in zip(rows, first, strict=True)
        ]
        own = layer.slots_of(torch.tensor(starts, dtype=torch.int32, device="cpu").to(store.device))
        part = query[:, :, begin:end]
        parts.append(store.attend(part, before=tokens - end, cache_leftpad=own, **options))
    return torch.cat(parts, dim=2)


def pieces(
    first: Sequence[int], counts: Sequence[int], tokens: int, chunk: int
) -> list[tuple[int, int]]:
    """Splits ``tokens`` query columns into ranges within which no row enters another chunk.

    ``first`` has the index of each row's token in the first column, ``counts`` its columns that are not padding.
    """
    cuts = {0, tokens}
    for start, count in zip(first, counts, strict=True):
        cuts.update(range(-start % chunk, count, chunk))
    ordered = sorted(cuts)
    return list(itertools.pairwise(ordered))


def _plain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    dropout: float,
    weights: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention over tensors; lazy ones are materialized."""
    causal = _is_causal(module, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    key, value = values_of(key), values_of(value)
    bias = kwargs.get("position_bias")
    if not (weights or dropout) and bias is None and _is_prompt(query, key, value, mask, causal):
        options = _options(scaling, softcap, s_aux)
        if isinstance(mask, PatternMask):
            options |= {"cache_leftpad": mask.leftpad, "local_window": mask.pattern.window}
        out = causal_attention(query, key, value, **options)
        return out.transpose(1, 2).contiguous(), None
    mask = _dense_mask(queries, keys, mask, causal, query.device)
    if weights or softcap or s_aux is not None:
        return soft_attention(
            query, key, value, mask, scaling, softcap, s_aux, position_bias=bias,
            causal=causal, dropout=dropout, keep_weights=weights,
        )  # fmt: skip
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return found


def _is_prompt(query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool) -> bool:
    """Whether this is causal attention with many queries for which our CPU kernels are fastest."""
    if query.shape[2] <= MAX_QUERY_TOKENS or not serves_prompts(query, key, value):
        return False
    if mask is None:
        return causal
    if not isinstance(mask, PatternMask) or mask.shape[2:] != (query.shape[2], key.shape[2]):
        return False
    return mask.pattern.chunk is None or not mask.pattern.hides(key.shape[2])


def _dense_mask(
    queries: int, keys: int, mask: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """The mask for ``sdpa``.

    A missing one means causal, aligned at newest query and last key; ``sdpa`` would align the first ones.
    """
    if mask is not None:  # a static cache's mask covers slots that its prompt does not fill
        mask = values_of(mask)
        return mask[..., :keys] if mask.shape[-1] > keys else mask
    if not causal or queries in (1, keys):
        return None
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    return (torch.arange(keys, device=device) <= row)[None, None]


def soft_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    *,
    position_bias: Tensor | None = None,
    causal: bool,
    dropout: float = 0.0,
    keep_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(B, H_q, T, D) over (B, H_kv, L, D) and (B, H_kv, L, D_v) -> (B, T, H_q, D_v), and the weights (B, H_q, T, L).

    Args:
        mask: (B, 1, T, L), bool or additive; without one ``causal`` applies, newest query aligned with last key.
        scaling: multiplies q·k; default 1 / sqrt(D).
        softcap: logits become ``softcap * tanh(logits / softcap)``; None or 0 for none.
        s_aux: attention-sink logits, one more term of each softmax: (H_q,), or (B, H_q, T, 1) per query.
        position_bias: (B or 1, H_q, T, L), added to the logits; None for none.
        dropout: dropout probability of the weights.
        keep_weights: whether to return the weights, which are None otherwise.
    """
    batch, heads, tokens, dim = query.shape
    keys, groups = key.shape[2], heads // key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    columns = torch.arange(keys, device=query.device)
    step = max(1, MOST_WEIGHTS // (batch * heads * keys))
    parts, kept = [], []
    for first in range(0, tokens, step):
        piece = query[:, :, first : first + step].unflatten(1, (key.shape[1], groups))
        logits = torch.matmul(piece, key[:, :, None].transpose(-1, -2)) * scale
        logits = logits.flatten(1, 2)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if position_bias is not None:
            logits = logits + position_bias[:, :, first : first + step, :keys]
        if mask is not None:
            logits = _masked(logits, mask[:, :, first : first + step, :keys])
        elif causal:
            rows = torch.arange(first, first + piece.shape[3], device=query.device)
            logits = _masked(logits, (columns <= rows[:, None] + keys - tokens)[None, None])
        own = s_aux[:, :, first : first + step] if s_aux is not None and s_aux.ndim == 4 else s_aux
        weights = _softmax(logits, own).to(value.dtype)
        if keep_weights:
            kept.append(weights)
        if dropout:
            weights = torch.dropout(weights, dropout, train=True)
        grouped = weights.unflatten(1, (key.shape[1], groups))
        parts.append(torch.matmul(grouped, value[:, :, None]).flatten(1, 2))
    out = torch.cat(parts, dim=2).transpose(1, 2).contiguous()
    return out, torch.cat(kept, dim=2) if keep_weights else None


def _masked(logits: Tensor, seen: Tensor) -> Tensor:
    if seen.dtype == torch.bool:
        return logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    return logits + seen


def _softmax(logits: Tensor, s_aux: Tensor | None) -> Tensor:
    """Softmax in float32 over the keys and, if given, the sinks, whose probability is dropped from the result."""
    if s_aux is None:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    sinks = s_aux if s_aux.ndim == 4 else s_aux.reshape(1, -1, 1, 1)
    sinks = sinks.expand(logits.shape[0], -1, logits.shape[2], -1)
    whole = torch.cat((logits, sinks.to(logits.dtype)), dim=-1)
    return torch.softmax(whole, dim=-1, dtype=torch.float32)[..., :-1]
