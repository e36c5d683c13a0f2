"""What a kernel is specialized for, as two frozen records that are passed as single constexprs."""

from __future__ import annotations

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
