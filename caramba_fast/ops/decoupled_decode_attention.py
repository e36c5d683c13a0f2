"""decoupled_decode_attention: two key streams, one softmax (decoupled bottleneck attention, DBA).

A score is ``q_sem · k_sem * sem_scale + q_geo · k_geo * geo_scale``: semantic keys carry no position,
geometric ones are rotated. Each stream has its own width, format and transform; values are shared.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from caramba_fast.ops import attention_call
from caramba_fast.ops.registry import register
from caramba_fast.ops.schema import DECOUPLED, attention_schema
from caramba_fast.ops.view import KVView

FACTORS = ("sem_scale", "geo_scale")


def reference(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The oracle: pure torch, any device."""
    return attention_call.reference(DECOUPLED, FACTORS, args, options)


def fake(*args: Any, n_kv_heads: int, **_: Any) -> tuple[Tensor, Tensor]:
    return attention_call.fake(DECOUPLED, args, n_kv_heads)


_op = register(
    "decoupled_decode_attention",
    attention_schema(DECOUPLED, FACTORS),
    reference=reference,
    fake=fake,
)


def decoupled_decode_attention(
    q_sem: Tensor,
    q_geo: Tensor,
    k_sem: KVView,
    k_geo: KVView,
    v: KVView,
    cache_seqlens: Tensor,
    *,
    n_kv_heads: int,
    return_softmax_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode_attention` with semantic and geometric keys.

    Args:
        q_sem: (B, H_q, T, D_sem) float32, float16 or bfloat16.
        q_geo: (B, H_q, T, D_geo), same dtype.
        k_sem, k_geo, v: the three stored streams; heads share lanes alike in all of them.
        sem_scale, geo_scale: factors of the two products; default 1 / sqrt(D_sem), 1 / sqrt(D_geo).
        null_k_sem, null_k_geo, null_v: (H_kv, D) each, all or none.
        cache_seqlens, n_kv_heads, return_softmax_lse, options: as in `decode_attention`.

    Returns:
        out (B, H_q, T, D_v) in q's dtype, and lse (B, H_q, T) float32 if asked for.

    Raises:
        TypeError, ValueError: naming every argument that is wrong, what it was and what is allowed.
    """
    out, lse = attention_call.call(
        _op, {"k_sem": q_sem, "k_geo": q_geo}, {"k_sem": k_sem, "k_geo": k_geo, "v": v}, cache_seqlens,
        n_kv_heads, options, attention_call.MAX_QUERY_TOKENS,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
