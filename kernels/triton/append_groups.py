"""append_ of kinds by channel: groups of tokens that became full are encoded.

What is not new of a group is in the ring of the newest tokens. A launch that writes to the ring and encodes at once is
right as long as no new token takes the slot of one that is still to be read; `append.launch` sees to that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .casts import from_float32, to_float32
from .formats import encode_channel_pairs, encode_channels
from .new_tokens import blocks, rotated_blocks
from .places import place, span
from .streams import Layout

#: Values of a group that a warp encodes: 32 a thread, of 4 bits half as many, for two channels are held at once.
WARP_VALUES = 1024
MOST_WARPS = 8


@triton.jit
def _new(s, L: tl.constexpr, b, lane, heads, token, block):
    """New tokens (G,), rounded as the ring has them: (G, values) twice, in halves for 4 bits; 0 where there is none."""
    there = token >= 0
    if L.ROTATE:
        low, high = rotated_blocks(s, L, b, lane, heads, token[:, None], there[:, None])
        low = tl.reshape(low, (L.GROUP, low.shape[1] * L.STRIDE))
        high = tl.reshape(high, (L.GROUP, high.shape[1] * L.STRIDE))
    else:
        low, high = blocks(s, L, b, lane, heads, token, there, block + tl.zeros_like(token))
    low = to_float32(from_float32(low, tl.float16))
    high = to_float32(from_float32(high, tl.float16))
    return low, high


@triton.jit
def _held(x, s, L: tl.constexpr, where, b, lane, token, position, column, inside):
    """x (G, n) of new tokens, with what the ring holds of older ones."""
    ring = s.tail + b * s.tail_row + lane.to(tl.int64) * s.tail_lane
    slot = (position % where.ring).to(tl.int64) * (L.BLOCKS * L.BLOCK)
    older = (token < 0)[:, None]
    old = tl.load(ring + slot[:, None] + column[None, :], mask=older & inside[None, :], other=0.0)
    return tl.where(older, to_float32(old), x)


@triton.jit
def encode_group(s, L: tl.constexpr, where, b, lane, heads, index, tokens):
    """One block of channels of one group, or where the stream is rotated all of them, if the group is full."""
    SIZE: tl.constexpr = (
        L.BLOCK * L.BITS // 8
    )  # bytes of codes of a block, and values of a half if they are of 4 bits
    SHARES: tl.constexpr = 1 if L.ROTATE else L.BLOCKS
    WIDTH: tl.constexpr = L.BLOCKS * L.BLOCK
    FIT: tl.constexpr = L.FIT
    start, first, count = span(where, b, tokens)
    group = start // L.GROUP + index // SHARES
    if group < (start + count) // L.GROUP:
        position = group * L.GROUP + tl.arange(0, L.GROUP)
        token = position - start
        counted = first + token >= where.sink_len
        if L.ROTATE:
            place_ = tl.arange(0, L.STRIDE * SIZE)
            block = place_ // SIZE
            low, high = _new(s, L, b, lane, heads, token, 0)
        else:
            place_ = tl.arange(0, SIZE)
            block = index % SHARES + place_ // SIZE
            low, high = _new(s, L, b, lane, heads, token, index % SHARES)
        inside = block < L.BLOCKS
        column = block * L.BLOCK + place_ % SIZE
        at, slot, keep = place(s, where, b, group * L.GROUP + tl.arange(0, 1), tl.arange(0, 1) == 0)
        keep = keep[:, None] & inside[None, :]
        scales = s.scales + at * s.scales_row + lane.to(tl.int64) * s.scales_lane
        scales += slot // L.GROUP * (2 * L.BLOCKS * L.BLOCK)
        low = _held(low, s, L, where, b, lane, token, position, column, inside)
        at_scales = tl.reshape(scales[:, None] + column[None, :], column.shape)
        kept = tl.reshape(keep, column.shape)
        if L.BITS == 4:
            high = _held(high, s, L, where, b, lane, token, position, column + SIZE, inside)
            rms = None if s.query_rms is None else s.query_rms + lane * WIDTH + column
            codes = encode_channel_pairs(low, high, counted, at_scales, rms, WIDTH, SIZE, FIT, kept)
        else:
            codes = encode_channels(low, counted, at_scales, WIDTH, kept)
        target = s.codes + at * s.codes_row + lane.to(tl.int64) * s.codes_lane
        target = target + (slot + tl.arange(0, L.GROUP)) * (L.BLOCKS * SIZE)
        target = target[:, None] + (block * SIZE + place_ % SIZE)[None, :]
        tl.store(target, codes.to(s.codes.dtype.element_ty), mask=keep)


def group_programs(layout: Layout, tokens: int) -> int:
    """Programs of a lane that encode what ``tokens`` new ones can complete; 0 for a kind by token."""
    if layout.GROUP == 1:
        return 0
    return -(-tokens // layout.GROUP) * (1 if layout.ROTATE else layout.BLOCKS)


def group_warps(layout: Layout) -> int:
    """Warps of a program that encodes groups of this stream."""
    if layout.GROUP == 1:
        return 1
    values = layout.GROUP * layout.BLOCK * (layout.STRIDE if layout.ROTATE else 1)
    return min(max(values * (8 // layout.BITS) // WARP_VALUES, 1), MOST_WARPS)
