"""Launch settings of extend attention, by the registers and the main loops of what is compiled (docs/kernels.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import triton.language as tl

from caramba_fast.formats import FORMATS

from .tiles_layout import Settings, Stream, token_bytes

#: Most query rows of a program, and most tokens of a tile.
ROWS, TILE = 128, 128
NF4 = FORMATS["nf4"].index


def extend_settings(
    streams: Sequence[Stream], tokens: int, unit: int, *, edges: bool = False
) -> Settings:
    """Settings for ``tokens`` queries of a head, on GPUs that multiply from shared memory (sm_90).

    A tile of 128 tokens takes a sixth fewer instructions a token than one of 64, and its scales are loaded ahead; nf4,
    and windows and sinks, have no registers for it.

    Args:
        streams: keys, then v.
        tokens: T.
        unit: slots of a page, or of a contiguous cache: a tile should divide it.
        edges: whether there are a window or sinks.
    """
    widest = max(stream.width for stream in streams)
    if any(stream.dot == tl.float32 for stream in streams):
        rows, tile, warps = ROWS // 2, 32, 4
    elif widest > 192:
        rows, tile, warps = ROWS // 2, TILE // 2, 8
    elif tokens <= ROWS // 2:
        rows, tile, warps = ROWS // 2, TILE // 2, 4 if widest <= 128 else 8
    else:
        large = widest <= 128 and not edges and all(stream.form != NF4 for stream in streams)
        rows, tile, warps = ROWS, TILE if large else TILE // 2, 8
    while unit % tile and tile > 32:
        tile //= 2
    return Settings(rows, tile, warps, 2, widest <= 64)


def shared_bytes(chosen: Settings, streams: Sequence[Stream]) -> int:
    """About as many bytes of shared memory as a launch needs: queries, a tile of operands, packed tiles of the stages."""
    size = 4 if any(stream.dot == tl.float32 for stream in streams) else 2
    keys, width = sum(s.width for s in streams[:-1]), sum(s.width for s in streams)
    packed = sum(token_bytes(s) for s in streams)
    return (
        size * (chosen.rows * keys + chosen.tile * width)
        + chosen.num_stages * chosen.tile * packed
    )


def extend_within(chosen: Settings, streams: Sequence[Stream], limit: int) -> Settings:
    """The same with shorter tiles and fewer rows, until they need at most ``limit`` bytes of shared memory."""
    while shared_bytes(chosen, streams) > limit and (chosen.tile > 32 or chosen.rows > 32):
        if chosen.tile > 32:
            chosen = replace(chosen, tile=chosen.tile // 2)
        else:
            chosen = replace(chosen, rows=chosen.rows // 2, num_warps=4)
    return chosen
