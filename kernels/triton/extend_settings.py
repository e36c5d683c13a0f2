"""Launch settings of extend attention, by the registers and the main loops of what is compiled (docs/kernels.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import triton.language as tl

from caramba_fast.formats import FORMATS

from .tiles_layout import Settings, Stream, token_bytes

#: Generations (compute capability) whose products read operands from shared memory: what is unpacked is there for all
#: warps. On others each warp unpacks all of a tile, into its registers: tiles are small.
FROM_SHARED = (9, 10)
BLOCKS = (FORMATS["q8_0"].index, FORMATS["q4_0"].index)


def extend_settings(
    streams: Sequence[Stream], tokens: int, unit: int, *, major: int, edges: bool = False
) -> Settings:
    """Settings for ``tokens`` queries of a head.

    Args:
        streams: keys, then v.
        tokens: T.
        unit: slots of a page, or of a contiguous cache: a tile should divide it.
        major: of the GPU's compute capability; 0 for AMD.
        edges: whether there are a window or sinks.
    """
    widest = max(stream.width for stream in streams)
    wide = any(stream.dot == tl.float32 for stream in streams)
    if major in FROM_SHARED and not (wide and major > 9):
        rows, tile, warps = _from_shared(streams, tokens, wide, edges)
    elif wide:
        rows, tile, warps = 16, 32, 4
    elif widest > 128 or any(stream.group > 1 for stream in streams):
        rows, tile, warps = 32, 16, 4
    else:
        rows, tile, warps = 64, 16 if major == 0 else 32, 4
    while unit % tile and tile > 32:
        tile //= 2
    return Settings(rows, tile, warps, 2, widest <= 64)


def _from_shared(
    streams: Sequence[Stream], tokens: int, wide: bool, edges: bool
) -> tuple[int, int, int]:
    """Query rows, tokens of a tile, warps.

    A tile of 128 tokens takes a sixth fewer instructions a token than one of 64, and its scales are loaded ahead. What
    is not q8_0 or q4_0, and windows and sinks, have no registers for it with every supported Triton.
    """
    widest = max(stream.width for stream in streams)
    if wide:
        return 64, 32, 4
    if widest > 192:
        return 64, 64, 8
    if tokens <= 64:
        return 64, 64, 4 if widest <= 128 else 8
    large = widest <= 128 and not edges and all(stream.form in BLOCKS for stream in streams)
    return 128, 128 if large else 64, 8


def shared_bytes(chosen: Settings, streams: Sequence[Stream]) -> int:
    """About as many bytes of shared memory as a launch needs: queries, a tile of operands, packed tiles of stages."""
    size = 4 if any(stream.dot == tl.float32 for stream in streams) else 2
    keys, width = sum(s.width for s in streams[:-1]), sum(s.width for s in streams)
    packed = sum(token_bytes(s) for s in streams)
    return (
        size * (chosen.rows * keys + chosen.tile * width) + chosen.num_stages * chosen.tile * packed
    )


def extend_within(chosen: Settings, streams: Sequence[Stream], limit: int) -> Settings:
    """The same with shorter tiles and fewer rows, until they need at most ``limit`` bytes of shared memory."""
    while shared_bytes(chosen, streams) > limit and (chosen.tile > 16 or chosen.rows > 16):
        if chosen.tile > 16:
            chosen = replace(chosen, tile=chosen.tile // 2)
        else:
            chosen = replace(chosen, rows=chosen.rows // 2, num_warps=4)
    return chosen
