"""What a kernel that writes to a cache is told: the streams of a layer and where its rows are.

Kernels take these as named tuples, one argument a stream. A tensor that is absent is None, on which
Triton specializes as on a constant; so it does on everything in `Layout`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from caramba_fast.formats import resolve

#: Values of an unquantized stream that are handled like a block.
PLAIN_BLOCK = 32


class Stream(NamedTuple):
    """One stream at run time: tensors, their strides in elements, their sizes.

    ``new`` is (row, head, token, dim); buffers are (row or page, lane, slot, value), slots following one
    another in memory; the constants of the transform are contiguous, ``phase_rows`` rows a pair.
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
    pages: Any
    scales: Any
    scales_row: Any
    scales_lane: Any
    tail: Any
    tail_row: Any
    tail_lane: Any
    ring: Any
    sink: Any
    sink_row: Any
    sink_lane: Any
    sink_len: Any
    mean: Any
    bias: Any
    pairs: Any
    phases: Any
    phase_rows: Any
    scale: Any


class Layout(NamedTuple):
    """One stream at compile time.

    Attributes:
        FORMAT, BITS, FIT: as in `formats`.
        DIM, HEADS: values of a head, heads of a lane.
        BLOCK, BLOCKS: values of a block, blocks of a lane.
        STRIDE: blocks from one token to the next in a program's tile: BLOCKS, or if the stream is rotated
            the power of two above, for then a tile holds whole tokens.
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
    table_row: Any
    table_pages: Any


def layout(
    kind: str,
    dim: int,
    heads: int,
    block: int = PLAIN_BLOCK,
    *,
    fit: str = "amax",
    pairs: int = 0,
    rotate: bool = False,
    values: int = 0,
) -> Layout:
    """For lanes of ``heads`` heads of ``dim``; a program takes ``values`` values, a token at least."""
    form, blocks = resolve(kind), heads * dim // block
    whole = triton.next_power_of_2(blocks)
    stride, count = whole if rotate else blocks, max(whole, values // block)
    return Layout(
        form.index, form.bits, fit, dim, heads, block, blocks, stride, count, pairs, rotate
    )


def layout_of(
    name: str,
    kind: str,
    codes: Tensor,
    scales: Tensor | None,
    new: Tensor,
    options: dict[str, Any],
    values: int,
) -> Layout:
    """The compile-time side of stream ``name`` of an op's flat arguments."""
    lane, dim = resolve(kind).value_width(codes.shape[3]), new.shape[3]
    bias = options.get(f"{name}_bias")
    return layout(
        kind,
        dim,
        lane // dim,
        PLAIN_BLOCK if scales is None else lane // scales.shape[3],
        fit=options.get(f"fit_{name}", "amax"),
        pairs=0 if bias is None else bias.shape[1],
        rotate=bool(options.get(f"rotate_{name}", False)),
        values=values,
    )


def stream_of(
    name: str, codes: Tensor, scales: Tensor | None, new: Tensor, options: dict[str, Any]
) -> Stream:
    """The run-time side of stream ``name`` of an op's flat arguments."""
    row, head, token, dim = new.stride()
    batch, _, tokens, _ = new.shape
    constants = {
        part: _contiguous(options.get(f"{name}_{part}"))
        for part in ("mean", "bias", "pairs", "phases", "scale")
    }
    phases = constants["phases"]
    return Stream(
        # The stride of a single row or token is arbitrary, no reason to compile again.
        new, row if batch > 1 else 0, head, token if tokens > 1 else 0, dim,
        *_plane(f"{name}_codes", codes), codes.shape[0], *_plane(f"{name}_scales", scales)[:3],
        *_plane(f"{name}_tail", options.get(f"{name}_tail")),
        *_plane(f"{name}_sink", options.get(f"{name}_sink")),
        constants["mean"], constants["bias"], constants["pairs"], phases,
        0 if phases is None else phases.shape[2], constants["scale"],
    )  # fmt: skip


def rows_of(start: Tensor, options: dict[str, Any]) -> Rows:
    """Where rows are, from an op's flat arguments."""
    table = _contiguous(options.get("block_table"))
    return Rows(
        _contiguous(start),
        _contiguous(options.get("query_lens")),
        _contiguous(options.get("cache_leftpad")),
        table,
        *((0, 0) if table is None else (table.stride(0), table.shape[1])),
    )


def _contiguous(x: Tensor | None) -> Tensor | None:
    """x itself in every ordinary call."""
    return None if x is None else x.contiguous()


def _plane(name: str, buffer: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """A buffer, its strides of rows and lanes, its slots."""
    if buffer is None:
        return None, 0, 0, 0
    row, lane, slot, value = buffer.stride()
    if value != 1 or slot != buffer.shape[3]:
        raise ValueError(
            f"{name} has strides {buffer.stride()}; its slots must follow one another in memory"
        )
    return buffer, row, lane, buffer.shape[2]
