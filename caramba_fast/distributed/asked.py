"""What is asked of a cache spread over ranks: checks of queries and options, the same on every rank.

An op checks its arguments only where it runs, and it does not run on ranks without a token that the queries see. These
would go on to the collective, and take what the others send of a later call for this one's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from caramba_fast.distributed.placement import Queries
from caramba_fast.ops import checks
from caramba_fast.ops.attention_call import BALANCED

#: Options of `attend` that are supported across ranks.
SCALES = ("softmax_scale", "sem_scale", "geo_scale")
PLAIN = ("softcap", "num_splits", "q_chunk")
ALLOWED = ("before", "window_size", "return_softmax_lse", "s_aux", *PLAIN)
LEAST = {"softcap": 0, "num_splits": BALANCED, "q_chunk": 1}
COUNTS = ("num_splits", "q_chunk")


def asked_queries(
    layer: Any, queries: Sequence[Tensor], before: int, options: dict[str, Any]
) -> Queries:
    """Positions of the queries and the range of keys they see; errors as `LayerCache`, also for unsupported options."""
    _check_options(layer, options)
    _check_queries(layer, queries)
    _check_extras(layer, queries[0].shape[1], options)
    tokens, lengths = queries[0].shape[2], layer.lengths
    most = max(layer.pos, lengths.newest)
    if before < 0 or not 1 <= tokens <= tokens + before <= most:
        raise ValueError(
            f"q has shape {tuple(queries[0].shape)} and before is {before}; (B, H_q, T, D) with T from 1 to the "
            f"{most} tokens cached is needed"
        )
    padded = lengths.query_lens is not None
    if padded and (before or tokens != lengths.newest):
        raise ValueError(
            f"q has T={tokens} tokens after an append of {lengths.newest} with padding; they must agree"
        )
    if layer.ring is not None and tokens + before > layer.ring.attendable:
        raise ValueError(
            f"q has T={tokens} tokens; with a tail up to {layer.ring.attendable} are allowed, or those of the "
            "latest append, once and right after it"
        )
    count = layer._newest if padded else [tokens] * layer.batch_size
    start = tuple(n - before - c for n, c in zip(lengths.host, count, strict=True))
    left = layer.reach.window(options)[0]
    return Queries(start, tuple(count), tokens, layer.residual_len, left, layer.local.group)


def _check_options(layer: Any, options: dict[str, Any]) -> None:
    nulls = layer.nulls
    scales = SCALES[:1] if len(layer.streams) == 2 else SCALES[1:]
    unknown = [n for n in options if n not in (allowed := (*ALLOWED, *scales, *nulls))]
    if unknown:
        raise TypeError(
            f"attend has no option {', '.join(unknown)} for pages spread over ranks; allowed are {', '.join(allowed)}"
        )
    problems = [
        f"{name} is {options[name]}; {least} or more is allowed"
        for name, least in LEAST.items()
        if options.get(name) is not None and options[name] < least
    ]
    endless = [name for name in scales if not math.isfinite(options.get(name) or 0.0)]
    problems += [f"{name} is {options[name]}; a finite number is needed" for name in endless]
    problems += checks.window(options.get("window_size") or (-1, -1))
    problems += [
        f"{name} is {options[name]!r}; an int is needed"
        for name in COUNTS
        if options.get(name) is not None and not isinstance(options[name], int)
    ]
    given = [name for name in nulls if options.get(name) is not None]
    if given and len(given) < len(nulls):
        problems.append(f"null keys and values go together; only {', '.join(given)} given")
    checks.raise_all("attend", problems)


def _check_queries(layer: Any, queries: Sequence[Tensor]) -> None:
    keys = [stream for name, stream in layer.streams.items() if name != "v"]
    for q, stream in zip(queries, keys, strict=True):
        checks.float_tensor("q", q)
        fits = q.ndim == 4 and q.shape[0] == layer.batch_size and q.shape[3] == stream.head_dim
        if not fits or q.shape[1] % layer.n_kv_heads or q.shape[:3] != queries[0].shape[:3]:
            raise ValueError(
                f"q has shape {tuple(q.shape)}; ({layer.batch_size}, H_q, T, {stream.head_dim}) with H_q a multiple "
                f"of {layer.n_kv_heads}, and one H_q and T for all queries, is needed"
            )
        if (q.dtype, q.device) != (like := (queries[0].dtype, stream.codes.device)):
            raise TypeError(f"q is {q.dtype} on {q.device}; {like[0]} on {like[1]} is needed")


def _check_extras(layer: Any, heads: int, options: dict[str, Any]) -> None:
    device = layer.streams["v"].codes.device
    parts = zip(layer.nulls, layer.streams.values(), strict=True)
    shapes = {name: (layer.n_kv_heads, stream.head_dim) for name, stream in parts}
    for name, shape in {**shapes, "s_aux": (heads,)}.items():
        if (x := options.get(name)) is not None:
            checks.float_tensor(name, x)
            if x.shape != shape or x.device != device:
                raise ValueError(
                    f"{name} is {tuple(x.shape)} on {x.device}; {shape} on {device} is needed"
                )
