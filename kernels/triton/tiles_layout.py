"""What a kernel is specialized for, as two frozen records that are passed as single constexprs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from caramba_fast.formats import FORMATS


def segments(width: int) -> tuple[tuple[int, int], ...]:
    """(start, width) of the powers of two that make up a lane (160 = 128 + 32), largest first."""
    found, start = [], 0
    while start < width:
        size = 1 << ((width - start).bit_length() - 1)
        found.append((start, size))
        start += size
    return tuple(found)


@dataclass(frozen=True)
class Stream:
    """One stored stream.

    Attributes:
        form: index of the format's row.
        block: values that share a scale.
        dot: dtype of the operands of ``tl.dot``: tl.float16, tl.bfloat16 or tl.float32.
        width: values of a lane.
        dim: values of a head.
        segments: how the lane is cut.
        group: tokens that share a scale and a zero a channel; 1 for a kind by token.
    """

    form: int
    block: int
    dot: Any
    width: int
    dim: int
    segments: tuple[tuple[int, int], ...]
    group: int = 1

    @property
    def side(self) -> Stream:
        """The same stream as its tail and sinks are stored."""
        dot = tl.float32 if self.dot == tl.float32 else tl.float16
        return replace(self, form=FORMATS["fp16"].index, block=32, dot=dot, group=1)


@dataclass(frozen=True)
class Shape:
    """Everything else.

    Attributes:
        groups: query heads of a kv head.
        tokens: query tokens.
        heads: kv heads.
        per_lane: kv heads of a lane.
        rows: query rows of a program, a power of two from 8.
        tile: tokens of a tile.
        page: slots of a page; 0 for a contiguous cache.
        masked: whether a tile may reach past the capacity.
        sink_len: tokens kept in fp16 besides; 0 for none.
        window: whether there is a window; kept: whether ``num_sink_tokens`` stay visible.
        softcap: whether logits are capped.
        tail: whether there is a tail to read.
        ptx: whether inline assembly can be used.
        precision: of products of float32.
        group: tokens that are read from the tail together.
        warps: of a program.
        extend: whether a program takes ``rows`` successive tokens of one query head, and not queries of all heads of a
            lane; ``tokens`` is 0 then, for one kernel serves every T.
        balanced: whether a program takes an equal share of the tiles of all rows (`balanced_kernel`).
    """

    groups: int
    tokens: int
    heads: int
    per_lane: int
    rows: int
    tile: int
    page: int = 0
    masked: bool = False
    sink_len: int = 0
    window: bool = False
    kept: bool = False
    softcap: bool = False
    tail: bool = False
    ptx: bool = True
    precision: str = "tf32x3"
    group: int = 1
    warps: int = 4
    extend: bool = False
    balanced: bool = False

    @property
    def side(self) -> Shape:
        """The same for the tail and the sinks: in long tiles fp16 values take more registers than codes do."""
        return self if self.extend else replace(self, tile=min(self.tile, max(32, 16 * self.warps)))


@dataclass(frozen=True)
class Settings:
    """Launch settings of the split-KV kernel: query rows and tokens of a tile, warps, stages.

    narrow: whether a tile has so few bytes that a thread of AMD's wide waves would load four at a time.
    max_registers: of a thread, so that an SM holds one program more; None for as many as there are.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    narrow: bool = False
    max_registers: int | None = None


#: Most query rows of a program; more become row groups, which read the cache again (from L2, mostly).
#: Where a lane has more than 64 values, 64 rows of accumulators spill: half of them then.
MOST_ROWS = 64
#: Fewest query rows that four warps multiply: before 3.9 Triton gives 8 columns to `mma.sync` on sm_90, too.
LEAST_ROWS = 8 if tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 9) else 16


#: Formats of two codes a byte.
FORMATS_OF_NIBBLES = tuple(form.index for form in FORMATS.values() if form.bits == 4)
#: Most query rows, values of a lane and tokens of a tile of programs that are one warp.
WARP_ROWS, WARP_WIDTH, WARP_TILE = 8, 128, 32


@triton.constexpr_function
def words_of(stream: Stream) -> bool:
    """Whether `tiles_words` can load a stream: of each segment at least 8 words."""
    packed = stream.form > FORMATS["bf16"].index and stream.group == 1
    each = 8 if stream.form in FORMATS_OF_NIBBLES else 4
    return packed and stream.dot == tl.float16 and all(n >= 8 * each for _, n in stream.segments)


@triton.constexpr_function
def by_words(stream: Stream, shape: Shape) -> bool:
    """Whether values are loaded as `tiles_words` does."""
    return shape.warps == 1 and words_of(stream)


def fits_warp(streams: Sequence[Stream], rows: int, unit: int) -> bool:
    """Whether a program may be one warp, which waits for nothing but its loads: few rows, packed, half precision."""
    *keys, value = streams
    packed = all(
        stream.form > FORMATS["bf16"].index and stream.dot == tl.float16 for stream in keys
    )
    narrow = max(stream.width for stream in streams) <= WARP_WIDTH
    whole = unit % WARP_TILE == 0
    return rows <= WARP_ROWS and packed and narrow and whole and words_of(value)


def settings(
    streams: Sequence[Stream], rows: int, unit: int, major: int = 0, warp: bool = True
) -> Settings:
    """Settings for the streams of a layer, by the SASS of the main loop (docs/kernels.md).

    A tile of 128 tokens spreads the softmax and the barriers over twice as many tokens as one of 64
    and still fits three programs on an SM for 4-bit streams (two for q8_0). fp16 has instructions to spare
    but not shared memory; wider lanes, more rows or float32 operands run out of registers. Of keys by
    channel 32 rows at once still fit a tile of 128 tokens.

    Args:
        rows: query rows of a lane.
        unit: slots of a page, or of a contiguous cache: a tile should divide it.
        major: of the GPU's compute capability, where it is known; `on_generation` does the rest for it.
        warp: whether a program may be one warp; on AMD, whose waves have 64 threads, that was not tried.
    """
    if warp and fits_warp(streams, rows, unit):
        return Settings(WARP_ROWS, WARP_TILE, 1, 3, max(s.width for s in streams) <= 64)
    widest = max(stream.width for stream in streams)
    by_channel = streams[0].group > 1
    # 8 rows of wider lanes spill on sm_100.
    least = 16 if widest > 128 and not by_channel else LEAST_ROWS
    padded = max(least, 1 << (rows - 1).bit_length())
    wide = any(stream.dot == tl.float32 for stream in streams)
    if by_channel:
        few = wide or (LEAST_ROWS == 16 and widest > 64)
        most = 16 if few else MOST_ROWS // 2
    else:
        most = MOST_ROWS if widest <= 64 and not wide else MOST_ROWS // 2
    padded = min(padded, most)
    if wide or widest > 256:
        tile = 32
    else:
        packed = all(stream.form > FORMATS["bf16"].index for stream in streams)
        tile = 128 if packed and widest <= 128 and (padded <= 16 or by_channel) else 64
    while unit % tile and tile > 32:
        tile //= 2
    stored = sum(stream.width * (1 if stream.form > 2 else 2) for stream in streams)
    heavy = stored * tile > 3 * 2**14
    # Three stages of keys by channel spill: narrow ones and 32 rows on sm_80, those of 8 bits on sm_100, and there,
    # with a Triton before 3.9, those of pages.
    paged = unit <= 128 and LEAST_ROWS == 16
    bits = list(FORMATS.values())[streams[0].form].bits
    short = by_channel and (widest <= 64 or bits == 8 or padded > 16 or paged)
    chosen = Settings(padded, tile, 4, 2 if wide or heavy or short else 3, widest <= 64)
    return on_hopper(chosen, streams, rows) if major == 9 else chosen


def token_bytes(stream: Stream) -> int:
    """Bytes of a cached token in a lane, its share of scales and zeros included."""
    form = list(FORMATS.values())[stream.form]
    return form.bytes_per_vector(stream.width, stream.group if form.by_channel else stream.block)


#: Shared memory a launch needs besides the tiles of its stages: of 4-bit values they are unpacked into.
BESIDES, BESIDES_NIBBLES = 2 * 1024, 24 * 1024


def within(chosen: Settings, streams: Sequence[Stream], limit: int) -> Settings:
    """The same with fewer stages, then shorter tiles, until they need at most ``limit`` bytes of shared memory.

    163 KiB and more (sm_80, sm_90, sm_100) hold all that `settings` chooses; of 99 KiB (sm_86, sm_89, sm_120) q8_0 at
    D 128 in three stages needs 107.
    """
    rows = list(FORMATS.values())
    forms = [rows[stream.form] for stream in streams]
    token = sum(token_bytes(stream) for stream in streams)
    besides = (
        BESIDES_NIBBLES
        if any(form.bits == 4 and not form.by_channel for form in forms)
        else BESIDES
    )

    def fits(settings: Settings) -> bool:
        return settings.num_stages * token * settings.tile + besides <= limit

    while not fits(chosen) and chosen.num_stages > 2:
        chosen = replace(chosen, num_stages=chosen.num_stages - 1)
    while not fits(chosen) and chosen.tile > 32:
        chosen = replace(chosen, tile=chosen.tile // 2)
    return chosen


#: Most query rows times tokens of a tile, of lanes of more than 64 values, where there is no `wgmma`.
MOST_SCORES = 2048


def on_ampere(chosen: Settings) -> Settings:
    """The same before sm_90: products with the zeros of keys by channel take queries from registers, too."""
    if chosen.narrow or chosen.rows * chosen.tile <= MOST_SCORES:
        return chosen
    return replace(chosen, tile=chosen.tile // 2)


def on_blackwell(chosen: Settings) -> Settings:
    """The same without tcgen05: its operands have to pass through tensor memory, and nf4 spilled.

    Two warps are too few for it; with half a tile the work of a warp stays the same.
    """
    if chosen.tile < 64 or chosen.num_warps == 1:
        return chosen
    rows = chosen.rows if chosen.narrow else min(chosen.rows, MOST_SCORES // chosen.tile)
    return replace(chosen, rows=rows, tile=chosen.tile // 2, num_warps=chosen.num_warps // 2)


def on_hopper(chosen: Settings, streams: Sequence[Stream], rows: int) -> Settings:
    """The same on sm_90 for keys by channel with a Triton before 3.9: what was fastest on an H200.

    Behind 8 rows of 32,768 tokens 32 query rows at once are 1.5 (4 bits) and 1.6 times (8 bits) as fast as 16 twice,
    though 8 and 16 bytes of a thread spill. Short rows lose: 1 row of 4,096 tokens takes 1.1 times as long with 32
    query rows of 4 bits.
    """
    wide = any(stream.dot == tl.float32 for stream in streams)
    if LEAST_ROWS == 8 or wide or streams[0].group == 1:
        return chosen
    if chosen.narrow:
        return replace(chosen, num_stages=3) if chosen.rows <= 16 else chosen
    if rows <= 16 or max(stream.width for stream in streams) > 128 or chosen.tile < 128:
        return chosen
    bits = list(FORMATS.values())[streams[0].form].bits
    return replace(chosen, rows=32, num_stages=3 if bits == 4 else 2)


#: Of a thread of a program of one warp that walks over pieces (`balanced_kernel`): with fewer what it keeps beside the
#: accumulators spills, and of its own accord the assembler gives it fewer.
WALKING_REGISTERS = 184


def walking(chosen: Settings) -> Settings:
    """The same under a balanced schedule."""
    if chosen.num_warps > 1 or chosen.narrow or chosen.max_registers:
        return chosen
    return replace(chosen, max_registers=WALKING_REGISTERS)


def on_generation(chosen: Settings, major: int) -> Settings:
    """The same for an NVIDIA generation."""
    if major >= 10:
        return on_blackwell(chosen)
    return on_ampere(chosen) if major < 9 else chosen


def on_amd(chosen: Settings) -> Settings:
    """The same for 64 KiB of LDS and plain unpacking, which holds more in registers (nf4 spilled).

    Two programs of 16 rows take a fifth fewer instructions than one of 32.
    """
    tile = min(chosen.tile, 64 if chosen.narrow else 32)
    return replace(
        chosen,
        rows=16,
        tile=tile,
        num_stages=min(chosen.num_stages, 2),
    )
