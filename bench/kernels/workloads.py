"""A case with its inputs, its calls, and the error of its results against the truth.

Inputs are random (zeros would flatter), and queries are scaled so that logits have standard deviation 2. On CUDA an
implementation takes several copies of its inputs in turn, together larger than the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.kernels import comparators, oracle
from caramba_fast.bench.kernels.comparators import Implementation
from caramba_fast.bench.kernels.parity import same_bits
from caramba_fast.bench.kernels.registry import ATTENTION, BLOCK, DTYPES, Case, formats_of
from caramba_fast.formats import resolve
from caramba_fast.ops import (
    KVView,
    append_,
    decode_attention,
    decoupled_decode_attention,
    dequantize,
    extend_attention,
    quantize,
    use_backend,
)
from caramba_fast.ops.memory import empty
from caramba_fast.ops.quantize import encode_groups
from caramba_fast.ops.view import Lanes

OPS: dict[str, Callable[..., Any]] = {
    "decode_attention": decode_attention,
    "decoupled_decode_attention": decoupled_decode_attention,
    "extend_attention": extend_attention,
}
#: Most copies of small inputs.
MOST_COPIES = 256
LOGIT_DEVIATION = 2.0
#: Of the logarithm of queries' sizes by channel: with it half of the bytes of 4-bit keys are divided unevenly, as in
#: real models.
QUERY_DEVIATION = 0.82


@dataclass
class Workload:
    """What a case times.

    Attributes:
        ours: one entry per format, served by the current backend.
        errors: by format: measures (error, error allowed) of the current backend.
        peers: what users would call instead.
        absent: peers that are not measured, with the reason.
    """

    ours: list[Implementation] = field(default_factory=list)
    errors: dict[str, Callable[[], tuple[float, float]]] = field(default_factory=dict)
    peers: list[Implementation] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def copies(moved: int, device: torch.device) -> int:
    """Number of copies of ``moved`` bytes that are four times the L2 cache; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_COPIES, math.ceil(4 * cache / moved))


def stored(
    x: Tensor, kind: str, lanes: Lanes, fill: bool = True, ring: Tensor | None = None
) -> KVView:
    """x (B, H_kv, S, D) as a cache stores it; with ``fill`` false the bytes are uninitialised."""
    form = resolve(kind)
    lead = (x.shape[0], lanes.count, x.shape[2])
    width = lanes.heads_per_lane * x.shape[3]
    if not form.quantized:
        return KVView(empty((*lead, width), form.dtype, x.device).copy_(lanes.pack(x)), None, kind)
    codes = empty((*lead, form.code_width(width)), form.dtype, x.device)
    groups = (*lead[:2], lead[2] // BLOCK) if form.by_channel else lead
    scales = empty((*groups, form.scales_width(width, BLOCK)), torch.float16, x.device)
    view = KVView(codes, scales, kind, ring)
    if form.by_channel and form.bits == 4:
        sizes = (QUERY_DEVIATION * torch.randn(lanes.count, width, device=x.device)).exp()
        view = replace(view, fit="mse", query_rms=sizes)
    for row in range(x.shape[0] if fill else 0):
        codes[row : row + 1], scales[row : row + 1] = _encoded(view, lanes.pack(x[row : row + 1]))
    return view


def _encoded(view: KVView, x: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes x (1, lanes, S, lane_dim) as codes and scales of the view's kind."""
    if view.query_rms is None:
        return quantize(x, view.kind, BLOCK)
    groups = x.float().unflatten(-2, (-1, BLOCK))
    codes, scales = encode_groups(groups, view.kind, None, view.fit, view.query_rms[:, None])
    return codes.flatten(-3, -2), scales


def streams_of(
    given: Sequence[Tensor], kind: str, case: Case, fill: bool = True
) -> tuple[KVView, ...]:
    """All streams of a cache of ``kind``; by channel with the ring of the newest tokens that groups need."""
    formats = formats_of(kind, len(given))
    rings: list[Tensor | None] = [None] * len(given)
    if any(resolve(name).by_channel for name in formats):
        slots = -(-(BLOCK + case.tokens) // BLOCK) * BLOCK
        newest = [case.lanes.pack(x[:, :, case.kv - slots :]).half() for x in given]
        rings = [x.roll(case.kv % slots, dims=2).contiguous() for x in newest]
    return tuple(
        stored(x, name, case.lanes, fill, ring)
        for x, name, ring in zip(given, formats, rings, strict=True)
    )


def clone(view: KVView) -> KVView:
    """A copy with its own memory."""
    scales, tail = (None if x is None else x.clone() for x in (view.scales, view.tail))
    return replace(view, codes=view.codes.clone(), scales=scales, tail=tail)


def rotated(views: Sequence[KVView], count: int) -> list[list[KVView]]:
    """The views and ``count - 1`` copies of them."""
    return [list(views), *([clone(view) for view in views] for _ in range(count - 1))]


def _new_tokens(case: Case, dtype: torch.dtype, device: torch.device, fill: bool) -> list[Tensor]:
    """(B, H_kv, S, D) of each stream: random, or one expanded value, which takes no memory."""
    shapes = [(case.batch, case.kv_heads, case.kv, dim) for dim in case.dims]
    if not fill:
        return [torch.zeros(1, dtype=dtype, device=device).expand(shape) for shape in shapes]
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def _attention(case: Case, device: torch.device, fill: bool, timed: bool) -> Workload:
    dtype = DTYPES[case.dtype]
    factor = LOGIT_DEVIATION / math.sqrt(len(case.dims) - 1)
    given = _new_tokens(case, dtype, device, fill)
    queries = [
        factor * torch.randn((case.batch, case.heads, case.tokens, dim), device=device)
        for dim in case.dims[:-1]
    ]
    queries = [q.to(dtype) for q in queries]
    lengths = torch.full((case.batch,), case.short or case.kv, dtype=torch.int32, device=device)
    lengths[0] = case.kv
    options: dict[str, Any] = {"n_kv_heads": case.kv_heads}
    if case.num_splits:
        options["num_splits"] = case.num_splits
    if case.window:
        options["window_size"] = (case.window - 1, 0)
    work = Workload()
    by_kind: dict[str, list[KVView]] = {}

    def attend(views: Sequence[KVView]) -> Callable[[], Tensor]:
        return lambda: OPS[case.op](*queries, *views, lengths, **options)

    def measured(kind: str) -> tuple[float, float]:
        views, pairs = by_kind[kind], 2 if case.tokens > 32 else oracle.PAIRS
        out = attend(views)()
        found = oracle.error(
            out,
            queries,
            views,
            kv_heads=case.kv_heads,
            window=case.window,
            pairs=pairs,
            short=case.short,
        )
        return found, oracle.tolerance(kind, dtype)

    for kind in case.kinds:
        by_kind[kind] = list(streams_of(given, kind, case, fill))
        moved = case.moved_bytes(kind)
        turns = rotated(by_kind[kind], copies(moved, device) if timed else 1)
        calls = tuple(attend(views) for views in turns)
        work.ours.append(Implementation("caramba", calls, moved, kind, ours=True))
        work.errors[kind] = partial(measured, kind)
    if case.short:
        work.absent["others"] = "rows of one length alone"
    elif timed:
        count = copies(case.moved_bytes("fp16"), device)
        work.peers, work.absent = comparators.attention(case, queries, given, by_kind, count)
    return work


def _append(case: Case, device: torch.device, fill: bool, timed: bool) -> Workload:
    """Appends tokens to each row; the peer is a copy in fp16, as a cache without formats does."""
    given = _new_tokens(case, torch.float32, device, fill)
    new = [torch.randn_like(x[:, :, -case.tokens :]).to(DTYPES[case.dtype]) for x in given]
    # In the middle of a group: by channel one step in 32 encodes a group, the others write to the ring.
    at = case.kv - case.tokens - (BLOCK // 2 if case.tokens == 1 else 0)
    start = torch.full((case.batch,), at, dtype=torch.int32, device=device)
    work = Workload()

    def write(views: Sequence[KVView]) -> None:
        append_(views[0], views[1], new[0], new[1], start)

    def measured(views: Sequence[KVView]) -> tuple[float, float]:
        found, expected = ([clone(view) for view in views] for _ in range(2))
        write(found)
        with use_backend("reference"):
            write(expected)
        return _different(_parts(found), _parts(expected)), 0.0

    for kind in case.kinds:
        views = list(streams_of(given, kind, case, fill))
        call = partial(write, views)
        work.ours.append(
            Implementation("caramba", (call,), case.moved_bytes(kind), kind, ours=True)
        )
        work.errors[kind] = partial(measured, views)
    if not timed:
        return work
    plain = [x.half() for x in given]

    def copy() -> None:
        for target, source in zip(plain, new, strict=True):
            target[:, :, at : at + case.tokens] = source

    work.peers.append(Implementation("copy fp16", (copy,), case.moved_bytes("fp16"), "fp16"))
    work.peers.append(comparators.smallest_call(device))
    return work


def _quantize(case: Case, device: torch.device, _fill: bool, timed: bool) -> Workload:
    shape = (case.batch, case.kv_heads, case.kv, case.dim)
    turns = copies(case.moved_bytes("q4_0"), device) if timed else 1
    given = [torch.randn(shape, device=device).to(DTYPES[case.dtype]) for _ in range(turns)]
    work = Workload()
    for kind in case.kinds:
        calls = tuple(lambda x=x, kind=kind: quantize(x, kind, BLOCK) for x in given)
        _conversion(work, case, kind, calls)
    return work


def _dequantize(case: Case, device: torch.device, _fill: bool, timed: bool) -> Workload:
    shape = (case.batch, case.kv_heads, case.kv, case.dim)
    turns = copies(case.moved_bytes("q4_0"), device) if timed else 1
    x = torch.randn(shape, device=device)
    dtype, work = DTYPES[case.dtype], Workload()
    for kind in case.kinds:
        once = quantize(x, kind, BLOCK)
        pairs = [once, *([part.clone() for part in once] for _ in range(turns - 1))]
        calls = tuple(
            lambda pair=pair, kind=kind: dequantize(pair[0], pair[1], kind, case.dim, dtype)
            for pair in pairs
        )
        _conversion(work, case, kind, calls)
    return work


def _conversion(
    work: Workload, case: Case, kind: str, calls: tuple[Callable[[], Any], ...]
) -> None:
    """Adds the entry; its bits have to be the reference's."""

    def measured() -> tuple[float, float]:
        with use_backend("reference"):
            expected = calls[0]()
        return _different(_tensors(calls[0]()), _tensors(expected)), 0.0

    work.ours.append(Implementation("caramba", calls, case.moved_bytes(kind), kind, ours=True))
    work.errors[kind] = measured


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _parts(views: Sequence[KVView]) -> list[Tensor]:
    return [x for v in views for x in (v.codes, v.scales, v.tail) if x is not None]


def _different(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Share of elements whose bits differ."""
    wrong = sum(int((~same_bits(a, b)).sum()) for a, b in zip(found, expected, strict=True))
    return wrong / max(1, sum(x.numel() for x in expected))


def workload(
    case: Case, device: torch.device, *, fill: bool = True, timed: bool = True
) -> Workload:
    """Makes the inputs of a case.

    ``fill=False`` leaves them uninitialised and times nothing: enough to compile the kernels. ``timed=False`` makes one
    copy and no peers: enough to compare results.
    """
    makers = {"append_": _append, "quantize": _quantize, "dequantize": _dequantize}
    make = _attention if case.op in ATTENTION else makers[case.op]
    return make(case, device, fill, fill and timed)
