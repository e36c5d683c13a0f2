"""What a kernel is specialized for, as two frozen records that are passed as single constexprs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        pairs: rotary pairs a centered key has a bias on, 0 for none.
        table: rows of the phase table of one pair.
        harmonics: rows of the tile of their cosines and sines, a power of two.
    """

    form: int
    block: int
    dot: Any
    width: int
    dim: int
    segments: tuple[tuple[int, int], ...]
    pairs: int = 0
    table: int = 0
    harmonics: int = 0

    @property
    def side(self) -> Stream:
        """The same stream as its tail and sinks are stored."""
        dot = tl.float32 if self.dot == tl.float32 else tl.float16
        return replace(self, form=FORMATS["fp16"].index, block=32, dot=dot)


@dataclass(frozen=True)
class Shape:
    """Everything else.

    Attributes:
        groups: query heads of a kv head.
        tokens: query tokens.
        heads: kv heads.
        per_lane: kv heads of a lane.
        rows: query rows of a program, a power of two from 16.
        tile: tokens of a tile.
        page: slots of a page; 0 for a contiguous cache.
        masked: whether a tile may reach past the capacity.
        sink_len: tokens kept in fp16 besides; 0 for none.
        window: whether there is a window; kept: whether ``num_sink_tokens`` stay visible.
        softcap: whether logits are capped.
        tail: whether there is a tail to read.
        ptx: whether inline assembly can be used.
        precision: of products of float32.
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


@dataclass(frozen=True)
class Settings:
    """Launch settings of the split-KV kernel: query rows and tokens of a tile, warps, stages."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


#: Most query rows of a program; more become row groups, which read the cache again (from L2, mostly).
MOST_ROWS = 64


def settings(streams: Sequence[Stream], rows: int, unit: int) -> Settings:
    """Settings for the streams of a layer.

    Args:
        rows: query rows of a lane.
        unit: slots of a page, or of a contiguous cache: a tile should divide it.
    """
    widest = max(stream.width for stream in streams)
    wide = any(stream.dot == tl.float32 for stream in streams)
    padded = min(MOST_ROWS, max(16, 1 << (rows - 1).bit_length()))
    if widest > 256:
        padded = min(padded, 32)
    tile = 64 if widest <= 128 else 32
    while unit % tile and tile > 32:
        tile //= 2
    return Settings(padded, tile, 4, 2 if wide or widest > 256 else 3)
