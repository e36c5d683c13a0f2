"""extend_attention: attention of a prompt chunk over the cache (chunked prefill), with bounded scratch memory.

The same attention as `decode_attention`, for any number of query tokens. Neither a prompt × cache mask nor a
dequantized copy of the cache is materialized: the reference dequantizes a range of the cache at a time, the kernels a
tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.formats import FORMATS
from caramba_fast.ops import attention_call
from caramba_fast.ops.attention import QUERIES_PER_PIECE
from caramba_fast.ops.checks import tangents_go_along
from caramba_fast.ops.registry import DECOUPLED, STANDARD, forced_backend
from caramba_fast.ops.view import KVView, Lanes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.ops.options import DecoupledExtendOptions, ExtendOptions

EXTRA = (f"int q_chunk={QUERIES_PER_PIECE}", "bool batch_invariant=True")
#: dtype -> the unquantized kind of that dtype.
KINDS = {row.dtype: row.name for row in FORMATS.values() if not row.quantized}

extend_op = attention_call.attention_op("extend_attention", STANDARD, EXTRA)
decoupled_extend_op = attention_call.attention_op("decoupled_extend_attention", DECOUPLED, EXTRA)


def window_of(options: dict[str, Any]) -> dict[str, Any]:
    """Replaces ``local_window=w`` by ``window_size=(w - 1, 0)``."""
    window = options.pop("local_window", None)
    if window is None:
        return options
    if "window_size" in options:
        raise ValueError(
            "local_window and window_size were both given; they say the same, give one"
        )
    if window < 1:
        raise ValueError(f"local_window is {window}; 1 or more is allowed")
    return {**options, "window_size": (window - 1, 0)}


def extend_attention(
    q: Tensor,
    k: KVView,
    v: KVView,
    cache_seqlens: Tensor,
    *,
    n_kv_heads: int,
    return_softmax_lse: bool = False,
    **options: Unpack[ExtendOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a prompt chunk over the cache, which already includes the chunk.

    Args:
        q: (B, H_q, T, D), any T.
        q_chunk: query tokens processed at a time; bounds the scratch memory. The Triton kernels use at least 2,048:
            their scratch is the size of the queries in float32, independent of the cache.
        batch_invariant: whether a query's result is bit-identical however many queries are in the call. If False, the
            C++ kernels read unquantized streams with faster passes for many queries, which sum in another order.
        local_window: tokens a query sees, itself included; w means ``window_size=(w - 1, 0)``.
        k, v, cache_seqlens, n_kv_heads, return_softmax_lse, options: as in `decode_attention`.

    Returns:
        out (B, H_q, T, D_v) in q's dtype, and lse (B, H_q, T) float32 if requested.

    Raises:
        RuntimeError: in a backward pass through the results, or in forward-mode differentiation; it has no derivative.
        TypeError, ValueError: an unknown option or invalid argument; the message names it.
    """
    out, lse = attention_call.call(
        extend_op, {"k": q}, {"k": k, "v": v}, cache_seqlens, n_kv_heads, window_of({**options})
    )
    return (out, lse) if return_softmax_lse else out


def decoupled_extend_attention(
    q_sem: Tensor,
    q_geo: Tensor,
    k_sem: KVView,
    k_geo: KVView,
    v: KVView,
    cache_seqlens: Tensor,
    *,
    n_kv_heads: int,
    return_softmax_lse: bool = False,
    **options: Unpack[DecoupledExtendOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`extend_attention` with semantic and geometric keys, as `decoupled_decode_attention`."""
    out, lse = attention_call.call(
        decoupled_extend_op, {"k_sem": q_sem, "k_geo": q_geo}, {"k_sem": k_sem, "k_geo": k_geo, "v": v},
        cache_seqlens, n_kv_heads, window_of({**options}),
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def serves_prompts(*tensors: Tensor) -> bool:
    """Whether `causal_attention` is usable, and fastest, for a prompt with these queries, keys and values.

    On a CPU the C++ kernels are faster than torch's ``scaled_dot_product_attention``, but have no derivatives and do
    not serve ``torch.compile`` and fake tensors.
    """
    if torch.compiler.is_compiling() or tensors[0].device.type != "cpu":
        return False
    if any(type(x) is not Tensor for x in tensors):
        return False
    if tangents_go_along() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    if forced_backend() not in (None, "cpp") or extend_op.why_not("cpp", "cpu") is not None:
        return False
    return all(x.dtype in KINDS for x in tensors)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[ExtendOptions]) -> Tensor:
    """`extend_attention` over plain keys and values without a cache.

    Args:
        q: (B, H_q, T, D).
        k: (B, H_kv, T, D); v: (B, H_kv, T, D_v); float32, float16 or bfloat16.
        options: options of `extend_attention` that do not concern a cache; ``batch_invariant`` defaults to False.

    Returns:
        (B, H_q, T, D_v) in q's dtype; errors as in `extend_attention`.
    """
    lanes = Lanes.of(k.shape[1], k.shape[3], v.shape[3])
    keys, values = (KVView(lanes.pack(x).contiguous(), None, KINDS[x.dtype]) for x in (k, v))
    lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
    options.setdefault("batch_invariant", False)
    out = extend_attention(q, keys, values, lengths, n_kv_heads=k.shape[1], **options)
    assert isinstance(out, Tensor)
    return out
