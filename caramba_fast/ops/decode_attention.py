"""decode_attention: attention of a few new queries over a packed cache, without dequantizing it first.

The new tokens are already in the cache; query ``i`` of row ``b`` is at position ``cache_seqlens[b] - T + i`` and sees
the keys up to and including its own. The reference in `caramba_fast.ops.attention` defines the result.

`decoupled_decode_attention` has two key streams and one softmax (decoupled bottleneck attention, DBA): a score is
``q_sem · k_sem * sem_scale + q_geo · k_geo * geo_scale``. RoPE is applied to geometric keys only. Each stream has its
own width, format and basis; values are shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from caramba_fast.ops import attention_call
from caramba_fast.ops.registry import DECOUPLED, STANDARD
from caramba_fast.ops.view import KVView

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.ops.options import AttentionOptions, DecoupledAttentionOptions

decode_op = attention_call.attention_op("decode_attention", STANDARD)


def decode_attention(
    q: Tensor,
    k: KVView,
    v: KVView,
    cache_seqlens: Tensor,
    *,
    n_kv_heads: int,
    return_softmax_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T new queries per row over the cache.

    Args:
        q: (B, H_q, T, D) float32, float16 or bfloat16; H_q a multiple of ``n_kv_heads``, T up to 32.
        k, v: stored K and V with their tails and sinks. Slots at or past a row's length may hold anything, including
            NaN; they do not affect the result. q and the null key and value are in the model's basis; the op handles
            the rotation of rotated streams.
        cache_seqlens: (B,) int32 on q's device, tokens cached **including** the new ones.
        n_kv_heads: kv heads stored (lanes may hold padding beyond them).
        return_softmax_lse: also return lse (B, H_q, T) float32, natural log.
        block_table: (B, pages) int32 for a paged cache; entries past a row's length may hold anything.
        cache_leftpad: (B,) int32, leading slots of a row that hold padding.
        query_lens: (B,) int32, how many of a row's T queries are real; by default all. The others, at the end, get out
            0 and lse -inf, and cache_seqlens does not count them.
        residual_len: keys at a distance of less than this before a query are read from the fp16 tail.
        null_k, null_v: (H_kv, D), (H_kv, D_v) float32, float16 or bfloat16, a learned key and value that every query
            sees.
        s_aux: (H_q,) of the same dtypes, attention sinks (gpt-oss): one more logit per head in the softmax, without a
            value. It counts in lse, so pass it for only one part when parts are merged.
        softmax_scale: multiplies q·k; default 1 / sqrt(D).
        window_size: (left, right) as in flash-attn, -1 for no limit; a query at position p sees keys from p - left,
            never later than its own.
        num_sink_tokens: number of first real tokens that stay visible outside the window.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); 0 for none.
        num_splits: KV splits (flash-decoding). 0: the kernel chooses by shapes, so that a row's bits do not depend on
            the other rows' lengths. -1, for rows of different lengths: the work of all rows is divided into equal
            shares by the lengths, which only the device reads, so that one long row does not determine the latency. The
            result differs only by rounding, which then depends on the other rows. For prompts and in plain torch -1
            means 0; on a CPU 0 and -1 both divide the work of all rows.

    Returns:
        out (B, H_q, T, D_v) in q's dtype, and lse if requested. A query that sees no key gets out 0 and lse -inf.

    Raises:
        RuntimeError: in a backward pass through the results, or in forward-mode differentiation; it has no derivative.
        TypeError, ValueError: an unknown option or invalid argument; the message names it.
    """
    out, lse = attention_call.call(
        decode_op, {"k": q}, {"k": k, "v": v}, cache_seqlens, n_kv_heads, options
    )
    return (out, lse) if return_softmax_lse else out


decoupled_decode_op = attention_call.attention_op("decoupled_decode_attention", DECOUPLED)


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
    **options: Unpack[DecoupledAttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode_attention` with semantic and geometric keys.

    Args:
        q_sem: (B, H_q, T, D_sem) float32, float16 or bfloat16.
        q_geo: (B, H_q, T, D_geo), same dtype.
        k_sem, k_geo, v: the three stored streams, with the same number of heads per lane.
        sem_scale, geo_scale: factors of the two products; default 1 / sqrt(D_sem), 1 / sqrt(D_geo).
        null_k_sem, null_k_geo, null_v: (H_kv, D_sem), (H_kv, D_geo) and (H_kv, D_v), all or none.
        cache_seqlens, n_kv_heads, return_softmax_lse, options: as in `decode_attention`.

    Returns:
        out (B, H_q, T, D_v) in q's dtype, and lse (B, H_q, T) float32 if requested.

    Raises:
        RuntimeError: in a backward pass through the results, or in forward-mode differentiation; it has no derivative.
        TypeError, ValueError: an unknown option or invalid argument; the message names it.
    """
    out, lse = attention_call.call(
        decoupled_decode_op, {"k_sem": q_sem, "k_geo": q_geo}, {"k_sem": k_sem, "k_geo": k_geo, "v": v}, cache_seqlens,
        n_kv_heads, options,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
