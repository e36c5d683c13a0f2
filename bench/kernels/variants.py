"""The kernels that are compiled ahead of time: one row a specialization."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from caramba_fast.bench.kernels.variant import POINTERS, SLOTS, Variant
from caramba_fast.bench.kernels.variants_append import append_variants
from caramba_fast.bench.kernels.variants_around import merge, prepare, schedule
from caramba_fast.formats import CHANNEL_KINDS, QUANTIZED_KINDS, resolve
from caramba_fast.kernels import (
    apply_rotary_emb,
    dequantize,
    dequantize_by_channel,
    merge_state,
    quantize,
    quantize_by_channel,
    tiles_balanced,
    tiles_kernel,
)
from caramba_fast.kernels.extend_settings import extend_settings
from caramba_fast.kernels.splits_stream import dot_dtype
from caramba_fast.kernels.tiles_layout import (
    Shape,
    Stream,
    segments,
    settings,
)

#: The width of rows; only an address calculation depends on it.
HEAD_DIM = 128


def _quantize(kind: str, dtype: str, block: int, fit: str = "amax") -> Variant:
    return Variant(
        op="quantize",
        kind=kind,
        dtype=dtype,
        block=block,
        kernel=quantize.quantize_kernel,
        arguments={
            "x_ptr": POINTERS[dtype],
            "codes_ptr": POINTERS[kind],
            "scales_ptr": "*fp16",
            "row_stride": "i32!",
            "n_blocks": "i32",
        },
        constants=quantize.constants(resolve(kind), HEAD_DIM, block, fit),
        num_warps=quantize.NUM_WARPS,
        values=quantize.VALUES_PER_PROGRAM[fit],
        fit=fit,
    )


def _dequantize(kind: str, dtype: str, block: int) -> Variant:
    return Variant(
        op="dequantize",
        kind=kind,
        dtype=dtype,
        block=block,
        kernel=dequantize.dequantize_kernel,
        arguments={
            "codes_ptr": POINTERS[kind],
            "scales_ptr": "*fp16",
            "out_ptr": POINTERS[dtype],
            "codes_stride": "i32!",
            "scales_stride": "i32!",
            "n_blocks": "i32",
        },
        constants=dequantize.constants(resolve(kind), HEAD_DIM, block, ptx=True),
        num_warps=dequantize.NUM_WARPS,
        values=dequantize.VALUES_PER_PROGRAM,
    )


#: Query heads of a kv head; a DBA layer has one query head for each of the four kv heads of its lane.
GROUPS = 4
QUERIES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _stream(kind: str, dim: int, per_lane: int, dtype: str, group: int) -> Stream:
    form, width = resolve(kind), dim * per_lane
    return Stream(
        form.index, 32, dot_dtype(form, QUERIES[dtype]), width, dim, segments(width),
        group if form.by_channel else 1,
    )  # fmt: skip


def _decode(
    options: str,
    kinds: tuple[str, ...],
    dims: tuple[int, ...] = (128, 128),
    *,
    dtype: str = "fp16",
    tokens: int = 1,
    per_lane: int = 1,
    page: int = 0,
    window: bool = False,
    rotated: bool = False,
    side: int = 0,
    group: int = 32,
    extend: bool = False,
    is_balanced: bool = False,
) -> Variant:
    """decode_attention of streams k, v or k_sem, k_geo, v; ``side`` tokens of sinks, and a tail; or extend_attention.

    By channel there is a tail without them, too, and ``group`` tokens share scales.

    ``rotated``: queries are those that `prepare` made, in float32; ``is_balanced``: under a balanced schedule.
    """
    k, *g, v = (
        _stream(kind, dim, per_lane, dtype, group) for kind, dim in zip(kinds, dims, strict=True)
    )
    group = max(stream.group for stream in (k, *g, v))
    tail = side > 0 or group > 1
    groups = 1 if g else GROUPS
    streams = [k, *g, v]
    choose = None
    if extend:
        edges = window or side > 0
        choose = functools.partial(extend_settings, streams, tokens, page or SLOTS, edges=edges)
        chosen = choose(major=9)
    else:
        chosen = settings(streams, groups * tokens * per_lane, page or SLOTS)
    shape = Shape(
        groups=groups, tokens=0 if extend else tokens, extend=extend, heads=8, per_lane=per_lane,
        rows=chosen.rows, tile=chosen.tile, page=page, window=window, tail=tail, sink_len=side,
        group=group, warps=chosen.num_warps, balanced=is_balanced,
    )  # fmt: skip
    strides = ("i32!",) * 4
    stored = [
        (POINTERS[kind], "*fp16" if resolve(kind).quantized else None, *strides) for kind in kinds
    ]
    query = ("*fp32" if rotated else POINTERS[dtype], "i32!", "i32!", "i32!", "fp32")
    tails, sinks = (
        ("*fp16" if there else None, "*fp16" if there and g else None, "*fp16" if there else None)
        for there in (tail, side)
    )
    return Variant(
        op=f"{'decoupled_' * bool(g)}{'extend' if extend else 'decode'}_attention",
        kind="/".join(dict.fromkeys(kinds)),
        dtype=dtype,
        block=32,
        kernel=tiles_balanced.balanced_kernel if is_balanced else tiles_kernel.partials_kernel,
        arguments={
            "queries": query + (query if g else (None,)),
            "streams": (stored[0], stored[1] if g else None, stored[-1]),
            "tails": tails,
            "sinks": sinks,
            "lengths": ("*i32", None, None),
            "table_ptr": "*i32" if page else None,
            "table_stride": "i32",
            "partial_ptr": "*fp32",
            "lse_ptr": "*fp32",
            **dict.fromkeys(("window", "kept", "residual", "slots"), "i32"),
            "ring": "i32",
            **dict.fromkeys(("splits", "least", "tokens", "walkers", "batch_size"), "i32"),
            "schedule_ptr": "*i32",
            "softcap": "fp32",
        },
        constants={
            "K": k, "G": g[0] if g else None, "V": v, "K_SIDE": k.side,
            "G_SIDE": g[0].side if g else None, "V_SIDE": v.side, "C": shape,
        },
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        values=chosen.tile * (k.width + v.width),
        options=options,
        tile=chosen.tile,
        narrow=chosen.narrow,
        choose=choose,
        fusion=True,
    )  # fmt: skip


def _balanced_table() -> Iterator[Variant]:
    """What rows of different lengths launch."""
    for kinds in (
        ("q4_0", "q4_0"),
        ("q8_0", "q8_0"),
        ("q4_channel", "q4_0"),
        ("q8_channel", "q8_0"),
    ):
        yield _decode("D 128, balanced", kinds, is_balanced=True)
    yield _decode("D 128, T 4, balanced", ("q4_channel", "q4_0"), tokens=4, is_balanced=True)
    yield _decode("D 128, paged, balanced", ("q4_channel", "q4_0"), page=64, is_balanced=True)
    yield schedule()
    yield merge(is_balanced=True)


def _decode_table() -> Iterator[Variant]:
    for kind in ("fp16", *QUANTIZED_KINDS):
        yield _decode("D 128", (kind, kind))
    for kind in ("fp16", *QUANTIZED_KINDS):
        yield _decode("D 128, T 4", (kind, kind), tokens=4)
    yield _decode("D 128", ("bf16", "bf16"), dtype="bf16")
    q4 = ("q4_0", "q4_0")
    yield _decode("D 128", q4, dtype="bf16")
    yield _decode("D 128, fp32 query", q4, dtype="fp32")
    yield _decode("D 64", q4, (64, 64))
    yield _decode("D 80", q4, (80, 80), per_lane=2)
    yield _decode("D 256", q4, (256, 256))
    yield _decode("D 128, 32 rows", q4, tokens=8)
    yield _decode("D 128, T 16", q4, tokens=16)
    yield _decode("D 64, T 16", q4, (64, 64), tokens=16)
    yield _decode("D 128, paged", q4, page=128)
    yield _decode("D 128, rotated", q4, rotated=True)
    yield _decode("D 128, rotated, tail, sinks, window, paged", q4, rotated=True, side=4, window=True,
                  page=128)  # fmt: skip
    dba = {"dims": (8, 32, 64), "per_lane": 4}
    yield _decode("sem 8, geo 32, v 64", ("q8_0", *q4), **dba)
    yield _decode("sem 8, geo 32, v 64", ("q8_0", "q8_0", "q8_0"), **dba)
    yield from _by_channel()
    yield prepare()
    yield merge()
    yield from _balanced_table()


def _by_channel() -> Iterator[Variant]:
    """Keys by channel, beside the values that caches store with them."""
    q4 = ("q4_channel", "q4_0")
    for values in ("q8_0", "q4_0", "nf4"):
        yield _decode("D 128", ("q8_channel" if values == "q8_0" else "q4_channel", values))
    for kinds in (q4, ("q8_channel", "q8_0")):
        yield _decode("D 128, T 4", kinds, tokens=4)
    yield _decode("D 64, T 4", q4, (64, 64), tokens=4)
    yield _decode("D 128, group 64", q4, group=64)
    yield _decode("D 128, group 128", q4, group=128)
    yield _decode("D 128, fp32 query", q4, dtype="fp32")
    yield _decode("D 64", q4, (64, 64))
    yield _decode("D 80", q4, (80, 80), per_lane=2)
    yield _decode("D 256", q4, (256, 256))
    yield _decode("D 128, 32 rows", q4, tokens=8)
    yield _decode("D 64, T 16", q4, (64, 64), tokens=16)
    yield _decode("D 128, sinks, window, paged", q4, side=4, window=True, page=128)
    yield _decode("D 128", ("q4_channel", "q8_channel"))
    yield _decode(
        "sem 8, geo 32, v 64", ("q4_channel", "q4_channel", "q4_0"), (8, 32, 64), per_lane=4
    )


def _extend_table() -> Iterator[Variant]:
    """Prompts of more than 64 tokens, and of fewer."""
    prompt = functools.partial(_decode, tokens=512, extend=True)
    q4 = ("q4_0", "q4_0")
    for kind in ("fp16", *QUANTIZED_KINDS):
        yield prompt("D 128", (kind, kind))
    yield prompt("D 128", ("bf16", "bf16"), dtype="bf16")
    yield prompt("D 128, fp32 query", q4, dtype="fp32")
    yield prompt("D 64", q4, (64, 64))
    yield prompt("D 80", q4, (80, 80), per_lane=2)
    yield prompt("D 256", q4, (256, 256))
    yield _decode("D 128, 64 tokens", q4, tokens=64, extend=True)
    yield prompt(
        "D 128, rotated, sinks, window, paged", q4, rotated=True, side=4, window=True, page=128
    )
    yield prompt("sem 8, geo 32, v 64", ("q8_0", *q4), (8, 32, 64), per_lane=4)
    yield prompt("D 128", ("q4_channel", "q4_0"))
    yield prompt("D 128", ("q8_channel", "q8_0"))


@functools.cache
def variants() -> tuple[Variant, ...]:
    """The table: quantize, dequantize, decode attention, append; at most 120 rows."""
    return (*_quantize_table(), *_decode_table(), *_extend_table(), *_append_table())


def _append_table() -> tuple[Variant, ...]:

    return append_variants()


def _quantize_table() -> Iterator[Variant]:
    for build in (_quantize, _dequantize):
        for kind in QUANTIZED_KINDS:
            yield build(kind, "fp16", 32)
            yield build(kind, "fp32", 32)
        yield build("q4_0", "fp16", 64)
    for kind in QUANTIZED_KINDS:
        yield _quantize(kind, "fp16", 32, "mse")
    yield _quantize("q4_0", "fp32", 128, "mse")
    for kind in CHANNEL_KINDS:
        for dtype, group in (("fp16", 32), ("fp32", 128)):
            fit = "mse" if (kind, group) == ("q4_channel", 128) else "amax"
            yield _quantize_by_channel(kind, dtype, group, fit)
            yield _dequantize_by_channel(kind, dtype, group)
    yield _merge_state("fp16")
    yield _merge_state("fp32")
    yield _apply_rotary_emb("fp16")
    yield _apply_rotary_emb("fp32")


def _quantize_by_channel(kind: str, dtype: str, group: int, fit: str = "amax") -> Variant:
    module = quantize_by_channel
    fixed = module.constants(resolve(kind), HEAD_DIM, group)
    return Variant(
        "quantize", kind, dtype, group, module.quantize_channel_kernel,
        {"x_ptr": POINTERS[dtype], "codes_ptr": "*u8", "scales_ptr": "*fp16", "row_stride": "i32!"},
        {**fixed, "FIT": fit}, module.num_warps(fixed), fixed["GROUP"] * fixed["BLOCKS"] * fixed["PACKED"],
        fit="" if fit == "amax" else fit,
    )  # fmt: skip


def _dequantize_by_channel(kind: str, dtype: str, group: int) -> Variant:
    module = dequantize_by_channel
    fixed = quantize_by_channel.constants(resolve(kind), HEAD_DIM, group, module.VALUES_PER_PROGRAM)
    strides = {"codes_stride": "i32!", "scales_stride": "i32!"}
    return Variant(
        "dequantize", kind, dtype, group, module.dequantize_channel_kernel,
        {"codes_ptr": "*u8", "scales_ptr": "*fp16", "out_ptr": POINTERS[dtype], **strides},
        fixed, quantize_by_channel.num_warps(fixed, module.THREAD_VALUES),
        fixed["GROUP"] * fixed["BLOCKS"] * fixed["PACKED"],
    )  # fmt: skip


def _merge_state(dtype: str) -> Variant:
    sides = {
        "a_ptr": POINTERS[dtype], "a_lse_ptr": "*fp32", "b_ptr": POINTERS[dtype], "b_lse_ptr": "*fp32",
        "out_ptr": POINTERS[dtype], "lse_ptr": "*fp32", "a_stride": "i32!", "b_stride": "i32!", "n_rows": "i32",
    }  # fmt: skip
    return Variant(
        "merge_state", dtype, dtype, 0, merge_state.merge_state_kernel, sides, merge_state.constants(HEAD_DIM),
        merge_state.NUM_WARPS, merge_state.VALUES_PER_PROGRAM, fusion=True,
    )  # fmt: skip


def _apply_rotary_emb(dtype: str) -> Variant:
    names = ("q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "q_out", "k_out")
    pointers = dict.fromkeys(names, POINTERS[dtype])
    steps = [f"{x}_{axis}" for x in "qk" for axis in ("row", "head", "token")]
    strides = dict.fromkeys((*steps, "cos_row"), "i32!")
    fixed = apply_rotary_emb.constants(HEAD_DIM, HEAD_DIM)
    return Variant(
        "apply_rotary_emb", dtype, dtype, 0, apply_rotary_emb.apply_rotary_emb_kernel,
        {**pointers, **strides, "q_heads": "i32", "k_heads": "i32", "tokens": "i32"}, fixed, apply_rotary_emb.NUM_WARPS,
        HEAD_DIM * fixed["HEADS"],
    )  # fmt: skip
