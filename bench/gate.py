"""What may not happen to a compiled kernel: the conditions of the ahead-of-time gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .aot import Row

Key = tuple[str, ...]

#: Columns that tell rows apart.
KEY = ("triton", "target", "op", "kind", "dtype", "block", "fit", "options")
#: Bytes of shared memory (LDS) a block may have, sm_86 as many as sm_89: CUDA C++ Programming Guide, table of technical
#: specifications; AMD CDNA3 ISA.
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
#: Bytes a thread has to load at once where K or V is quantized.
NARROWEST_LOAD = 8
QUANTIZED = {"q8_0", "q4_0", "nf4"}


def identity(columns: Mapping[str, object]) -> Key:
    """What tells a row apart from others."""
    return tuple(str(columns[name]) for name in KEY)


def key(row: Row) -> Key:
    """What a row is found by."""
    return identity(vars(row))


def by_key(table: Iterable[Mapping[str, str]]) -> dict[Key, Mapping[str, str]]:
    """Rows of a CSV by what tells them apart."""
    return {identity(row): row for row in table}


def _spills(row: Row) -> str:
    return f"spills registers ({row.spills})" if row.spills else ""


def _shared_memory(row: Row) -> str:
    limit = SHARED_LIMITS[row.target]
    if row.shared_bytes <= limit:
        return ""
    return f"needs {row.shared_bytes} bytes of shared memory of {limit}"


def _matrix(row: Row) -> str:
    return "has no matrix instruction in its main loop" if row.matrix == 0 else ""


def _narrow(row: Row) -> str:
    if row.narrowest_load is None or QUANTIZED.isdisjoint(row.kind.split("/")):
        return ""
    if row.narrowest_load >= NARROWEST_LOAD:
        return ""
    return f"loads K or V {row.narrowest_load} bytes a thread at a time, not {NARROWEST_LOAD}"


CONDITIONS: tuple[Callable[[Row], str], ...] = (_spills, _shared_memory, _matrix, _narrow)


def problems(row: Row, recorded: Mapping[Key, Mapping[str, str]] | None = None) -> list[str]:
    """What is wrong with a row; empty if nothing is.

    Args:
        row: the row.
        recorded: `by_key` of rows it may not be worse than; a row they lack is wrong as well.
    """
    found = [text for condition in CONDITIONS if (text := condition(row))]
    if recorded is not None:
        found += _worse(row, recorded.get(key(row)))
    what = ", ".join(
        filter(None, (row.kind, row.dtype, f"block {row.block}", row.fit, row.options))
    )
    return [f"{row.op}[{what}] on {row.target}, Triton {row.triton} {text}" for text in found]


def _worse(row: Row, earlier: Mapping[str, str] | None) -> list[str]:
    if earlier is None:
        return ["is not recorded (make aot)"]
    before = float(earlier["loop_per_token"] or 0)
    if row.loop_per_token is None or row.loop_per_token <= before:
        return []
    return [f"takes {row.loop_per_token} instructions a token in its main loop, {before} recorded"]
