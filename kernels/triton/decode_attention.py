"""decode_attention in Triton: partial results of splits of the cache, then their merge.

Three launches at most: the queries' transform where K has one, the splits, the merge. What they compute
is defined by `caramba_fast.ops.attention`; the kernels are in tiles_kernel, tiles_query and merge_splits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .balanced_launch import launch_decode
from .splits_launch import Launch


def decode_attention(
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
    run: Launch = launch_decode,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The op's flat arguments -> out (B, H_q, T, D_v) in q's dtype and lse (B, H_q, T) float32; ``run`` launches."""
    return run(
        {"k": q},
        {"k": (k_codes, k_scales, k_kind), "v": (v_codes, v_scales, v_kind)},
        cache_seqlens,
        {"k": softmax_scale},
        n_kv_heads=n_kv_heads,
        **options,
    )
