"""extend_attention: a chunk of a prompt on top of what is cached, in bounded scratch.

The same attention as `decode_attention`, for any number of query tokens. In the reference a stretch of the cache is
dequantized, attended to by a chunk of queries, and merged into the result; the kernels dequantize a tile at a time. A
mask of prompt × cache or a dequantized copy of the cache never exists.
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
#: Kinds whose codes are the values, by their dtype.
KINDS = {row.dtype: row.name for row in FORMATS.values() if not row.quantized}

extend_op = attention_call.attention_op("extend_attention", STANDARD, EXTRA)
decoupled_extend_op = attention_call.attention_op("decoupled_extend_attention", DECOUPLED, EXTRA)


def window_of(options: dict[str, Any]) -> dict[str, Any]:
    """``local_window=w`` is another way to say ``window_size=(w - 1, 0)``."""
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
    """Attention of a prompt chunk over what is cached, itself included.

    Args:
        q: (B, H_q, T, D), any T.
        q_chunk: query tokens taken at a time; bounds the scratch. The Triton kernels take 2,048 where it is less: their
            scratch is the queries' size in float32, whatever is cached.
        batch_invariant: whether a query gets the same bits among many as among few. If not, the C++ kernels take what
            is not quantized by faster passes for many queries, which sum up in another order.
        local_window: tokens a query reaches back, itself included: ``window_size=(w - 1, 0)``.
        k, v, cache_seqlens, n_kv_heads, return_softmax_lse, options: as in `decode_attention`.

    Returns:
        out (B, H_q, T, D_v) in q's dtype, and lse (B, H_q, T) float32 if asked for.

    Raises:
        TypeError, ValueError: naming every argument that is wrong, what it was and what is allowed.
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
    """Whether `causal_attention` is what a prompt of these queries, keys and values takes least time with.

    On a CPU the C++ kernels are faster than torch's ``scaled_dot_product_attention``. They have no derivatives, and
    what ``torch.compile`` and fake tensors make of the latter is left to them.
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
    """`extend_attention` of tokens to themselves, over keys and values that no cache holds.

    Args:
        q: (B, H_q, T, D).
        k: (B, H_kv, T, D); v: (B, H_kv, T, D_v); float32, float16 or bfloat16.
        options: of `extend_attention`, those about a cache left out; ``batch_invariant`` is False unless given.

    Returns:
        (B, H_q, T, D_v) in q's dtype.

    Raises:
        TypeError, ValueError: as `extend_attention`.
    """
    lanes = Lanes.of(k.shape[1], k.shape[3], v.shape[3])
    keys, values = (KVView(lanes.pack(x).contiguous(), None, KINDS[x.dtype]) for x in (k, v))
    lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
    options.setdefault("batch_invariant", False)
    out = extend_attention(q, keys, values, lengths, n_kv_heads=k.shape[1], **options)
    assert isinstance(out, Tensor)
    return out
