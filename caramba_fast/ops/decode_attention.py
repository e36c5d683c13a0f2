"""decode_attention: a few new queries over a cache that is read as it is stored.

The T new tokens are already in the cache; query ``i`` of row ``b`` stands at position
``cache_seqlens[b] - T + i`` and sees the keys up to and including its own. This file fixes what
the fast kernels must compute; the reference dequantizes and does dense attention in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from caramba_fast.ops import checks
from caramba_fast.ops.options import refuse_unbuilt
from caramba_fast.ops.registry import register
from caramba_fast.ops.view import KVView, load, stored_lanes

SCHEMA = (
    "(Tensor q, Tensor k_codes, Tensor? k_scales, Tensor v_codes, Tensor? v_scales, "
    "Tensor cache_seqlens, str k_kind, str v_kind, *, int n_kv_heads, "
    "Tensor? block_table=None, Tensor? cache_leftpad=None, "
    "Tensor? k_tail=None, Tensor? v_tail=None, int residual_len=0, "
    "Tensor? k_sink=None, Tensor? v_sink=None, "
    "Tensor? k_bias=None, Tensor? k_pairs=None, Tensor? theta=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, bool rotate_k=False, bool rotate_v=False, "
    "Tensor? null_k=None, Tensor? null_v=None, Tensor? s_aux=None, "
    "float? softmax_scale=None, SymInt[2] window_size=[-1, -1], int num_sink_tokens=0, "
    "float softcap=0.0, int num_splits=0) -> (Tensor out, Tensor lse)"
)


def allowed_keys(
    cache_seqlens: Tensor,
    queries: int,
    keys: int,
    window_size: tuple[int, int] | list[int],
    cache_leftpad: Tensor | None,
) -> Tensor:
    """Which key each query sees, (B, T, S) bool: causal, within the window, past the padding."""
    device = cache_seqlens.device
    key = torch.arange(keys, device=device)
    position = cache_seqlens[:, None] - queries + torch.arange(queries, device=device)
    distance = position[:, :, None] - key
    left, right = window_size
    allowed = distance >= (0 if right < 0 else max(-right, 0))
    if left >= 0:
        allowed = allowed & (distance <= left)
    if cache_leftpad is not None:
        allowed = allowed & (key >= cache_leftpad[:, None, None])
    return allowed


def masked_softmax(logits: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension of the allowed entries.

    Returns:
        probabilities, 0 where nothing is allowed, and the natural-log sum of exponentials, -inf
        where nothing is allowed.
    """
    logits = logits.masked_fill(~allowed, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
    weights = (logits - largest).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (largest + total.log()).squeeze(-1)
    return weights / torch.where(total == 0, torch.ones_like(total), total), lse


def reference(
    q: Tensor,
    k_codes: Tensor,
    k_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    cache_seqlens: Tensor,
    k_kind: str,
    v_kind: str,
    *,
    n_kv_heads: int,
    cache_leftpad: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | list[int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The oracle: pure torch, any device. ``num_splits`` changes nothing here."""
    refuse_unbuilt("decode_attention", options)
    batch, _, queries, head_dim = q.shape
    lanes = stored_lanes(k_codes, k_kind, n_kv_heads, head_dim)
    k = lanes.unpack(load(k_codes, k_scales, k_kind, torch.float32))
    v = lanes.unpack(load(v_codes, v_scales, v_kind, torch.float32))
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    grouped = q.to(torch.float32).unflatten(1, (n_kv_heads, -1)) * scale  # (B, H_kv, G, T, D)
    logits = torch.matmul(grouped.flatten(2, 3), k.transpose(-1, -2)).unflatten(2, (-1, queries))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = allowed_keys(cache_seqlens, queries, k.shape[2], window_size, cache_leftpad)
    probabilities, lse = masked_softmax(logits, allowed[:, None, None])
    # Slots nobody may see hold anything, NaN included, and 0 * NaN is NaN.
    v = torch.where(allowed.any(1)[:, None, :, None], v, torch.zeros_like(v))
    out = torch.matmul(probabilities.flatten(2, 3), v).unflatten(2, (-1, queries))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def fake(
    q: Tensor,
    k_codes: Tensor,
    k_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    cache_seqlens: Tensor,
    k_kind: str,
    v_kind: str,
    *,
    n_kv_heads: int,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, head_dim = q.shape
    per_lane = stored_lanes(k_codes, k_kind, n_kv_heads, head_dim).heads_per_lane
    v_dim = KVView(v_codes, v_scales, v_kind).lane_dim // per_lane
    out = q.new_empty((batch, heads, queries, v_dim))
    return out, q.new_empty((batch, heads, queries), dtype=torch.float32)


_op = register("decode_attention", SCHEMA, reference=reference, fake=fake)


def decode_attention(
    q: Tensor,
    k: KVView,
    v: KVView,
    cache_seqlens: Tensor,
    *,
    n_kv_heads: int,
    return_softmax_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T new queries a row over what is cached.

    Args:
        q: (B, H_q, T, D) float32, float16 or bfloat16; H_q a multiple of ``n_kv_heads``.
        k, v: stored K and V; S slots each, those at or past a row's length are never read as
            numbers, whatever they hold.
        cache_seqlens: (B,) int32 on q's device, tokens cached **including** the T new ones.
        n_kv_heads: kv heads stored (lanes may hold padding beyond them).
        return_softmax_lse: also return lse (B, H_q, T) float32, natural log.
        softmax_scale: multiplies q·k; default 1 / sqrt(D).
        window_size: (left, right) as in flash-attn, -1 for no limit; queries see keys at
            positions ``[p - left, p + right]``, never later than their own.
        cache_leftpad: (B,) int32, leading slots of a row that hold padding.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); 0 for none.
        num_splits: KV splits; 0 lets the kernel choose. The result does not depend on it beyond
            rounding.
        options: DESIGN's further options; those not built yet raise NotImplementedError by name.

    Returns:
        out (B, H_q, T, D_v) in q's dtype, and lse if asked for. A query that sees no key gets
        out 0 and lse -inf.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is allowed.
    """
    _check(q, k, v, cache_seqlens, n_kv_heads, options)
    out, lse = _op(
        q, k.codes, k.scales, v.codes, v.scales, cache_seqlens, k.kind, v.kind,
        n_kv_heads=n_kv_heads, **options,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _check(
    q: Tensor, k: KVView, v: KVView, cache_seqlens: Tensor, n_kv_heads: int, options: dict[str, Any]
) -> None:
    checks.float_tensor("q", q)
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}; (B, H_q, T, D), none of them 0, is needed")
    if n_kv_heads < 1 or q.shape[1] % n_kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of n_kv_heads={n_kv_heads}")
    k.check("k")
    v.check("v")
    batch, head_dim = q.shape[0], q.shape[3]
    if k.codes.shape[:3] != v.codes.shape[:3] or k.codes.shape[0] != batch:
        raise ValueError(
            f"k codes {tuple(k.codes.shape)} and v codes {tuple(v.codes.shape)} must agree in "
            f"(B, lanes, S), with B={batch} as in q"
        )
    per_lane = k.lane_dim // head_dim
    if not per_lane or k.lane_dim % head_dim or -(-n_kv_heads // per_lane) != k.codes.shape[1]:
        raise ValueError(
            f"q has head_dim {head_dim} and n_kv_heads is {n_kv_heads}; k's {k.codes.shape[1]} "
            f"lanes of {k.lane_dim} hold something else"
        )
    if v.lane_dim % per_lane:
        raise ValueError(f"v's lanes of {v.lane_dim} cannot hold {per_lane} heads, as k's do")
    if cache_seqlens.shape != (batch,) or cache_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cache_seqlens has shape {tuple(cache_seqlens.shape)} and dtype "
            f"{cache_seqlens.dtype}; ({batch},) int32 is needed"
        )
    window = options.get("window_size", (-1, -1))
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"window_size is {window!r}; (left, right), each -1 or more, is needed")
    if options.get("softcap", 0.0) < 0:
        raise ValueError(f"softcap is {options['softcap']}; 0 (none) or more is allowed")
    if options.get("num_splits", 0) < 0:
        raise ValueError(f"num_splits is {options['num_splits']}; 0 (automatic) or more is allowed")
    leftpad = options.get("cache_leftpad")
    if leftpad is not None and (leftpad.shape != (batch,) or leftpad.dtype != torch.int32):
        raise ValueError(
            f"cache_leftpad has shape {tuple(leftpad.shape)} and dtype {leftpad.dtype}; "
            f"({batch},) int32 is needed"
        )
    checks.same_device(q=q, k=k.codes, v=v.codes, cache_seqlens=cache_seqlens, cache_leftpad=leftpad)
