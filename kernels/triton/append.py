"""append_ in Triton: new tokens are read once and written as codes, scales, fp16 tail and fp16 sinks.

Bit-exact with the reference of `caramba_fast.ops.append`, but for rotated streams, whose sums are made in
another order. All streams of a layer take one launch; a program handles some tokens of one lane of one
stream of one row. RoPE, where it is asked for, turns keys as they are read, and programs behind the others turn the
queries. Nothing waits for the host; nothing is allocated, but for turned keys on AMD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import resolve

from .append_groups import encode_group, group_programs, group_warps
from .apply_rotary_emb import HEADS as QUERY_HEADS
from .apply_rotary_emb import belongs, turn, turn_heads
from .formats import encode_bytes, encode_nibbles
from .launch import EXACT, dense, made, on_device, returned, start
from .new_tokens import blocks, rotated_blocks
from .places import place, put, put_sides, put_values, span
from .streams import Layout, Queries, Rows, Stream, layout_of, rows_of, steps_of, stream_of

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


@triton.jit
def _turn(queries, L: tl.constexpr, index, b, tokens, HEADS: tl.constexpr):
    """Queries of HEADS heads of one token; ``index`` counts tokens times groups of heads."""
    groups = tl.cdiv(queries.heads, HEADS)
    token = index // groups
    head = index % groups * HEADS + tl.arange(0, HEADS)[:, None]
    there = head < tl.where(token < tokens, queries.heads, 0)
    step = 1 if queries.q_dim is None else queries.q_dim
    source = queries.q + b * queries.q_row + token.to(tl.int64) * queries.q_token
    source = source + head.to(tl.int64) * queries.q_head
    target = queries.out + ((b * queries.heads + head) * tokens + token) * L.DIM
    table = b * queries.cos_row + tl.minimum(token, tokens - 1).to(tl.int64) * L.ROTARY
    turn_heads(
        source, step, queries.cos + table, queries.sin + table, target, there, L.DIM // 2, L.PAD // 2, L.ROTARY
    )  # fmt: skip


@triton.jit
def _streams(
    first,
    second,
    third,
    where,
    program,
    heads,
    tokens,
    writers,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
):
    """The program of a launch whose place along the lanes and streams says whose it is."""
    STREAMS: tl.constexpr = 1 if SECOND is None else (2 if THIRD is None else 3)
    lane = tl.program_id(1) // STREAMS
    which, b = tl.program_id(1) % STREAMS, tl.program_id(2).to(tl.int64)
    if which == 0:
        _work(Stream(*first), FIRST, where, b, lane, heads, program, tokens, writers)
    if STREAMS > 1:  # noqa: SIM102 - as below
        if which == 1:
            _work(Stream(*second), SECOND, where, b, lane, heads, program, tokens, writers)
    if THIRD is not None:  # noqa: SIM102 - known at compile time, unlike the other
        if which == 2:
            _work(Stream(*third), THIRD, where, b, lane, heads, program, tokens, writers)


@triton.jit(do_not_specialize=["table_row", "table_pages", "pages", "tokens", "writers", "turners"])
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
    queries,
    turners,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Two streams, or three; grid (programs of a lane, lanes * streams, B).

    ``writers`` is None where no stream is by channel; else programs from there on encode groups that became full.
    ``queries`` are fields of a `Queries`, or None, as TURNED is then; programs from ``turners`` on turn HEADS heads of
    them each, by the angles of the stream whose layout is TURNED.

    first, second and third are fields of a `Stream`, where those of `Rows`, in order; without the last fields, which
    grow with a cache: tuples are specialized on, numbers need not be.
    """
    where = Rows(*where, table_row, table_pages, pages)
    program = tl.program_id(0)
    if TURNED is None:  # noqa: SIM114 - one is known at compile time
        _streams(
            first, second, third, where, program, heads, tokens, writers, FIRST, SECOND, THIRD
        )  # fmt: skip
    elif program < turners:
        _streams(
            first, second, third, where, program, heads, tokens, writers, FIRST, SECOND, THIRD
        )  # fmt: skip
    else:
        index = (program - turners) * tl.num_programs(1) + tl.program_id(1)
        b = tl.program_id(2).to(tl.int64)
        _turn(Queries(*queries), TURNED, index, b, tokens, HEADS)


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
    angles: Angles | None,
) -> tuple[list[Stream], list[Layout]]:
    """Each stream at run time and at compile time; ``stored`` are codes and scales in turn.

    ``angles`` are those of the last stream of keys.
    """
    given = tuple(zip(names, kinds, stored[::2], stored[1::2], new, strict=True))
    widest = max(resolve(kind).value_width(codes.shape[3]) for _, kind, codes, _, _ in given)
    at_once = tokens_at_once(new[0].shape[2], widest)
    own: list[Any] = [None] * len(names)
    if angles is not None:
        own[-2] = angles
    streams = [
        stream_of(name, *parts, options, (None, None, None) if table is None else table)
        for (name, _, *parts), table in zip(given, own, strict=True)
    ]
    layouts = [
        layout_of(*parts, options, at_once, None if table is None else table.cos)
        for parts, table in zip(given, own, strict=True)
    ]
    return streams, layouts


class Angles(NamedTuple):
    """cos and sin (B or 1, T, width), and the elements from one row to the next."""

    cos: Tensor
    sin: Tensor
    row: int

    @staticmethod
    def of(options: dict[str, Any], keys: Tensor) -> Angles | None:
        """Those of an op's options for ``keys``, if there are.

        Raises:
            ValueError: options that `ops.append_` would not give; it says what is needed.
        """
        q, cos, sin, out = (options.get(f"rotary_{name}") for name in ("q", "cos", "sin", "out"))
        if q is None and cos is None and sin is None and out is None:
            return None
        if q is None or cos is None or sin is None or out is None:
            raise ValueError("rotary_q, rotary_cos, rotary_sin and rotary_out are given together")
        whole = out.is_contiguous() and out.shape == q.shape and out.dtype == q.dtype
        if not whole or not belongs(q, keys, cos, sin):
            raise ValueError(
                "rotary_q, rotary_cos, rotary_sin and rotary_out do not belong to these keys: ops.append_"
            )
        cos, sin = dense(cos), dense(sin)
        return Angles(cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0)


def _queries(options: dict[str, Any], angles: Angles | None) -> Queries | None:
    """The queries that are to be turned, if there are."""
    if angles is None:
        return None
    q, out = options["rotary_q"], options["rotary_out"]
    return Queries(q, *steps_of(q), out, q.shape[1], *angles)


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
    angles = Angles.of(options, new[-2]) if count > 1 else None
    if angles is not None and torch.version.hip is not None:  # scalars of both spill
        _described(names, kinds, stored, new, options, None)  # raises before anything is written
        keys = made(new[-2], new[-2].shape)
        turn(options["rotary_q"], new[-2], *angles[:2], options["rotary_out"], keys)
        new, angles = (*new[:-2], keys, new[-1]), None
        options = {name: x for name, x in options.items() if not name.startswith("rotary_")}
    if count == MOST_STREAMS and torch.version.hip is not None:  # scalars of three streams spill
        for i, name in enumerate(names):
            launch((name,), (*stored[2 * i : 2 * i + 2], new[i], lengths, kinds[i]), options)
        return
    batch, heads, tokens, _ = new[0].shape
    streams, layouts = _described(names, kinds, stored, new, options, angles)
    queries = _queries(options, angles)
    writers = max(-(-tokens * part.STRIDE // part.ROWS) for part in layouts)
    encoders = max(group_programs(part, tokens) for part in layouts)
    absent = [None] * (MOST_STREAMS - count)
    where = rows_of(names[0], stored[0], lengths, options)
    largest = max(part.GROUP for part in layouts)

    across = stored[0].shape[1] * count

    def run(programs: int, writers: int | None, queries: Queries | None = queries) -> None:
        turners, last, given = None, programs, None
        if queries is not None:
            turners, given = programs, tuple(queries)
            last += -(-tokens * triton.cdiv(queries.heads, QUERY_HEADS) // across)
        start(
            append_kernel, (last, across, batch),
            *map(tuple, streams), *absent, where[:-3], *where[-3:], heads, tokens, writers, given, turners,
            *layouts, *absent, None if given is None else layouts[-2], QUERY_HEADS,
            num_warps=num_warps(layouts), **EXACT,
        )  # fmt: skip

    with on_device(lengths):
        if not encoders:
            run(writers, None)
        elif tokens <= where.ring - largest + 1:
            run(writers + encoders, writers)
        else:  # new tokens take the ring's slots of tokens that are still to be encoded
            run(encoders, 0, None)
            run(writers, writers)
    returned()


def append_(*args: Any, **options: Any) -> None:
    """The op's flat arguments: see `caramba_fast.ops.append` and its schema."""
    launch(STREAMS, args, options)
