"""Where new tokens go: slots of a row or page for codes, the ring of the tail, the sinks.

Addresses are 64-bit: a cache may be larger than 2^31 elements. What has no place is masked, not
branched over, so that every program of a launch runs the same code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .casts import from_float32


@triton.jit
def span(where, b, tokens):
    """Of row ``b``: the slot of its first new token, the same counted from the padding, how many are real."""
    start = tl.load(where.start + b)
    first = start
    if where.leftpad is not None:
        first = start - tl.load(where.leftpad + b)
    count = tokens
    if where.query_lens is not None:
        count = tl.load(where.query_lens + b)
    return start, first, count


@triton.jit
def place(s, where, b, position, real):
    """Row or page, slot and whether there is one, for tokens at ``position`` (R,)."""
    if where.table is None:
        at = tl.zeros_like(position) + b
        slot = position
        keep = real & (position < s.slots)
    else:
        page = position // s.slots
        slot = position % s.slots
        listed = real & (page < where.table_pages)
        at = tl.load(where.table + b * where.table_row + page, mask=listed, other=-1)
        keep = (at >= 0) & (at < where.pages)
    return at.to(tl.int64), slot.to(tl.int64), keep


@triton.jit
def put(target, keep, first, x):
    """Rows of x (R, C) go to ``target`` (R,), from element ``first`` on."""
    element = first + tl.arange(0, x.shape[1])[None, :]
    tl.store(target[:, None] + element, x, mask=keep[:, None])


@triton.jit
def put_values(target, keep, first, x):
    """`put` of float32 in the dtype of ``target``."""
    put(target, keep, first, from_float32(x, target.dtype.element_ty))


@triton.jit
def put_sides(s, L: tl.constexpr, where, b, lane, block, position, t, real, count, token, first, x):
    """x (R, C), from value ``first`` of its blocks on, into the tail and the sinks.

    The ring takes the newest ``ring`` of ``count`` tokens: the older would be overwritten by them, in any
    order.
    """
    WIDTH: tl.constexpr = L.BLOCKS * L.BLOCK
    if s.tail is not None:
        tail = s.tail + b * s.tail_row + lane.to(tl.int64) * s.tail_lane + block * L.BLOCK
        newest = real & (token >= count - where.ring)
        put_values(tail + (position % where.ring).to(tl.int64) * WIDTH, newest, first, x)
    if s.sink is not None:
        sink = s.sink + b * s.sink_row + lane.to(tl.int64) * s.sink_lane + block * L.BLOCK
        put_values(sink + t.to(tl.int64) * WIDTH, real & (t >= 0) & (t < where.sink_len), first, x)
