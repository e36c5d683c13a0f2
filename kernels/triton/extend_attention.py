"""extend_attention in Triton: decode_attention's kernels with blocks of a prompt's queries for a program.

Three launches at most, however long the cache is: the queries' transform where K has one, the blocks, the merge. What
they compute is defined by `caramba_fast.ops.attention`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .extend_launch import launch_extend


def extend_attention(
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
    softmax_scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The op's flat arguments -> out (B, H_q, T, D_v) in q's dtype and lse (B, H_q, T) float32."""
    return launch_extend(
        {"k": q},
        {"k": (k_codes, k_scales, k_kind), "v": (v_codes, v_scales, v_kind)},
        cache_seqlens,
        {"k": softmax_scale},
        n_kv_heads=n_kv_heads,
        **options,
    )
