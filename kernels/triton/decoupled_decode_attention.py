"""decoupled_decode_attention in Triton: the kernels of decode_attention with a second key stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .balanced_launch import launch_decode
from .splits_launch import Launch


def decoupled_decode_attention(
    q_sem: Tensor,
    q_geo: Tensor,
    k_sem_codes: Tensor,
    k_sem_scales: Tensor | None,
    k_geo_codes: Tensor,
    k_geo_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    cache_seqlens: Tensor,
    k_sem_kind: str,
    k_geo_kind: str,
    v_kind: str,
    *,
    n_kv_heads: int,
    sem_scale: float | None = None,
    geo_scale: float | None = None,
    run: Launch = launch_decode,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The op's flat arguments -> out (B, H_q, T, D_v) in q's dtype and lse (B, H_q, T) float32; ``run`` launches."""
    return run(
        {"k_sem": q_sem, "k_geo": q_geo},
        {
            "k_sem": (k_sem_codes, k_sem_scales, k_sem_kind),
            "k_geo": (k_geo_codes, k_geo_scales, k_geo_kind),
            "v": (v_codes, v_scales, v_kind),
        },
        cache_seqlens,
        {"k_sem": sem_scale, "k_geo": geo_scale},
        n_kv_heads=n_kv_heads,
        **options,
    )
