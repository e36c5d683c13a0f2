"""Systems measured together: all of a case if they fit into memory, else those of each width beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from caramba_fast.bench.peers.problem import Shape
from caramba_fast.bench.peers.session import System

#: Most bytes of caches and the values they are filled from, held at once.
MOST_BYTES = 6 * 2**30


def needed(shape: Shape, together: Sequence[System]) -> float:
    """Bytes of a problem and the caches of these systems."""
    return 4 * shape.values + sum(system.bytes_needed(shape) for system in together)


def width(system: System) -> int:
    """Bits by which systems are grouped; unquantized ones are all in one group."""
    return min(system.bits, 16)


def groups(
    shape: Shape, listed: Sequence[System], most: float = MOST_BYTES
) -> tuple[list[list[System]], dict[System, str]]:
    """(groups of systems, each with ours of every width in it; those left out, and why)."""
    if needed(shape, listed) <= most:
        return [list(listed)], {}
    made: list[list[System]] = []
    out: dict[System, str] = {}
    for bits in dict.fromkeys(width(system) for system in listed):
        own = [system for system in listed if width(system) == bits and system.ours]
        group = list(own)
        for system in listed:
            if width(system) != bits or system.ours:
                continue
            if needed(shape, [*own, system]) > most:
                size = needed(shape, [*own, system]) / 2**30
                out[system] = f"left out: needs {size:.1f} GiB beside ours, of {most / 2**30:g} GiB"
                continue
            if needed(shape, [*group, system]) > most:
                made.append(group)
                group = list(own)
            group.append(system)
        if needed(shape, group) <= most:
            made.append(group)
        else:
            size = needed(shape, group) / 2**30
            out |= dict.fromkeys(group, f"left out: needs {size:.1f} GiB, of {most / 2**30:g} GiB")
    return made, out
