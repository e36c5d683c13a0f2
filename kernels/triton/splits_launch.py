"""From the flat arguments of the decode ops to three launches; no host sync, no hidden copies of a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import FORMATS, Format, resolve

from .casts import INTERPRETED
from .launch import has_ptx, on_device
from .merge_splits import LOG2E, merge_kernel
from .splits import plan
from .tiles_attend import partials_kernel
from .tiles_layout import Shape, Stream, segments, settings
from .tiles_query import prepare_kernel

#: Widest head the kernels were laid out for.
WIDEST_HEAD = 256
OLDEST_CAPABILITY = (8, 0)


@dataclass
class Stored:
    """One stream as the op got it."""

    codes: Tensor
    scales: Tensor | None
    form: Format
    options: dict[str, Any]
    query: Tensor | None = None

    @property
    def width(self) -> int:
        return self.form.value_width(self.codes.shape[3])

    @property
    def pointers(self) -> tuple[Any, ...]:
        """Codes and scales, each one's strides of B and of lanes."""
        scales = (0, 0) if self.scales is None else self.scales.stride()[:2]
        return (self.codes, self.scales, *self.codes.stride()[:2], *scales)

    def described(self, per_lane: int, dot: Any) -> Stream:
        """The constexpr record."""
        block = 32 if self.scales is None else self.width // self.scales.shape[3]
        bias, phases = self.options.get("bias"), self.options.get("phases")
        pairs = 0 if bias is None else bias.shape[1]
        harmonics = max(16, triton.next_power_of_2(2 * pairs * per_lane)) if pairs else 0
        table = phases.shape[2] if pairs else 0
        dim, cut = self.width // per_lane, segments(self.width)
        return Stream(self.form.index, block, dot, self.width, dim, cut, pairs, table, harmonics)


def dot_dtype(form: Format, query: torch.dtype) -> Any:
    """Operands of ``tl.dot``: float16 wherever it can hold the format and is as good as the query.

    bfloat16 keys meet bfloat16 queries as they are; a float16 query would lose bits, so that mix takes
    float32 (three TF32 products), like everything of a float32 query. The interpreter has no bfloat16.
    """
    if query == torch.float32 or form.name == "fp32":
        return tl.float32
    if form.name == "bf16":
        return tl.bfloat16 if query == torch.bfloat16 and not INTERPRETED.value else tl.float32
    return tl.float16


def launch(
    queries: Mapping[str, Tensor],
    stored: Mapping[str, tuple[Tensor, Tensor | None, str]],
    cache_seqlens: Tensor,
    factors: Mapping[str, float | None],
    *,
    n_kv_heads: int,
    block_table: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    query_lens: Tensor | None = None,
    residual_len: int = 0,
    s_aux: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    num_sink_tokens: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    **described: Any,
) -> tuple[Tensor, Tensor]:
    """Runs one decode op. ``described`` holds the options of the streams, by their names."""
    streams = {name: _taken(name, *stored[name], queries.get(name), described) for name in stored}
    keys, value = [streams[name] for name in queries], streams["v"]
    nulls = [described.pop(f"null_{name}", None) for name in streams]
    first = next(iter(queries.values()))
    _check(first, streams, described)
    batch, heads, tokens, _ = first.shape
    given = {name: q.shape[3] ** -0.5 if factors[name] is None else factors[name] for name, q in queries.items()}
    raw = [float(x) for x in given.values()]
    scaled = [x if softcap > 0 else x * LOG2E.value for x in raw]

    per_lane = keys[0].width // first.shape[3]
    records = [s.described(per_lane, dot_dtype(s.form, first.dtype)) for s in (*keys, value)]
    tail, sink = value.options.get("tail"), value.options.get("sink")
    residual = residual_len if tail is not None else 0
    size = value.codes.shape[2]
    slots = size if block_table is None else size * block_table.shape[1]
    rows = per_lane * heads // n_kv_heads * tokens
    chosen = settings(records, rows, size)
    window = int(window_size[0])
    shape = Shape(
        groups=heads // n_kv_heads, tokens=tokens, heads=n_kv_heads, per_lane=per_lane,
        rows=chosen.rows, tile=chosen.tile, page=0 if block_table is None else size,
        masked=size % chosen.tile != 0, sink_len=0 if sink is None else sink.shape[2],
        window=window >= 0, kept=window >= 0 and num_sink_tokens > 0, softcap=softcap > 0,
        tail=residual > 0, ptx=has_ptx(), precision="tf32x3" if has_ptx() else "ieee",
    )  # fmt: skip
    lanes, pieces = value.codes.shape[1], triton.cdiv(rows, chosen.rows)
    reach = slots if window < 0 else min(slots, window + tokens + num_sink_tokens + chosen.tile)
    splits, least = plan(reach, chosen.tile, batch * lanes * pieces, first.device, num_splits)
    in_all = splits + (residual > 0) + (shape.sink_len > 0)
    partial = first.new_empty((batch, heads * tokens, in_all, records[-1].dim), dtype=torch.float32)
    sums = first.new_empty((batch, heads * tokens, in_all), dtype=torch.float32)
    out = first.new_empty((batch, heads, tokens, records[-1].dim))
    lse = first.new_empty((batch, heads, tokens), dtype=torch.float32)
    with on_device(first):
        prepared = [_prepared(s, record, f, shape) for s, record, f in zip(keys, records[:-1], scaled, strict=True)]
        asked = [(p[0], *p[0].stride()[:3], f) for p, f in zip(prepared, scaled, strict=True)]
        g_record = records[1] if len(keys) == 2 else None
        sides = [
            tuple(None if x is None else x.contiguous() for x in _three(streams, part))
            for part in ("tail", "sink")
        ]
        partials_kernel[(in_all, lanes * pieces, batch)](
            sum(asked, ()), keys[0].pointers, keys[1].pointers if g_record else None, value.pointers,
            *sides, tuple(x for p, s in zip(prepared, keys, strict=True) for x in (p[1], s.options.get("phases")))
            + (() if g_record else (None, None)),
            (cache_seqlens, cache_leftpad, query_lens), block_table,
            0 if block_table is None else block_table.stride(0), partial, sums,
            (window, num_sink_tokens, residual), size, 0 if tail is None else tail.shape[2], splits,
            least, softcap, records[0], g_record, records[-1], records[0].side,
            g_record and g_record.side, records[-1].side, shape,
            num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip
        _merge(queries, raw, nulls, s_aux, value, shape, partial, sums, out, lse, cache_seqlens, query_lens, softcap)
    return out, lse
