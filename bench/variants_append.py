"""The append kernels that are compiled ahead of time: rows for the table of `variants`.

``python -m caramba_fast.bench.variants_append [TARGET ...]`` compiles and prints them, with status 1 if one
spills registers or wants too much shared memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from caramba_fast.formats import resolve
from caramba_fast.kernels import append
from caramba_fast.kernels.streams import Layout, Rows, Stream, layout

from . import aot
from .variants import POINTERS, Variant

#: What a step of decoding and what a prompt gives a program.
VALUES = {"step": 0, "prompt": append.PROMPT_VALUES}
BLOCK = 32


def flattened(
    place: tuple[int, ...], kind: Any, constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    """`aot._flattened` that keeps named tuples named and takes a number for a specialized integer."""
    if isinstance(kind, tuple):
        parts = [flattened((*place, i), x, constants, attributes) for i, x in enumerate(kind)]
        return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)
    if kind is None or isinstance(kind, int):
        constants[place] = kind
        return "constexpr"
    if kind.startswith("*") or kind.endswith("!"):
        attributes[place] = [["tt.divisibility", 16]]
    return kind.removesuffix("!")


def _stream(kind: str, dtype: str, *, side: bool, pairs: int, scale: bool) -> Stream:
    """Types of a stream's arguments; all strides are divisible by 16, as caches allocate them."""
    given = {
        "new": POINTERS[dtype],
        "new_dim": 1,
        "codes": POINTERS[kind],
        "scales": "*fp16" if resolve(kind).quantized else None,
        **dict.fromkeys(("tail", "sink"), "*fp16" if side else None),
        "mean": None,
        **dict.fromkeys(("bias", "phases"), "*fp32" if pairs else None),
        "pairs": "*i32" if pairs else None,
        "scale": "*fp32" if scale else None,
        **dict.fromkeys(("pages", "ring", "sink_len", "phase_rows"), "i32"),
    }
    return Stream(**{name: given.get(name, "i32!") for name in Stream._fields})


def _append(
    options: str,
    kinds: tuple[str, ...],
    dims: tuple[int, ...] = (128, 128),
    *,
    heads: int = 1,
    fit: str = "amax",
    safe: bool = False,
) -> Variant:
    """``safe``: keys centered, scaled and rotated, values scaled, tail and sinks, pages and padding."""
    length = options.split(maxsplit=1)[0]
    streams: list[Stream] = []
    layouts: list[Layout] = []
    for i, (kind, dim) in enumerate(zip(kinds, dims, strict=True)):
        key = safe and i < len(kinds) - 1
        pairs = 4 if key else 0
        streams.append(_stream(kind, "fp16", side=safe, pairs=pairs, scale=safe))
        layouts.append(
            layout(kind, dim, heads, BLOCK, fit=fit, pairs=pairs, rotate=key, values=VALUES[length])
        )
    pages = "*i32" if safe else None
    return Variant(
        op="append_" if len(kinds) == 2 else "decoupled_append_",
        kind="/".join(dict.fromkeys(kinds)),
        dtype="fp16",
        block=BLOCK,
        kernel=append.append_kernel,
        arguments={
            "streams": tuple(streams),
            "where": Rows("*i32", pages, pages, pages, "i32", "i32"),
            "heads": "i32",
            "tokens": "i32",
        },
        constants={"LAYOUTS": tuple(layouts)},
        num_warps=append.num_warps(tuple(layouts)),
        values=sum(part.ROWS * part.BLOCK for part in layouts),
        fit=fit,
        options=options,
    )


def _table() -> Iterator[Variant]:
    yield _append("step", ("fp16", "fp16"))
    for length in VALUES:
        yield _append(length, ("q8_0", "q4_0"))
        yield _append(f"{length} safe", ("q4_0", "nf4"), fit="mse", safe=True)
    yield _append("prompt safe, lanes of 2", ("q8_0", "q4_0"), (80, 80), heads=2, safe=True)
    yield _append("step safe", ("q4_0", "q8_0", "q4_0"), (8, 16, 32), heads=4, safe=True)


VARIANTS: tuple[Variant, ...] = tuple(_table())


def main(targets: list[str]) -> int:
    """The command line; returns the exit status."""
    aot._flattened = flattened
    table = list(aot.rows(targets or list(aot.TARGETS), VARIANTS))
    aot.write_csv(sys.stdout, [asdict(row) for row in table])
    found = [problem for row in table for problem in aot.problems(row)]
    print(*found, sep="\n", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
