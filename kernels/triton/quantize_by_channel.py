"""quantize of kinds by channel in Triton: a program encodes some channels of one group of tokens.

Bit-exact with the reference of `caramba_fast.ops.quantize`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import PACKED_TOGETHER, SCALE_DTYPE, Format, resolve

from .casts import to_float32
from .formats import encode_channel_pairs, encode_channels
from .launch import EXACT, as_rows, on_device

#: Values of one program, or 32 channels of a group that is larger: 16 a thread, of 4 bits half as many, in registers.
VALUES_PER_PROGRAM, THREAD_VALUES = 2048, 16


@triton.jit
def quantize_channel_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    row_stride,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    PACKED: tl.constexpr,
    BITS: tl.constexpr,
    FIT: tl.constexpr = "amax",
):
    """x (rows, DIM) with ``row_stride`` -> contiguous codes and scales; BLOCKS times PACKED channels a program."""
    SIZE: tl.constexpr = PACKED * BITS // 8  # bytes that hold PACKED channels of a token
    PARTS: tl.constexpr = (DIM + BLOCKS * PACKED - 1) // (BLOCKS * PACKED)
    group = tl.program_id(0).to(tl.int64) // PARTS
    byte = tl.program_id(0) % PARTS * (BLOCKS * SIZE) + tl.arange(0, BLOCKS * SIZE)
    column = byte // SIZE * PACKED + byte % SIZE
    token = group * GROUP + tl.arange(0, GROUP)
    inside = (column < DIM)[None, :]
    counted = tl.arange(0, GROUP) >= 0
    source = x_ptr + token[:, None] * row_stride + column[None, :]
    scales = scales_ptr + group * (2 * DIM)
    low = to_float32(tl.load(source, mask=inside, other=0.0))
    at = scales + column
    if BITS == 4:
        high = to_float32(tl.load(source + SIZE, mask=inside, other=0.0))
        codes = encode_channel_pairs(low, high, counted, at, None, DIM, SIZE, FIT, column < DIM)
    else:
        codes = encode_channels(low, counted, at, DIM, column < DIM)
    target = codes_ptr + token[:, None] * (DIM // PACKED * SIZE) + byte[None, :]
    tl.store(target, codes.to(codes_ptr.dtype.element_ty), mask=inside)


def constants(
    form: Format, dim: int, group: int, values: int = VALUES_PER_PROGRAM
) -> dict[str, int]:
    """The constexpr arguments for rows of ``dim`` channels."""
    blocks = max(1, values // (group * PACKED_TOGETHER))
    most = triton.next_power_of_2(dim // PACKED_TOGETHER)
    return {
        "DIM": dim,
        "GROUP": group,
        "BLOCKS": min(blocks, most),
        "PACKED": PACKED_TOGETHER,
        "BITS": form.bits,
    }


def num_warps(fixed: dict[str, int], thread_values: int | None = None) -> int:
    """Warps of a program; without ``thread_values`` of one that quantizes."""
    thread_values = thread_values or THREAD_VALUES * fixed["BITS"] // 8
    return fixed["GROUP"] * fixed["BLOCKS"] * fixed["PACKED"] // (32 * thread_values) or 1


def programs(fixed: dict[str, int], groups: int) -> int:
    """Programs for so many groups."""
    return groups * -(-fixed["DIM"] // (fixed["BLOCKS"] * fixed["PACKED"]))


def quantize(x: Tensor, kind: str, block: int, fit: str = "amax") -> tuple[Tensor, Tensor]:
    """x (..., tokens, dim) -> codes (..., tokens, code width) and scales (..., tokens / block, 2 dim)."""
    form = resolve(kind)
    *lead, tokens, dim = x.shape
    codes = torch.empty((*lead, tokens, form.code_width(dim)), dtype=form.dtype, device=x.device)
    scales = torch.empty((*lead, tokens // block, 2 * dim), dtype=SCALE_DTYPE, device=x.device)
    if scales.numel() == 0:
        return codes, scales
    rows = as_rows(x)
    fixed = constants(form, dim, block)
    with on_device(x):
        quantize_channel_kernel[(programs(fixed, rows.shape[0] // block),)](
            rows,
            codes,
            scales,
            rows.stride(0),
            **fixed,
            FIT=fit,
            num_warps=num_warps(fixed),
            **EXACT,
        )
    return codes, scales
