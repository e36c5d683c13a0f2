"""merge_state in Triton: two partial attentions of the same queries become one, a program some rows of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .casts import from_float32, to_float32
from .launch import as_rows, on_device

#: Values of each side that one program reads: with 4 warps 16 a thread.
VALUES_PER_PROGRAM = 2048
NUM_WARPS = 4


@triton.jit
def merge_state_kernel(
    a_ptr,
    a_lse_ptr,
    b_ptr,
    b_lse_ptr,
    out_ptr,
    lse_ptr,
    a_stride,
    b_stride,
    n_rows,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of DIM values with row strides, and contiguous lse -> contiguous out and lse."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)[None, :]
    there = row < n_rows
    mask = there[:, None] & (column < DIM)
    a_lse = tl.load(a_lse_ptr + row, mask=there, other=0.0)
    b_lse = tl.load(b_lse_ptr + row, mask=there, other=0.0)
    largest = tl.maximum(a_lse, b_lse, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # NaN stays
    a_weight, b_weight = tl.exp(a_lse - base), tl.exp(b_lse - base)
    total = a_weight + b_weight
    divisor = tl.where(total == 0.0, 1.0, total)
    a = to_float32(tl.load(a_ptr + row[:, None] * a_stride + column, mask=mask, other=0.0))
    b = to_float32(tl.load(b_ptr + row[:, None] * b_stride + column, mask=mask, other=0.0))
    out = a * (a_weight / divisor)[:, None] + b * (b_weight / divisor)[:, None]
    target = out_ptr + row[:, None] * DIM + column
    tl.store(target, from_float32(out, out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + row, base + tl.log(total), mask=there)


def constants(dim: int) -> dict[str, int]:
    """The constexpr arguments for rows of ``dim`` values."""
    padded = triton.next_power_of_2(dim)
    return {"DIM": dim, "PADDED": padded, "ROWS": max(1, VALUES_PER_PROGRAM // padded)}


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """out_a, out_b (..., T, D) and lse_a, lse_b (..., T) float32 -> out and lse of these shapes."""
    out, lse = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
    if out.numel() == 0:
        return out, lse
    a, b = as_rows(out_a), as_rows(out_b)
    whole, sums = out.view(a.shape), lse.view(-1)
    a_sums, b_sums = (x.reshape(-1).contiguous() for x in (lse_a, lse_b))
    fixed = constants(a.shape[1])
    with on_device(out_a):
        merge_state_kernel[(triton.cdiv(a.shape[0], fixed["ROWS"]),)](
            a, a_sums, b, b_sums, whole, sums, a.stride(0), b.stride(0), a.shape[0],
            **fixed, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out, lse
