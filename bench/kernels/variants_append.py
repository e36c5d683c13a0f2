"""The append kernels that are compiled ahead of time: rows for the table of `variants`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from caramba_fast.bench.kernels.variant import POINTERS, Variant
from caramba_fast.formats import resolve
from caramba_fast.kernels import append
from caramba_fast.kernels.streams import Layout, Queries, Stream, layout

#: New tokens of a step of decoding and of a prompt.
TOKENS = {"step": 1, "prompt": append.PROMPT_TOKENS}
BLOCK = 32


def _stream(
    kind: str, dtype: str, *, tail: bool, sink: bool, rotary: bool = False, weighed: bool = False
) -> tuple[Any, ...]:
    """Types of a stream's arguments; all strides are divisible by 16, as caches allocate them."""

    def given(pointer: str, there: object) -> str | None:
        return pointer if there else None

    types: dict[str, str | None] = {
        "new": POINTERS[dtype],
        "new_dim": None,
        "codes": POINTERS[kind],
        "scales": given("*fp16", resolve(kind).quantized),
        "tail": given("*fp16", tail),
        "sink": given("*fp16", sink),
        "cos": given(POINTERS[dtype], rotary),
        "sin": given(POINTERS[dtype], rotary),
        "cos_row": given("i32!", rotary),
        "query_rms": given("*fp32", weighed),
    }
    return tuple(types.get(name, "i32!") for name in Stream._fields)


def _queries(dtype: str) -> tuple[Any, ...]:
    """Types of the queries that are turned."""
    types: dict[str, str | None] = dict.fromkeys(("q", "out", "cos", "sin"), POINTERS[dtype])
    types |= {"q_dim": None, "heads": "i32"}
    return tuple(types.get(name, "i32!") for name in Queries._fields)


def _append(
    options: str,
    kinds: tuple[str, ...],
    dims: tuple[int, ...] = (128, 128),
    *,
    dtype: str = "fp16",
    heads: int = 1,
    fit: str = "amax",
    safe: bool = False,
    sides: bool = True,
    group: int = 32,
    rotary: bool = False,
) -> Variant:
    """``safe``: keys rotated, pages and padding. ``rotary``: RoPE of keys and queries.

    ``sides``: with it, a tail and sinks as well. By channel there is always a tail, and keys are not rotated.
    """
    by_channel = any(resolve(kind).by_channel for kind in kinds)
    tokens = append.tokens_at_once(
        TOKENS[options.split(maxsplit=1)[0].rstrip(",")], heads * max(dims)
    )
    streams: list[tuple[Any, ...]] = []
    layouts: list[Layout] = []
    for i, (kind, dim) in enumerate(zip(kinds, dims, strict=True)):
        key, turns = safe and i < len(kinds) - 1, rotary and i == len(kinds) - 2
        block = BLOCK if resolve(kind).quantized else None
        streams.append(
            _stream(
                kind,
                dtype,
                tail=by_channel or (safe and sides),
                sink=safe and sides,
                rotary=turns,
                weighed=kind == "q4_channel" and fit == "mse",
            )
        )
        grouped = group if resolve(kind).by_channel else 1
        chosen = layout(
            kind,
            dim,
            heads,
            block,
            fit=fit,
            rotate=key and grouped == 1,
            tokens=tokens,
            group=grouped,
            rotary=dim if turns else 0,
        )
        layouts.append(chosen)
    absent: list[Any] = [None] * (append.MOST_STREAMS - len(kinds))
    per_row = "*i32" if safe else None
    return Variant(
        op="append_" if len(kinds) == 2 else "decoupled_append_",
        kind="/".join(dict.fromkeys(kinds)),
        dtype=dtype,
        block=BLOCK,
        kernel=append.append_kernel,
        arguments={
            **dict(zip(("first", "second", "third"), (*streams, *absent), strict=True)),
            "where": ("*i32", per_row, per_row, per_row, "i32", "i32"),
            **dict.fromkeys(("table_row", "table_pages", "pages"), "i32"),
            "heads": "i32",
            "tokens": "i32",
            "writers": "i32" if by_channel else None,
            "queries": _queries(dtype) if rotary else None,
            "turners": "i32" if rotary else None,
        },
        constants={
            **dict(zip(("FIRST", "SECOND", "THIRD"), (*layouts, *absent), strict=True)),
            "TURNED": layouts[-2] if rotary else None,
            "HEADS": append.QUERY_HEADS,
        },
        num_warps=append.num_warps(layouts),
        values=sum(part.ROWS * part.BLOCK for part in layouts),
        fit=fit,
        options=options,
    )


def _table() -> Iterator[Variant]:
    for kind in ("fp16", "q8_0", "q4_0", "nf4"):
        yield _append("step", (kind, kind))
        yield _append("prompt", (kind, kind))
    for options in ("step", "prompt"):
        yield _append(options, ("q8_channel", "q8_0"))
        yield _append(options, ("q4_channel", "q4_0"), fit="mse")
    yield _append("step, RoPE", ("q8_0", "q8_0"), rotary=True)
    yield _append("step, RoPE", ("q4_channel", "q4_0"), dtype="bf16", fit="mse", rotary=True)
    yield _append("step safe, RoPE", ("q4_0", "q4_0"), safe=True, rotary=True)
    yield _append("step, RoPE", ("q8_0", "q4_0", "q4_0"), (8, 32, 64), heads=4, rotary=True)
    yield _append("step, group 128", ("q4_channel", "q4_0"), group=128)
    yield _append("prompt safe", ("q4_channel", "q4_0"), fit="mse", safe=True)
    yield _append(
        "step safe, lanes of 4",
        ("q4_channel", "q4_channel", "q4_0"),
        (8, 32, 64),
        heads=4,
        safe=True,
    )
    for kind in ("q4_0", "nf4"):
        yield _append("step safe", (kind, kind), fit="mse", safe=True)
    yield _append("prompt safe", ("q4_0", "q4_0"), fit="mse", safe=True)
    yield _append("step safe, lanes of 2", ("q8_0", "q4_0"), (80, 80), heads=2, safe=True)
    yield _append("step", ("q8_0", "q4_0", "q4_0"), (8, 32, 64), heads=4)
    yield _append("prompt safe", ("q8_0", "q4_0", "q4_0"), (8, 32, 64), heads=4, safe=True)


def append_variants() -> tuple[Variant, ...]:
    """One row a specialization of `append_kernel`."""
    return tuple(_table())
