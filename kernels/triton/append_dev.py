"""append_ in Triton: new tokens are read once and written as codes, scales, fp16 tail and fp16 sinks.

Bit-exact with the reference of `caramba_fast.ops.append`, but for a rotated stream, whose sums are made
in another order. One program handles some tokens of one lane of one stream of one row, all streams in
one launch; nothing waits for the host and nothing is allocated.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.ops.schema import STANDARD

from .basis import hadamard, minus_bias
from .casts import from_float32, to_float32
from .formats import encode_bytes, encode_nibbles
from .launch import EXACT, on_device
from .streams import Layout, layout, rows, stream

#: From this many tokens on a program takes as many values as quantize does; below, one token, so that
#: a step of decoding spreads over the GPU and each thread waits for few loads.
PROMPT_TOKENS = 32
PROMPT_VALUES = 2048
#: Values of one warp: eight a thread.
WARP_VALUES = 256
MOST_WARPS = 4


@triton.jit
def _values(s, L: tl.constexpr, b, lane, heads, token, t, there, column):
    """(R, C) float32: what is stored, but for the rotation; zeros where no head is.

    token, t (tokens after the padding), there (R, 1); column (1 or R, C) of the lane.
    """
    dim = column % L.DIM
    head = lane * L.HEADS + column // L.DIM
    exists = head < heads
    source = s.new + b * s.new_row + token.to(tl.int64) * s.new_token
    source = source + head.to(tl.int64) * s.new_head + dim.to(tl.int64) * s.new_dim
    x = to_float32(tl.load(source, mask=there & exists, other=0.0))
    constant = head * L.DIM + dim
    if s.mean is not None:
        x = x - tl.load(s.mean + constant, mask=exists, other=0.0)
    if L.PAIRS > 0:
        x = minus_bias(
            x, column, t, s.bias, s.pairs, s.phases, s.phase_rows, lane * L.HEADS, heads,
            L.DIM, L.HEADS, L.PAIRS,
        )  # fmt: skip
    if s.scale is not None:
        scale = tl.load(s.scale + constant, mask=exists, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return x


@triton.jit
def _rotated(s, L: tl.constexpr, b, lane, heads, group, tokens, offset):
    """The tile of whole tokens as (ROWS, BLOCK), rotated; ``offset`` is t of the first new token."""
    WIDTH: tl.constexpr = L.STRIDE * L.BLOCK
    token = group * (L.ROWS // L.STRIDE) + tl.arange(0, L.ROWS // L.STRIDE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    there = (token < tokens) & (column < L.BLOCKS * L.BLOCK)
    x = _values(s, L, b, lane, heads, token, token + offset, there, column)
    return tl.reshape(hadamard(x, L.DIM), (L.ROWS, L.BLOCK))


@triton.jit
def _halves(x):
    """(R, 2 n) -> its left and right half, (R, n) each."""
    return tl.split(tl.trans(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 0, 2, 1))


@triton.jit
def _put(target, keep, first, x):
    """Rows of x (R, C) go to ``target`` (R,), from element ``first`` on."""
    element = first + tl.arange(0, x.shape[1])[None, :]
    tl.store(target[:, None] + element, x, mask=keep[:, None])


@triton.jit
def _put_values(target, keep, first, x):
    """`_put` of float32 in the dtype of ``target``."""
    _put(target, keep, first, from_float32(x, target.dtype.element_ty))


@triton.jit
def _place(s, where, b, position):
    """Row or page, slot and whether there is one, for tokens at ``position`` (R,)."""
    if where.table is None:
        place = tl.zeros_like(position) + b
        slot = position
        keep = position < s.slots
    else:
        page = position // s.slots
        slot = position % s.slots
        listed = where.table + b * where.table_row + page
        place = tl.load(listed, mask=page < where.table_pages, other=-1)
        keep = (place >= 0) & (place < s.pages)
    return place.to(tl.int64), slot, keep


@triton.jit
def _sides(s, L: tl.constexpr, b, lane, block, position, t, newest, real, first, x):
    """x (R, C), from value ``first`` of its blocks on, into the tail and the sinks."""
    WIDTH: tl.constexpr = L.BLOCKS * L.BLOCK
    if s.tail is not None:
        slot = position % s.ring
        tail = s.tail + b * s.tail_row + lane.to(tl.int64) * s.tail_lane
        _put_values(tail + slot.to(tl.int64) * WIDTH + block * L.BLOCK, newest, first, x)
    if s.sink is not None:
        keep = real & (t >= 0) & (t < s.sink_len)
        sink = s.sink + b * s.sink_row + lane.to(tl.int64) * s.sink_lane
        _put_values(sink + t.to(tl.int64) * WIDTH + block * L.BLOCK, keep, first, x)


@triton.jit
def _write(s, L: tl.constexpr, where, b, lane, heads, group, tokens):
    """One program's share of stream ``s``."""
    # 1. A tile is ROWS blocks, token after token.
    row = group * L.ROWS + tl.arange(0, L.ROWS)
    token, block = row // L.STRIDE, row % L.STRIDE
    inside = (token < tokens) & (block < L.BLOCKS)
    start = tl.load(where.start + b)
    offset = start if where.leftpad is None else start - tl.load(where.leftpad + b)
    count = tokens if where.query_lens is None else tl.load(where.query_lens + b)
    position, t = start + token, offset + token
    real = inside & (token < count)
    newest = real & (token >= count - s.ring)
    # 2. Where codes and scales go.
    place, slot, keep = _place(s, where, b, position)
    keep = keep & real
    # A block of an unquantized stream is stored as it is, element by element.
    CODES: tl.constexpr = L.BLOCK if L.BITS >= 16 else L.BLOCK * L.BITS // 8
    codes = s.codes + place * s.codes_row + lane.to(tl.int64) * s.codes_lane
    codes = codes + slot.to(tl.int64) * (L.BLOCKS * CODES) + block * CODES
    # 3. Values; formats of two codes a byte take a block in halves.
    HALF: tl.constexpr = L.BLOCK // 2
    if L.ROTATE:
        x = _rotated(s, L, b, lane, heads, group, tokens, offset)
        if L.BITS == 4:
            x, high = _halves(x)
    else:
        at, when, there = token[:, None], t[:, None], inside[:, None]
        column = block[:, None] * L.BLOCK
        if L.BITS == 4:
            column = column + tl.arange(0, HALF)[None, :]
            high = _values(s, L, b, lane, heads, at, when, there, column + HALF)
        else:
            column = column + tl.arange(0, L.BLOCK)[None, :]
        x = _values(s, L, b, lane, heads, at, when, there, column)
    # 4. Codes and scales.
    if L.BITS >= 16:
        _put_values(codes, keep, 0, x)
    else:
        if L.BITS == 4:
            packed, scale = encode_nibbles(x, high, L.FORMAT, L.FIT)
        else:
            packed, scale = encode_bytes(x, L.FORMAT, L.FIT)
        _put(codes, keep, 0, packed.to(s.codes.dtype.element_ty))
        scales = s.scales + place * s.scales_row + lane.to(tl.int64) * s.scales_lane
        scales = scales + slot.to(tl.int64) * L.BLOCKS + block
        tl.store(scales, scale.to(tl.float16), mask=keep)
    # 5. Tail and sinks.
    _sides(s, L, b, lane, block, position, t, newest, real, 0, x)
    if L.BITS == 4:
        _sides(s, L, b, lane, block, position, t, newest, real, HALF, high)


@triton.jit
def append_kernel(streams, where, heads, tokens, LAYOUTS: tl.constexpr):
    """Grid: (groups of blocks, lanes * streams, B)."""
    group = tl.program_id(0)
    lane = tl.program_id(1) // len(LAYOUTS)
    b = tl.program_id(2).to(tl.int64)
    for i in tl.static_range(len(LAYOUTS)):
        if tl.program_id(1) % len(LAYOUTS) == i:
            _write(streams[i], LAYOUTS[i], where, b, lane, heads, group, tokens)


def settings(layouts: tuple[Layout, ...], tokens: int) -> tuple[int, int]:
    """Groups of blocks that cover ``tokens`` tokens of every stream, and warps of a program."""
    groups = max(triton.cdiv(tokens * part.STRIDE, part.ROWS) for part in layouts)
    values = max(part.ROWS * part.BLOCK for part in layouts)
    return groups, min(max(values // WARP_VALUES, 1), MOST_WARPS)


def launch(names: tuple[str, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Writes the streams of an op's flat arguments, one launch for all of them."""
    count = len(names)
    codes, scales = args[: 2 * count : 2], args[1 : 2 * count : 2]
    new: tuple[Tensor, ...] = args[2 * count : 3 * count]
    start, kinds = args[3 * count], args[3 * count + 1 :]
    batch, heads, tokens, _ = new[0].shape
    if batch * tokens == 0:
        return
    values = PROMPT_VALUES if tokens >= PROMPT_TOKENS else 0
    streams = tuple(
        stream(name, *buffers, options)
        for name, *buffers in zip(names, codes, scales, new, strict=True)
    )
    layouts = tuple(
        layout(name, kind, c, s, x.shape[3], values, options)
        for name, kind, c, s, x in zip(names, kinds, codes, scales, new, strict=True)
    )
    groups, warps = settings(layouts, tokens)
    grid = (groups, codes[0].shape[1] * count, batch)
    with on_device(start):
        append_kernel[grid](
            streams, rows(start, options), heads, tokens, layouts, num_warps=warps, **EXACT
        )


def append_(*args: Any, **options: Any) -> None:
    """The op's flat arguments: see `caramba_fast.ops.append`."""
    launch(STANDARD, args, options)
