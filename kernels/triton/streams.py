"""What a kernel that writes to a cache is told: the streams of a layer and where its rows are.

Kernels take these as named tuples: one argument a stream, whatever it consists of. Absent tensors are
None, which Triton specializes on as it does on constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from caramba_fast.formats import resolve

#: Values of an unquantized stream that are handled like a block.
PLAIN_BLOCK = 32
CONSTANTS = ("mean", "bias", "pairs", "phases", "scale")


class Stream(NamedTuple):
    """One stream at run time: tensors, their strides in elements, their sizes.

    Buffers are (row or page, lane, slot, value) with contiguous (slot, value); constants of the
    transform are contiguous. ``phase_rows`` are those of the phase table.
    """

    new: Any
    new_row: int
    new_head: int
    new_token: int
    new_dim: int
    codes: Any
    codes_row: int
    codes_lane: int
    slots: int
    pages: int
    scales: Any
    scales_row: int
    scales_lane: int
    tail: Any
    tail_row: int
    tail_lane: int
    ring: int
    sink: Any
    sink_row: int
    sink_lane: int
    sink_len: int
    mean: Any
    bias: Any
    pairs: Any
    phases: Any
    phase_rows: int
    scale: Any


class Layout(NamedTuple):
    """One stream at compile time.

    Attributes:
        FORMAT, BITS, FIT: as in `formats`.
        DIM, HEADS: values of a head, heads of a lane.
        BLOCK, BLOCKS: values of a block, blocks of a lane.
        STRIDE: blocks from one token to the next in a program's tile: BLOCKS, or the power of two
            above if the stream is rotated, for which the tile has to hold whole tokens.
        ROWS: blocks of a program's tile.
        PAIRS: pairs of dims with a turning bias; 0 without.
        ROTATE: whether the stream is rotated.
    """

    FORMAT: int
    BITS: int
    FIT: str
    DIM: int
    HEADS: int
    BLOCK: int
    BLOCKS: int
    STRIDE: int
    ROWS: int
    PAIRS: int
    ROTATE: bool


class Rows(NamedTuple):
    """Per-row tensors (B,) and the block table (B, pages), shared by the streams."""

    start: Any
    query_lens: Any
    leftpad: Any
    table: Any
    table_row: int
    table_pages: int


def contiguous(x: Tensor | None) -> Tensor | None:
    """x itself in every ordinary call."""
    return None if x is None else x.contiguous()


def _plane(name: str, buffer: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """A buffer with its strides of rows and lanes and its slots."""
    if buffer is None:
        return None, 0, 0, 0
    row, lane, slot, value = buffer.stride()
    if value != 1 or slot != buffer.shape[3]:
        raise ValueError(
            f"{name} has strides {buffer.stride()}; slots have to follow one another in memory"
        )
    return buffer, row, lane, buffer.shape[2]


def stream(
    name: str, codes: Tensor, scales: Tensor | None, new: Tensor, options: dict[str, Any]
) -> Stream:
    """The run-time side of stream ``name`` of an op's flat arguments."""
    # Strides of dims of size 1 are arbitrary: not a reason to compile again.
    strides = [s if n > 1 else 0 for s, n in zip(new.stride(), new.shape, strict=True)]
    constants = {part: contiguous(options.get(f"{name}_{part}")) for part in CONSTANTS}
    phases = constants["phases"]
    tail = _plane(f"{name}_tail", options.get(f"{name}_tail"))
    sink = _plane(f"{name}_sink", options.get(f"{name}_sink"))
    return Stream(
        new, *strides[:3], 1 if new.shape[3] == 1 else strides[3],
        *_plane(f"{name}_codes", codes), codes.shape[0], *_plane(f"{name}_scales", scales)[:3],
        *tail, *sink, constants["mean"], constants["bias"], constants["pairs"], phases,
        0 if phases is None else phases.shape[2], constants["scale"],
    )  # fmt: skip


def layout(
    name: str,
    kind: str,
    codes: Tensor,
    scales: Tensor | None,
    dim: int,
    values: int,
    options: dict[str, Any],
) -> Layout:
    """The compile-time side; a program handles ``values`` values, or one token if that is more."""
    form = resolve(kind)
    lane = form.value_width(codes.shape[-1])
    block = PLAIN_BLOCK if scales is None else lane // scales.shape[-1]
    blocks, rotate = lane // block, bool(options.get(f"rotate_{name}", False))
    whole = triton.next_power_of_2(blocks)
    bias = options.get(f"{name}_bias")
    return Layout(
        form.index, form.bits, options.get(f"fit_{name}", "amax"), dim, lane // dim, block, blocks,
        whole if rotate else blocks, max(whole, values // block), 0 if bias is None else bias.shape[1],
        rotate,
    )  # fmt: skip


def rows(start: Tensor, options: dict[str, Any]) -> Rows:
    """Where rows are, from an op's flat arguments."""
    table = contiguous(options.get("block_table"))
    return Rows(
        contiguous(start),
        contiguous(options.get("query_lens")),
        contiguous(options.get("cache_leftpad")),
        table,
        *((0, 0) if table is None else (table.stride(0), table.shape[1])),
    )
