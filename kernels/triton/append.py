"""append_ in Triton: new tokens are read once and written as codes, scales, fp16 tail and fp16 sinks.

Bit-exact with the reference of `caramba_fast.ops.append`, but for rotated streams, whose sums are made in
another order. All streams of a layer take one launch; a program handles some tokens of one lane of one
stream of one row. Nothing waits for the host, nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from caramba_fast.formats import resolve

from .append_groups import encode_group, group_programs, group_warps
from .formats import encode_bytes, encode_nibbles
from .launch import EXACT, on_device, returned, start
from .new_tokens import blocks, rotated_blocks
from .places import place, put, put_sides, put_values, span
from .streams import Layout, Rows, Stream, layout_of, rows_of, stream_of

STREAMS = ("k", "v")
MOST_STREAMS = 3
#: From this many new tokens on a program takes PROMPT_VALUES values of the widest stream, as in
#: `quantize`; below, one token: a step of decoding then spreads over the GPU, and a thread waits for few
#: loads.
PROMPT_TOKENS = 32
PROMPT_VALUES = 2048
#: Values of a warp, up to `MOST_WARPS`: 8 a thread. For prompts 16, the most that never spills.
WARP_VALUES = 256
MOST_WARPS = 4


@triton.jit
def _put_codes(s, L: tl.constexpr, lane, block, at, slot, keep, low, high):
    """Codes and scales of the blocks; an unquantized stream is stored as it is."""
    FIT: tl.constexpr = L.FIT
    CODES: tl.constexpr = L.BLOCK if L.BITS >= 16 else L.BLOCK * L.BITS // 8
    codes = s.codes + at * s.codes_row + lane.to(tl.int64) * s.codes_lane
    codes = codes + slot * (L.BLOCKS * CODES) + block * CODES
    if L.BITS >= 16:
        put_values(codes, keep, 0, low)
    else:
        if L.BITS == 4:
            packed, scale = encode_nibbles(low, high, L.FORMAT, FIT)
        else:
            packed, scale = encode_bytes(low, L.FORMAT, FIT)
        put(codes, keep, 0, packed.to(s.codes.dtype.element_ty))
        scales = s.scales + at * s.scales_row + lane.to(tl.int64) * s.scales_lane
        tl.store(scales + slot * L.BLOCKS + block, scale.to(tl.float16), mask=keep)


@triton.jit
def _write(s, L: tl.constexpr, where, b, lane, heads, group, tokens):
    """One program's share of stream ``s``: ROWS blocks, token after token."""
    row = group * L.ROWS + tl.arange(0, L.ROWS)
    token, block = row // L.STRIDE, row % L.STRIDE
    there = (token < tokens) & (block < L.BLOCKS)
    start, first, count = span(where, b, tokens)
    position, t = start + token, first + token
    real = there & (token < count)
    at, slot, keep = place(s, where, b, position, real)
    if L.ROTATE:
        TOKENS: tl.constexpr = L.ROWS // L.STRIDE
        whole = group * TOKENS + tl.arange(0, TOKENS)[:, None]
        low, high = rotated_blocks(s, L, b, lane, heads, whole, whole < tokens)
    else:
        low, high = blocks(s, L, b, lane, heads, token, there, block)
    if L.GROUP == 1:
        _put_codes(s, L, lane, block, at, slot, keep, low, high)
    put_sides(s, L, where, b, lane, block, position, t, real, count, token, 0, low)
    if L.BITS == 4:
        put_sides(s, L, where, b, lane, block, position, t, real, count, token, L.BLOCK // 2, high)


@triton.jit
def _work(s, L: tl.constexpr, where, b, lane, heads, program, tokens, writers):
    """One program of a stream: of the first ``writers`` writes new tokens, of those behind them encodes a group."""
    if writers is None or program < writers:
        _write(s, L, where, b, lane, heads, program, tokens)
    elif L.GROUP > 1:
        encode_group(s, L, where, b, lane, heads, program - writers, tokens)


@triton.jit(do_not_specialize=["table_row", "table_pages", "pages", "tokens", "writers"])
def append_kernel(
    first,
    second,
    third,
    where,
    table_row,
    table_pages,
    pages,
    heads,
    tokens,
    writers,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
):
    """Two streams, or three; grid (programs of a lane, lanes * streams, B).

    ``writers`` is None where no stream is by channel; else programs from there on encode groups that became full.

    first, second and third are fields of a `Stream`, where those of `Rows`, in order; without the last fields, which
    grow with a cache: tuples are specialized on, numbers need not be.
    """
    STREAMS: tl.constexpr = 1 if SECOND is None else (2 if THIRD is None else 3)
    where = Rows(*where, table_row, table_pages, pages)
    program, lane = tl.program_id(0), tl.program_id(1) // STREAMS
    which, b = tl.program_id(1) % STREAMS, tl.program_id(2).to(tl.int64)
    if which == 0:
        _work(Stream(*first), FIRST, where, b, lane, heads, program, tokens, writers)
    if STREAMS > 1:  # noqa: SIM102 - as below
        if which == 1:
            _work(Stream(*second), SECOND, where, b, lane, heads, program, tokens, writers)
    if THIRD is not None:  # noqa: SIM102 - known at compile time, unlike the other
        if which == 2:
            _work(Stream(*third), THIRD, where, b, lane, heads, program, tokens, writers)


def tokens_at_once(tokens: int, widest: int) -> int:
    """Tokens of a program, a power of two, of ``tokens`` new ones in lanes of at most ``widest`` values.

    The same in all streams, so that none has programs without work.
    """
    if tokens < PROMPT_TOKENS:
        return 1
    return max(PROMPT_VALUES // triton.next_power_of_2(widest), 1)


def num_warps(layouts: Sequence[Layout]) -> int:
    """Warps of a program that writes any of these; of one stream alone, as on AMD, two, for fewer scalars in each."""
    values = max(part.ROWS * part.BLOCK for part in layouts)
    return max(
        2 if len(layouts) == 1 else 1,
        min(max(values // WARP_VALUES, 1), MOST_WARPS),
        *map(group_warps, layouts),
    )


def _described(
    names: tuple[str, ...],
    kinds: Sequence[str],
    stored: Sequence[Any],
    new: Sequence[Any],
    options: dict[str, Any],
) -> tuple[list[Stream], list[Layout]]:
    """Each stream at run time and at compile time; ``stored`` are codes and scales in turn."""
    given = tuple(zip(names, kinds, stored[::2], stored[1::2], new, strict=True))
    widest = max(resolve(kind).value_width(codes.shape[3]) for _, kind, codes, _, _ in given)
    at_once = tokens_at_once(new[0].shape[2], widest)
    streams = [stream_of(name, *parts, options) for name, _, *parts in given]
    return streams, [layout_of(*parts, options, at_once) for parts in given]


def launch(names: tuple[str, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Writes the streams ``names`` of an op's flat arguments.

    Raises:
        NotImplementedError: buffers or heads that these kernels cannot serve; nothing is written.
    """
    count = len(names)
    stored, new = args[: 2 * count], args[2 * count : 3 * count]
    lengths, kinds = args[3 * count], args[3 * count + 1 :]
    if new[0].numel() == 0:
        return
    if count == MOST_STREAMS and torch.version.hip is not None:  # scalars of three streams spill
        for i, name in enumerate(names):
            launch((name,), (*stored[2 * i : 2 * i + 2], new[i], lengths, kinds[i]), options)
        return
    batch, heads, tokens, _ = new[0].shape
    streams, layouts = _described(names, kinds, stored, new, options)
    writers = max(-(-tokens * part.STRIDE // part.ROWS) for part in layouts)
    encoders = max(group_programs(part, tokens) for part in layouts)
    absent = [None] * (MOST_STREAMS - count)
    where = rows_of(names[0], stored[0], lengths, options)
    largest = max(part.GROUP for part in layouts)

    def run(programs: int, writers: int | None) -> None:
        start(
            append_kernel, (programs, stored[0].shape[1] * count, batch),
            *map(tuple, streams), *absent, where[:-3], *where[-3:], heads, tokens, writers,
            *layouts, *absent, num_warps=num_warps(layouts), **EXACT,
        )  # fmt: skip

    with on_device(lengths):
        if not encoders:
            run(writers, None)
        elif tokens <= where.ring - largest + 1:
            run(writers + encoders, writers)
        else:  # new tokens take the ring's slots of tokens that are still to be encoded
            run(encoders, 0)
            run(writers, writers)
    returned()


def append_(*args: Any, **options: Any) -> None:
    """The op's flat arguments: see `caramba_fast.ops.append` and its schema."""
    launch(STREAMS, args, options)
