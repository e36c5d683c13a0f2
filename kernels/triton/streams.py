"""What a kernel that writes to a cache is told: the streams of a layer and where its rows are.

Kernels take these as named tuples, one argument a stream. A tensor that is absent is None, on which
Triton specializes as on a constant; so it does on everything in `Layout`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import triton
from torch import Tensor

from caramba_fast.formats import PACKED_TOGETHER, resolve

from .basis import WIDTH_BITS
from .launch import dense

#: Values of an unquantized stream that are handled like a block, where the lane's width is a multiple.
PLAIN_BLOCK = 32
#: Heads are rotated if they are narrower; `basis.hadamard` goes through as many bits.
WIDEST_ROTATED = 1 << WIDTH_BITS.value


class Stream(NamedTuple):
    """One stream at run time: tensors, their strides in elements, their sizes.

    ``new`` is (row, head, token, dim), ``new_dim`` None where values are neighbours; buffers are (row or
    page, lane, slot, value), slots following one another in memory. ``cos`` and ``sin`` turn new tokens, if not None;
    their rows are ``cos_row`` elements apart. ``query_rms`` is (lane, value), contiguous.
    """

    new: Any
    new_row: Any
    new_head: Any
    new_token: Any
    new_dim: Any
    codes: Any
    codes_row: Any
    codes_lane: Any
    slots: Any
    scales: Any
    scales_row: Any
    scales_lane: Any
    tail: Any
    tail_row: Any
    tail_lane: Any
    sink: Any
    sink_row: Any
    sink_lane: Any
    cos: Any = None
    sin: Any = None
    cos_row: Any = None
    query_rms: Any = None


class Queries(NamedTuple):
    """Queries that an append turns as well: (row, head, token, dim), ``dim`` None where values are neighbours.

    ``out`` is contiguous; cos and sin as in `Stream`.
    """

    q: Any
    q_row: Any
    q_head: Any
    q_token: Any
    q_dim: Any
    out: Any
    heads: Any
    cos: Any
    sin: Any
    cos_row: Any


class Layout(NamedTuple):
    """One stream at compile time.

    Attributes:
        FORMAT, BITS, FIT: as in `formats`.
        DIM, HEADS: values of a head, heads of a lane.
        PAD: the power of two above DIM, or DIM.
        SPREAD: columns of a tile of whole tokens whose heads take PAD columns each.
        BLOCK, BLOCKS: values of a block, blocks of a lane.
        STRIDE: blocks from one token to the next in a program's tile: BLOCKS, or if the stream is rotated
            the power of two above, for then a tile holds whole tokens.
        ROWS: blocks of a program's tile.
        ROTATE: whether the stream is rotated.
        GROUP: tokens that are encoded together; 1 for a kind by token.
        ROTARY: values of a token in cos and in sin, DIM or half of it; 0 where new tokens are not turned.
    """

    FORMAT: int
    BITS: int
    FIT: str
    DIM: int
    HEADS: int
    PAD: int
    SPREAD: int
    BLOCK: int
    BLOCKS: int
    STRIDE: int
    ROWS: int
    ROTATE: bool
    GROUP: int = 1
    ROTARY: int = 0


class Rows(NamedTuple):
    """What streams share: tensors (B,), the block table (B, pages), slots of the tail and of the sinks.

    The last three, the stride and the pages of a row of the table and all pages there are, a launch gives one by one
    (see `append_kernel`).
    """

    start: Any
    query_lens: Any
    leftpad: Any
    table: Any
    ring: Any
    sink_len: Any
    table_row: Any
    table_pages: Any
    pages: Any


@functools.cache
def layout(
    kind: str,
    dim: int,
    heads: int,
    block: int | None = None,
    *,
    fit: str = "amax",
    rotate: bool = False,
    tokens: int = 1,
    group: int = 1,
    rotary: int = 0,
) -> Layout:
    """For lanes of ``heads`` heads of ``dim``; a program takes ``tokens`` tokens, or a few more.

    ``block`` is None for a kind without scales. Cached, for it is asked for at each launch.
    """
    if rotate and dim >= WIDEST_ROTATED:
        raise NotImplementedError(
            f"the Triton kernels rotate heads narrower than {WIDEST_ROTATED}, not of {dim} "
            "(use_backend('reference') does)"
        )
    form, block = resolve(kind), block or math.gcd(PLAIN_BLOCK, heads * dim)
    blocks = heads * dim // block
    whole, pad = triton.next_power_of_2(blocks), triton.next_power_of_2(dim)
    stride, count = whole if rotate else blocks, whole * tokens
    return Layout(
        form.index, form.bits, fit, dim, heads, pad, triton.next_power_of_2(heads * pad), block, blocks,
        stride, count, rotate, group, rotary,
    )  # fmt: skip


def layout_of(
    name: str,
    kind: str,
    codes: Tensor,
    scales: Tensor | None,
    new: Tensor,
    options: dict[str, Any],
    tokens: int,
    rotary: Tensor | None = None,
) -> Layout:
    """The compile-time side of stream ``name`` of an op's flat arguments."""
    form, dim = resolve(kind), new.shape[3]
    lane, block, group = form.value_width(codes.shape[3]), None, 1
    if form.by_channel:
        assert scales is not None
        block, group = PACKED_TOGETHER, codes.shape[2] // scales.shape[2]
    elif scales is not None:
        block = lane // scales.shape[3]
    return layout(
        kind,
        dim,
        lane // dim,
        block,
        fit=options.get(f"fit_{name}", "amax"),
        rotate=bool(options.get(f"rotate_{name}", False)),
        tokens=tokens,
        group=group,
        rotary=0 if rotary is None else rotary.shape[-1],
    )


def steps_of(x: Tensor) -> tuple[int, int, int, int | None]:
    """Strides of (B, H, T, D), the last None where values are neighbours."""
    # The stride of a single row, head or token is arbitrary, no reason to compile again.
    row, head, token, dim = (
        step if size > 1 else 0 for step, size in zip(x.stride(), x.shape, strict=True)
    )
    return row, head, token, None if dim == 1 else dim


def stream_of(
    name: str,
    codes: Tensor,
    scales: Tensor | None,
    new: Tensor,
    options: dict[str, Any],
    table: tuple[Any, Any, Any] = (None, None, None),
) -> Stream:
    """The run-time side of stream ``name`` of an op's flat arguments; ``table``: cos, sin, their stride of rows."""
    return Stream(
        new, *steps_of(new),
        *_plane(f"{name}_codes", codes), *_plane(f"{name}_scales", scales)[:3],
        *_plane(f"{name}_tail", options.get(f"{name}_tail"))[:3],
        *_plane(f"{name}_sink", options.get(f"{name}_sink"))[:3], *table,
        dense(options.get(f"{name}_query_rms")),
    )  # fmt: skip


def rows_of(name: str, codes: Tensor, start: Tensor, options: dict[str, Any]) -> Rows:
    """Where rows are, from an op's flat arguments; ``name`` is any stream, ``codes`` are its codes."""
    table = options.get("block_table")
    tail, sink = options.get(f"{name}_tail"), options.get(f"{name}_sink")
    table = dense(table)
    return Rows(
        dense(start),
        dense(options.get("query_lens")),
        dense(options.get("cache_leftpad")),
        table,
        0 if tail is None else tail.shape[2],
        0 if sink is None else sink.shape[2],
        *((0, 0, 0) if table is None else (table.stride(0), table.shape[1], codes.shape[0])),
    )


def _plane(name: str, buffer: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """A buffer, its strides of rows and lanes, its slots."""
    if buffer is None:
        return None, 0, 0, 0
    row, lane, slot, value = buffer.stride()
    _, _, slots, width = buffer.shape
    # The stride of a dimension of size 1 is arbitrary; elements of an expanded one share memory.
    shared = any(step == 0 and n > 1 for step, n in zip((row, lane), buffer.shape, strict=False))
    if (value != 1 and width > 1) or (slot != width and slots > 1) or shared:
        raise NotImplementedError(
            f"the Triton kernels cannot write {name} of strides {buffer.stride()}: a lane's slots must be "
            "contiguous, and rows and lanes apart (use_backend('reference') can)"
        )
    return buffer, row, lane, slots
