"""What is asked of a spread layer cache: where the queries stand, how far they see, and whether that can be had.

Everything that can be wrong is found here, on every rank alike: one that raised later, in an op, would leave those
waiting that hold nothing the queries see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from caramba_fast.distributed.plans import Queries
from caramba_fast.ops import checks

if TYPE_CHECKING:
    from caramba_fast.distributed.rows import SpreadRows

#: Options of `attend`; what is not listed cannot be had with pages on several ranks.
SCALES = ("softmax_scale", "sem_scale", "geo_scale")
PLAIN = ("softcap", "num_splits", "q_chunk")
ALLOWED = ("before", "window_size", "return_softmax_lse", "s_aux", *SCALES, *PLAIN)
LEAST = {"softcap": 0, "num_splits": 0, "q_chunk": 1}


def nulls_of(layer: SpreadRows) -> tuple[str, ...]:
    """The options that are null keys and values of the layer's streams."""
    return tuple(f"null_{name}" for name in layer.streams)


def asked_queries(
    layer: SpreadRows, queries: Sequence[Tensor], before: int, options: dict[str, Any]
) -> Queries:
    """Where the queries stand and how far they see.

    Raises:
        ValueError, TypeError: as `LayerCache`, and options that cannot be had across ranks.
    """
    _check_options(layer, options)
    _check_queries(layer, queries)
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
    return Queries(start, tuple(count), tokens, layer.residual_len, left)


def _check_options(layer: SpreadRows, options: dict[str, Any]) -> None:
    nulls = nulls_of(layer)
    unknown = [name for name in options if name not in (*ALLOWED, *nulls)]
    if unknown:
        raise TypeError(
            f"attend has no option {', '.join(unknown)} for pages spread over ranks; allowed are "
            f"{', '.join((*ALLOWED, *nulls))}"
        )
    problems = [
        f"{name} is {options[name]}; {least} or more is allowed"
        for name, least in LEAST.items()
        if options.get(name) is not None and options[name] < least
    ]
    window = options.get("window_size") or (-1, -1)
    if len(window) != 2 or min(window) < -1:
        problems.append(f"window_size is {window!r}; (left, right), each -1 or more, is needed")
    given = [name for name in nulls if options.get(name) is not None]
    if given and len(given) < len(nulls):
        problems.append(f"null keys and values go together; only {', '.join(given)} given")
    checks.raise_all("attend", problems)


def _check_queries(layer: SpreadRows, queries: Sequence[Tensor]) -> None:
    keys = [stream for name, stream in layer.streams.items() if name != "v"]
    for q, stream in zip(queries, keys, strict=True):
        checks.float_tensor("q", q)
        fits = q.ndim == 4 and q.shape[0] == layer.batch_size and q.shape[3] == stream.head_dim
        if not fits or q.shape[1] % layer.n_kv_heads or q.shape[:3] != queries[0].shape[:3]:
            raise ValueError(
                f"q has shape {tuple(q.shape)}; ({layer.batch_size}, H_q, T, {stream.head_dim}) with H_q a multiple "
                f"of {layer.n_kv_heads}, and one H_q and T for all queries, is needed"
            )
