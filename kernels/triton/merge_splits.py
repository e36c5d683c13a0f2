"""The splits of a query row become its output: exact merge, the null key, s_aux, the basis of V, the cast.

Every split left its normalized output and the base-2 logarithm of its sum; a split with lse -inf left
no output, and what lies there is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .balanced import pieces_of_line, programs_of_row, row_groups
from .basis import hadamard
from .casts import from_float32, to_float32
from .splits import row_span

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Splits whose outputs are read at once.
SPLITS_AT_ONCE = tl.constexpr(16)


@triton.jit
def capped(x, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(x / softcap), through one exponential that may overflow to the right answer."""
    if SOFTCAP:
        x = softcap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E / softcap)) + 1.0))
    return x


@triton.jit
def _merged(partial, lse, largest, splits, column, DIM: tl.constexpr, APART: tl.constexpr):
    """Sum over the splits, ``APART`` rows from one another, of 2^(lse - largest) * output, at ``column``."""
    total = tl.zeros(column.shape, tl.float32)
    for start in range(0, splits, SPLITS_AT_ONCE):
        split = start + tl.arange(0, SPLITS_AT_ONCE)
        weight = tl.load(lse + split * APART, mask=split < splits, other=float("-inf"))
        there = weight != float("-inf")
        weight = tl.where(there, tl.exp2(weight - largest), 0.0)
        mask = there[:, None] & (column < DIM)[None, :]
        x = tl.load(
            partial + split[:, None] * (APART * DIM) + column[None, :], mask=mask, other=0.0
        )
        total += tl.sum(x * weight[:, None], axis=0)
    return total


@triton.jit
def _null_logit(q, null_ptr, kv, factor, DIM: tl.constexpr, PADDED: tl.constexpr):
    dim = tl.arange(0, PADDED)
    x = to_float32(tl.load(q + dim, mask=dim < DIM, other=0.0))
    key = to_float32(tl.load(null_ptr + kv * DIM + dim, mask=dim < DIM, other=0.0))
    return tl.sum(x * key) * factor


@triton.jit
def _strided(q_ptr, batch, head, token, batch_stride, head_stride, token_stride):
    head, token = tl.cast(head, tl.int64), tl.cast(token, tl.int64)
    return q_ptr + batch * batch_stride + head * head_stride + token * token_stride


@triton.jit
def _pieces_of_row(row, batch, schedule, tokens, C: tl.constexpr):
    """Where the balanced partial results of a query row begin, in rows, and how many there are."""
    per_lane = C.per_lane * C.groups * tokens
    inner = row % per_lane
    line = batch * programs_of_row(C) + row // per_lane * row_groups(C) + inner // C.rows
    first, pieces = pieces_of_line(schedule, line, C)
    return first * C.rows + inner % C.rows, pieces


@triton.jit(do_not_specialize=["splits", "tokens"])
def merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    seqlens_ptr,
    query_lens_ptr,
    q_ptr,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    g_ptr,
    g_batch_stride,
    g_head_stride,
    g_token_stride,
    null_k_ptr,
    null_g_ptr,
    null_v_ptr,
    aux_ptr,
    factor,
    g_factor,
    softcap,
    splits,
    tokens,
    schedule_ptr,
    GROUPS: tl.constexpr,
    K_DIM: tl.constexpr,
    G_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
    MOST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROTATE: tl.constexpr,
    C: tl.constexpr = None,
):
    """One query row: partial (B, H_q * T, splits, D), lse (B, H_q * T, splits) -> out, natural lse.

    With ``C``, the record of a balanced launch: partial (pieces, C.rows, D), lse (pieces, C.rows), and its schedule.
    """
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, token = row // tokens, row % tokens
    kv, place = head // GROUPS, batch * tl.num_programs(0) + row
    _, _, count, _ = row_span(batch, seqlens_ptr, None, query_lens_ptr, tokens)
    APART: tl.constexpr = 1 if C is None else C.rows
    at = place * splits
    if C is not None:
        at, splits = _pieces_of_row(row, batch, schedule_ptr, tokens, C)
    lse, partial = lse_ptr + at, partial_ptr + at * DIM
    split = tl.arange(0, MOST)
    parts = tl.load(lse + split * APART, mask=split < splits, other=float("-inf"))
    logit = float("-inf")
    if null_v_ptr is not None:
        q = _strided(q_ptr, batch, head, token, q_batch_stride, q_head_stride, q_token_stride)
        logit = _null_logit(q, null_k_ptr, kv, factor, K_DIM, K_PADDED)
        if null_g_ptr is not None:
            q = _strided(g_ptr, batch, head, token, g_batch_stride, g_head_stride, g_token_stride)
            logit += _null_logit(q, null_g_ptr, kv, g_factor, G_DIM, K_PADDED)
        logit = capped(logit, softcap, SOFTCAP) * LOG2E
    aux = float("-inf")
    if aux_ptr is not None:
        aux = to_float32(tl.load(aux_ptr + head)) * LOG2E
    largest = tl.maximum(tl.maximum(tl.max(parts, axis=0), logit), aux)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.where(parts == float("-inf"), 0.0, tl.exp2(parts - largest))
    null_weight = tl.exp2(logit - largest)
    total = tl.sum(weights, axis=0) + null_weight + tl.exp2(aux - largest)
    dim = tl.arange(0, PADDED)
    inside = dim < DIM
    x = _merged(partial, lse, largest, splits, dim, DIM, APART)
    if ROTATE:
        x = tl.reshape(hadamard(x[None, :], DIM, PADDED), (PADDED,))
    if null_v_ptr is not None:
        value = tl.load(null_v_ptr + kv * DIM + dim, mask=inside, other=0.0)
        x += null_weight * to_float32(value)
    real = (token < count) & (total != 0.0)
    x = tl.where(real, x / tl.where(real, total, 1.0), 0.0)
    tl.store(out_ptr + place * DIM + dim, from_float32(x, out_ptr.dtype.element_ty), mask=inside)
    natural = (largest + tl.log2(tl.where(real, total, 1.0))) * LN2
    tl.store(out_lse_ptr + place, tl.where(real, natural, float("-inf")))
