"""apply_rotary_emb in Triton: a program turns some heads of one token, of queries or of keys, in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .casts import from_float32, to_float32
from .launch import ALIGNED, EXACT, dense, is_recording, made, on_device, recording, returned, start
from .new_tokens import rounded

#: Heads of one program, and its warps.
HEADS = 8
NUM_WARPS = 1


@triton.jit
def turn_heads(
    source,
    step,
    cos_ptr,
    sin_ptr,
    target,
    there,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Heads (R, 1) that begin at ``source``, values ``step`` apart, of one token -> contiguous heads at ``target``."""
    d = tl.arange(0, PADDED)[None, :]
    mask = there & (d < HALF)
    cos_a = to_float32(tl.load(cos_ptr + d, mask=d < HALF, other=0.0))
    sin_a = to_float32(tl.load(sin_ptr + d, mask=d < HALF, other=0.0))
    cos_b = to_float32(tl.load(cos_ptr + (WIDTH - HALF) + d, mask=d < HALF, other=0.0))
    sin_b = to_float32(tl.load(sin_ptr + (WIDTH - HALF) + d, mask=d < HALF, other=0.0))
    value = d.to(tl.int64)
    a = to_float32(tl.load(source + value * step, mask=mask, other=0.0))
    b = to_float32(tl.load(source + (value + HALF) * step, mask=mask, other=0.0))
    first = rounded(a * cos_a, target) - rounded(b * sin_a, target)
    second = rounded(b * cos_b, target) + rounded(a * sin_b, target)
    tl.store(target + d, from_float32(first, target.dtype.element_ty), mask=mask)
    tl.store(target + HALF + d, from_float32(second, target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["q_heads", "k_heads", "tokens"])
def apply_rotary_emb_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out,
    k_out,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    cos_row,
    q_heads,
    k_heads,
    tokens,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """q, k (B, H, T, 2 * HALF), last dimension contiguous; cos and sin rows of WIDTH -> contiguous outs.

    Grid (B * T, groups of HEADS heads of q, then of k).
    """
    token = tl.program_id(0).to(tl.int64)
    row, here = token // tokens, token % tokens
    table = row * cos_row + here * WIDTH
    group, groups = tl.program_id(1), tl.cdiv(q_heads, HEADS)
    if group < groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        source = q_ptr + row * q_row + head.to(tl.int64) * q_head + here * q_token
        target = q_out + ((row * q_heads + head) * tokens + here) * (2 * HALF)
        there = head < q_heads
        turn_heads(source, 1, cos_ptr + table, sin_ptr + table, target, there, HALF, PADDED, WIDTH)
    else:
        head = (group - groups) * HEADS + tl.arange(0, HEADS)[:, None]
        source = k_ptr + row * k_row + head.to(tl.int64) * k_head + here * k_token
        target = k_out + ((row * k_heads + head) * tokens + here) * (2 * HALF)
        there = head < k_heads
        turn_heads(source, 1, cos_ptr + table, sin_ptr + table, target, there, HALF, PADDED, WIDTH)


def constants(dim: int, width: int) -> dict[str, int]:
    """The constexpr arguments for heads of ``dim`` values and tables of ``width``."""
    half = dim // 2
    return {"HALF": half, "PADDED": triton.next_power_of_2(half), "WIDTH": width, "HEADS": HEADS}


#: Launches of earlier calls by shapes and strides: a model makes the same call in every layer and step.
#: None where a call cannot be repeated.
_kept: dict[tuple[Any, ...], Any] = {}
MOST_KEPT, UNKNOWN = 64, object()


def apply_rotary_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (B, H, T, D); cos, sin (B or 1, T, D or D / 2) -> both rotated, contiguous."""
    given = (q, k, cos, sin)
    call = tuple([(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNED) for x in given])
    replay = _kept.get(call, UNKNOWN)
    if replay is UNKNOWN and not is_recording():
        if not belongs(q, k, cos, sin):
            raise ValueError("q, k, cos and sin do not belong together: ops.apply_rotary_emb")
        with recording() as recorded:
            found: Any = _launched(*given)
        if len(_kept) >= MOST_KEPT:
            _kept.pop(list(_kept)[0], None)  # noqa: RUF015 - other threads may add while an iterator stands
        _kept[call] = recorded.replay(given, ())
        return found
    found = None if replay in (None, UNKNOWN) else replay(given)
    return _launched(*given) if found is None else found


def belongs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether shapes and dtypes are those that `ops.apply_rotary_emb` asks for."""
    rows, _, tokens, dim = q.shape
    fit = {(row, tokens, width) for row in (rows, 1) for width in (dim, dim // 2)}
    same = (k.shape[0], *k.shape[2:]) == (rows, tokens, dim) and dim % 2 == 0
    types = {x.dtype for x in (q, k, cos, sin)}
    return same and cos.shape == sin.shape and cos.shape in fit and len(types) == 1


def _launched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    found = made(q, q.shape), made(k, k.shape)
    turn(q, k, cos, sin, *found)
    returned(*found)
    return found


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor) -> None:
    """`apply_rotary_emb` into contiguous outs."""
    cos, sin = dense(cos), dense(sin)
    rows, heads, tokens, dim = q.shape
    if rows * tokens * dim == 0:
        return
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    groups = triton.cdiv(heads, HEADS) + triton.cdiv(k.shape[1], HEADS)
    with on_device(q):
        start(
            apply_rotary_emb_kernel, (rows * tokens, groups),
            q, k, cos, sin, q_out, k_out, *q.stride()[:3], *k.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0, heads, k.shape[1], tokens,
            **constants(dim, cos.shape[-1]), num_warps=NUM_WARPS, **EXACT,
        )  # fmt: skip
