"""Converts between `KVView` arguments and the flat schemas of the attention ops, with all checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from caramba_fast.ops import checks
from caramba_fast.ops.attention import State, solve
from caramba_fast.ops.gradients import results_of
from caramba_fast.ops.plan import CallPlan
from caramba_fast.ops.registry import DECOUPLED, STANDARD, Op, attention_schema, register
from caramba_fast.ops.view import (
    KVView,
    common_problems,
    group_of,
    stored_lanes,
    stream_options,
)

#: ``num_splits`` for a schedule balanced over all rows.
BALANCED = -1
#: Most query tokens of the decode ops; longer prompts go through the extend ops.
MAX_QUERY_TOKENS = 32
#: Options that are tensors, besides null keys and values.
TENSORS = ("block_table", "cache_leftpad", "query_lens", "s_aux")
#: Names of the scale option of each key stream.
FACTORS = {STANDARD: ("softmax_scale",), DECOUPLED: ("sem_scale", "geo_scale")}


def attention_op(name: str, streams: tuple[str, ...], extra: Sequence[str] = ()) -> Op:
    """Registers an attention op over the streams, v last; ``extra`` are options that only some ops have."""
    return register(
        name,
        attention_schema(streams, FACTORS[streams], extra),
        reference=partial(reference, streams),
        fake=partial(fake, streams),
    )


def reference(streams: tuple[str, ...], *args: Any, **options: Any) -> State:
    """The reference of every attention op, taking the arguments of its schema: pure torch, any device."""
    count = len(streams)
    queries, rest = args[: count - 1], args[count - 1 :]
    stored, cache_seqlens, kinds = rest[: 2 * count], rest[2 * count], rest[2 * count + 1 :]
    views = [
        KVView.of(stream, stored[2 * i], stored[2 * i + 1], kinds[i], options)
        for i, stream in enumerate(streams)
    ]
    nulls = [options.pop(f"null_{stream}", None) for stream in streams]
    given = [options.pop(name, None) for name in FACTORS[streams]]
    scales = [
        1 / math.sqrt(q.shape[-1]) if f is None else f for q, f in zip(queries, given, strict=True)
    ]
    options.pop("num_splits", None)  # changes nothing here
    return solve(
        queries,
        views[:-1],
        views[-1],
        scales,
        cache_seqlens,
        nulls[:-1],
        null_v=nulls[-1],
        **options,
    )


def fake(streams: tuple[str, ...], *args: Any, n_kv_heads: int, **_: Any) -> State:
    """Shapes and dtypes of out and lse."""
    count = len(streams)
    q, rest = args[0], args[count - 1 :]
    kinds = rest[2 * count + 1 :]
    per_lane = stored_lanes(rest[0], kinds[0], n_kv_heads, q.shape[-1]).heads_per_lane
    v_dim = KVView(rest[2 * count - 2], None, kinds[-1]).lane_dim // per_lane
    out = q.new_empty((*q.shape[:3], v_dim))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def call(
    op: Op,
    queries: dict[str, Tensor],
    views: dict[str, KVView],
    cache_seqlens: Tensor,
    n_kv_heads: int,
    options: Mapping[str, Any],
) -> State:
    options = {name: value for name, value in options.items() if value is not None}
    plan = plan_attention(op, views, tuple(queries.values()), cache_seqlens, n_kv_heads, options)
    found: State = plan.run((*queries.values(), cache_seqlens), options)
    return results_of(op.name, found, *queries.values(), *options.values())


def plan_attention(
    op: Op,
    views: Mapping[str, KVView],
    queries: Sequence[Tensor],
    cache_seqlens: Tensor,
    n_kv_heads: int,
    options: Mapping[str, Any],
) -> CallPlan:
    """Checks a call of an attention op and flattens its arguments.

    Args:
        op: one of the four attention ops; those without ``q_chunk`` take up to MAX_QUERY_TOKENS.
        views: the streams by name, in the op's order, v last.
        queries: (B, H_q, T, D) of each key stream, in that order.
        cache_seqlens, n_kv_heads: as in `decode_attention`, like the errors raised.
        options: those given, without None.
    """
    named = dict(zip(views, queries, strict=False))
    _check(op, named, views, cache_seqlens, n_kv_heads, options)
    stated: dict[str, Any] = {"n_kv_heads": n_kv_heads}
    for name, view in views.items():
        stated.update(view.options(name))
    return CallPlan.of(op, tuple(views.values()), stated, len(queries))


def _check(
    op: Op,
    queries: Mapping[str, Tensor],
    views: Mapping[str, KVView],
    cache_seqlens: Tensor,
    n_kv_heads: int,
    options: Mapping[str, Any],
) -> None:
    for name, q in queries.items():
        checks.float_tensor(f"q for {name}" if len(queries) > 1 else "q", q)
    for name, view in views.items():
        view.check(name)
    unknown = [name for name in options if name not in op.keywords]
    if unknown:
        raise TypeError(f"{op.name} has no option {', '.join(unknown)}")
    described = {option for name in views for option in stream_options(name)} & set(options)
    if described:
        raise TypeError(
            f"{', '.join(sorted(described))}: given with the stream's KVView, not as options"
        )
    given = {name: options.get(name) for name in (*TENSORS, *(f"null_{name}" for name in views))}
    checks.tensors(**given)
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(
            f"cache_seqlens is a {type(cache_seqlens).__name__}; a (B,) int32 tensor is needed"
        )
    most = None if "q_chunk" in op.keywords else MAX_QUERY_TOKENS
    checks.raise_all(op.name, _problems(queries, views, cache_seqlens, n_kv_heads, options, most))
    checks.same_device(
        cache_seqlens=cache_seqlens, **{f"q for {name}": q for name, q in queries.items()},
        **{f"{name}_codes": view.codes for name, view in views.items()},
        **{key: value for key, value in options.items() if isinstance(value, Tensor)},
    )  # fmt: skip


def _problems(
    queries: Mapping[str, Tensor],
    views: Mapping[str, KVView],
    cache_seqlens: Tensor,
    n_kv_heads: int,
    options: Mapping[str, Any],
    max_tokens: int | None,
) -> list[str]:
    first = next(iter(queries.values()))
    for name, q in queries.items():
        if q.ndim != 4 or 0 in q.shape or q.shape[:3] != first.shape[:3] or q.dtype != first.dtype:
            return [
                f"q{name.removeprefix('k')} has shape {tuple(q.shape)}, {q.dtype}; (B, H_q, T, D), none of "
                "them 0, with one B, H_q, T and dtype for all queries, is needed"
            ]
    batch, heads, tokens, _ = first.shape
    if n_kv_heads < 1 or heads % n_kv_heads:
        return [f"q has {heads} heads, not a multiple of n_kv_heads={n_kv_heads}"]
    problems = []
    if max_tokens is not None and tokens > max_tokens:
        problems.append(
            f"q has T={tokens} tokens; up to {max_tokens} are allowed (extend_attention takes more)"
        )
    for name, tensor in (
        ("cache_seqlens", cache_seqlens),
        *((n, options.get(n)) for n in ("cache_leftpad", "query_lens")),
    ):
        problems += checks.row_integers(name, tensor, batch)
    table = options.get("block_table")
    problems += checks.block_table(table, batch)
    if table is not None and table.ndim != 2:
        return problems
    problems += _view_problems(queries, views, n_kv_heads, batch, table)
    problems += common_problems(views, table, batch)
    problems += _tail_problems(views, options.get("residual_len", 0), tokens)
    problems += _null_problems(queries, views, options, n_kv_heads, heads)
    return problems + _scalar_problems(options)


def _view_problems(
    queries: Mapping[str, Tensor],
    views: Mapping[str, KVView],
    n_kv_heads: int,
    batch: int,
    table: Tensor | None,
) -> list[str]:
    problems: list[str] = []
    lead = next(iter(views.values())).codes.shape[:3]
    per_lane = 0
    for name, view in views.items():
        if view.codes.shape[:3] != lead:
            problems.append(
                f"{name} codes {tuple(view.codes.shape)} differ from {tuple(lead)} in (B, lanes, S)"
            )
        if name in queries:
            dim = queries[name].shape[3]
            fits = view.lane_dim % dim == 0 and view.lane_dim >= dim
            grouped = view.lane_dim // dim
            if (
                not fits
                or -(-n_kv_heads // grouped) != lead[1]
                or (per_lane and grouped != per_lane)
            ):
                problems.append(
                    f"q has head_dim {dim} and n_kv_heads is {n_kv_heads}; {name}'s {lead[1]} lanes of "
                    f"{view.lane_dim} hold something else"
                )
                continue
            per_lane = grouped
        elif per_lane and view.lane_dim % per_lane:
            problems.append(
                f"{name}'s lanes of {view.lane_dim} cannot hold {per_lane} heads, as the keys' do"
            )
    if table is None and lead[0] != batch:
        problems.append(f"the cache has B={lead[0]}; B={batch} as in q is needed")
    return problems


def _tail_problems(views: Mapping[str, KVView], residual_len: int, tokens: int) -> list[str]:
    problems = []
    tail = next(iter(views.values())).tail
    if residual_len < 0 or (residual_len and tail is None):
        problems.append(
            f"residual_len is {residual_len}; 0, or more with a tail in every stream, is allowed"
        )
    needed = residual_len + group_of(views.values()) - 1 + tokens - 1
    if tail is not None and needed > tail.shape[2]:
        problems.append(
            f"T={tokens} query tokens and residual_len={residual_len} need a tail of "
            f"{needed}, it has {tail.shape[2]} (residual_len + tail_slack, and by channel a group)"
        )
    return problems


def _null_problems(
    queries: Mapping[str, Tensor],
    views: Mapping[str, KVView],
    options: Mapping[str, Any],
    n_kv_heads: int,
    heads: int,
) -> list[str]:
    problems = []
    per_lane = max(1, next(iter(views.values())).lane_dim // next(iter(queries.values())).shape[3])
    v_dim = views["v"].lane_dim // per_lane
    nulls = {name: options.get(f"null_{name}") for name in views}
    missing = [f"null_{name}" for name, tensor in nulls.items() if tensor is None]
    if 0 < len(missing) < len(nulls):
        problems.append(f"null keys and values go together; missing {', '.join(missing)}")
    for name, tensor in nulls.items():
        dim = queries[name].shape[3] if name in queries else v_dim
        if tensor is not None and (
            tensor.ndim != 2 or tensor.shape[0] != n_kv_heads or dim not in (None, tensor.shape[1])
        ):
            problems.append(
                f"null_{name} is {tuple(tensor.shape)}; ({n_kv_heads}, {dim or 'D_v'}) is needed"
            )
    s_aux = options.get("s_aux")
    if s_aux is not None and s_aux.shape != (heads,):
        problems.append(
            f"s_aux is {tuple(s_aux.shape)}; one logit a query head, ({heads},), is needed"
        )
    return problems


def _scalar_problems(options: Mapping[str, Any]) -> list[str]:
    problems = []
    problems += checks.window(options.get("window_size", (-1, -1)))
    for name, allowed in (
        ("softcap", "0 (none)"),
        ("num_sink_tokens", "0"),
    ):
        if options.get(name, 0) < 0:
            problems.append(f"{name} is {options[name]}; {allowed} or more is allowed")
    for name in ("softmax_scale", "sem_scale", "geo_scale"):
        scale = options.get(name)
        if scale is not None and not abs(scale) < float("inf"):
            problems.append(f"{name} is {scale}; a finite number is allowed")
    if options.get("num_splits", 0) < BALANCED:
        problems.append(
            f"num_splits is {options['num_splits']}; {BALANCED} (balanced over all rows), 0 (automatic) or more is "
            "allowed"
        )
    if options.get("q_chunk", 1) < 1:
        problems.append(f"q_chunk is {options['q_chunk']}; 1 or more is allowed")
    return problems
