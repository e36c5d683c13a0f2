"""Compares storing and attending of the backends with the reference: small layers with every option, poisoned memory.

The reference runs on the CPU; the other backend appends to its own buffers on the device, then attends to the
reference's bytes. Uses the ops alone, so that it runs where the caches' dependencies are not installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.kernels.oracle import BY_KIND, relative_l2
from caramba_fast.bench.kernels.parity import described, same_bits
from caramba_fast.bench.kernels.registry import BLOCK, LAYOUTS, formats_of
from caramba_fast.formats import CHANNEL_KINDS, FORMATS, QUANTIZED_KINDS, SCALE_DTYPE
from caramba_fast.ops import (
    KVView,
    append_,
    decode_attention,
    decoupled_append_,
    decoupled_decode_attention,
    decoupled_extend_attention,
    extend_attention,
    use_backend,
)
from caramba_fast.ops.attention_call import BALANCED, MAX_QUERY_TOKENS
from caramba_fast.ops.registry import why_not
from caramba_fast.ops.view import Lanes

HEADS, KV_HEADS, DIM, SLOTS, PAGE, TAIL_SLACK = 4, 2, 64, 256, 32, 32
#: The last but one token of the first row completes a group, which by channel is then encoded from the ring.
LENGTHS, LEFTPAD = (161, 143), (0, 9)
#: Storage of a layer: one format in all streams, or keys by channel with the values that caches combine them with.
KINDS = (*(kind for kind in FORMATS if kind not in CHANNEL_KINDS), *LAYOUTS)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (20, 0), "num_sink_tokens": 2},
    "balanced": {"num_splits": BALANCED},
    "softcap": {"softcap": 5.0, "softmax_scale": 0.3},
    "s_aux": {"s_aux": torch.linspace(-1, 1, HEADS)},
    "null": {"null_k": torch.ones(KV_HEADS, DIM), "null_v": torch.ones(KV_HEADS, DIM)},
}
#: The public functions by name.
OPS: dict[str, Any] = {
    op.__name__: op
    for op in (
        decode_attention,
        extend_attention,
        decoupled_decode_attention,
        decoupled_extend_attention,
    )
}
#: Query tokens whose rows of a kv head fit into a program of one warp.
FEW = 3
#: Relative L2 error between backends, by dtype of the queries.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
#: For rotated values: a query is rounded again after the rotation, and a few codes are rounded the other way.
ROTATED_ERROR, ROTATED_CODES = 3.0, 0.01


@dataclass(frozen=True)
class Setting:
    """A layer of one of `KINDS` and a call; it has ``tail // 2`` sinks.

    ``decoupled`` layers use other ops, as do more than 32 tokens.
    """

    kind: str
    option: str = "plain"
    paged: bool = False
    tail: int = 0
    rotated: bool = False
    dtype: torch.dtype = torch.float16
    tokens: int = 5
    decoupled: bool = False

    @property
    def op(self) -> str:
        """The attention op."""
        verb = "extend" if self.tokens > MAX_QUERY_TOKENS else "decode"
        return f"{'decoupled_' * self.decoupled}{verb}_attention"

    @property
    def append_op(self) -> str:
        """The append op."""
        return "decoupled_append_" if self.decoupled else "append_"

    @property
    def dims(self) -> dict[str, int]:
        """Values of a head, by stream."""
        return {"k_sem": 8, "k_geo": 32, "v": DIM} if self.decoupled else {"k": DIM, "v": DIM}

    @property
    def formats(self) -> dict[str, str]:
        """The storage format of each stream."""
        return dict(zip(self.dims, formats_of(self.kind, len(self.dims)), strict=True))

    @property
    def ring(self) -> int:
        """Slots of each stream's ring: the tail, and by channel the tokens of a group that is not full."""
        if self.kind in LAYOUTS:
            return self.tail + max(TAIL_SLACK, self.tokens) + BLOCK
        return self.tail + TAIL_SLACK if self.tail else 0

    @property
    def fit(self) -> str:
        """How scales are fitted: as caches of the kind do."""
        return "mse" if self.kind == "q4" else "amax"

    def why_not(self, op: str, backend: str, device: torch.device) -> str | None:
        """Why a backend does not support this layer with the op, or None."""
        return why_not(op, backend, device.type)


def settings(quick: bool) -> list[Setting]:
    """All formats with every option, then dtypes, token counts and decoupled layers."""
    if quick:
        return [Setting("q4_0", "window", paged=True, tokens=2), Setting("q4_0", tokens=33)]
    crossed = product(KINDS, OPTIONS, (False, True), (0, 8), (False, True))
    more_rows = product((*QUANTIZED_KINDS, *LAYOUTS), OPTIONS, (False, True), (8,))
    alone = product(KINDS, (1, 5, 20, 33, 100), TOLERANCE)
    prompts = product(KINDS, OPTIONS, (False, True), (0, 8))
    decoupled = product((*QUANTIZED_KINDS, *LAYOUTS), (1, 5, 33))
    return [
        *(Setting(kind, tokens=tokens, dtype=dtype) for kind, tokens, dtype in alone),
        *(Setting(kind, tokens=tokens, decoupled=True) for kind, tokens in decoupled),
        *(Setting(*row, rotated=True, tokens=33) for row in prompts),
        *(Setting(*row, tokens=FEW) for row in crossed),
        *(Setting(*row) for row in more_rows),
    ]


def _poisoned(setting: Setting) -> dict[str, KVView]:
    """Buffers filled so that reading an unwritten slot shows: NaN, and codes that are not zero."""
    lanes, batch = Lanes.of(KV_HEADS, *setting.dims.values()), len(LENGTHS)
    blocks = (batch * SLOTS // PAGE + 2, PAGE) if setting.paged else (batch, SLOTS)
    found = {}
    for name, dim in setting.dims.items():
        form, width = FORMATS[setting.formats[name]], lanes.heads_per_lane * dim

        def side(slots: int, width: int = width) -> Tensor | None:
            shape = (batch, lanes.count, slots, width)
            return torch.full(shape, torch.nan, dtype=torch.float16) if slots else None

        lead = (blocks[0], lanes.count)
        rows = blocks[1] // BLOCK if form.by_channel else blocks[1]
        scales = torch.full((*lead, rows, form.scales_width(width, BLOCK)), torch.nan)
        # With equal weights, two channels in a byte never differ enough for one to lend the other bits.
        weighed = form.by_channel and setting.fit == "mse" and not setting.rotated
        found[name] = KVView(
            torch.full(
                (*lead, blocks[1], form.code_width(width)), 77 if form.quantized else torch.nan
            ).to(form.dtype),
            scales.to(SCALE_DTYPE) if form.quantized else None, form.name,
            side(setting.ring), side(setting.tail // 2), setting.rotated, setting.fit,
            torch.randn(lanes.count, width).exp() if weighed else None,
        )  # fmt: skip
    return found


def _moved(x: Any, device: torch.device) -> Any:
    """A copy of tensors and views on a device; anything else unchanged."""
    if isinstance(x, Tensor):
        return x.to(device, copy=True)
    if isinstance(x, KVView):
        return replace(x, **{f.name: _moved(getattr(x, f.name), device) for f in fields(x)})
    if isinstance(x, dict):
        return {name: _moved(part, device) for name, part in x.items()}
    return [_moved(part, device) for part in x] if isinstance(x, list) else x


def _append(views: Mapping[str, KVView], new: list[Tensor], place: dict[str, Tensor]) -> None:
    """Writes all but the last two tokens of every row, then those two."""
    op: Any = decoupled_append_ if len(views) == 3 else append_
    lengths, most = place["lengths"], max(LENGTHS)
    where = {name: x for name, x in place.items() if name != "lengths"}
    first = lengths - 2
    op(
        *views.values(),
        *(x[:, :, : most - 2] for x in new),
        torch.zeros_like(first),
        query_lens=first,
        **where,
    )
    op(*views.values(), *(x[:, :, most - 2 :] for x in new), first, **where)


def _attend(
    setting: Setting, views: Mapping[str, KVView], queries: list[Tensor], place: dict[str, Tensor],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    where = {name: x for name, x in place.items() if name != "lengths"}
    return OPS[setting.op](
        *queries, *views.values(), place["lengths"], n_kv_heads=KV_HEADS, return_softmax_lse=True,
        residual_len=setting.tail, **where, **options,
    )  # fmt: skip


def _place() -> Iterator[tuple[str, Tensor]]:
    """Positions of tokens: lengths, padding, and the pages of each row in a shuffled pool."""
    yield "lengths", torch.tensor(LENGTHS, dtype=torch.int32)
    yield "cache_leftpad", torch.tensor(LEFTPAD, dtype=torch.int32)
    pages = len(LENGTHS) * SLOTS // PAGE
    yield "block_table", torch.randperm(pages + 2)[:pages].view(len(LENGTHS), -1).to(torch.int32)


def _parts(view: KVView) -> list[Tensor]:
    return [x for x in (view.codes, view.scales, view.tail, view.sink) if x is not None]


def _differing(mine: Tensor, its: Tensor, rounded: bool) -> Tensor:
    """Where bits differ; floats that were ``rounded`` before may differ by a few ulp of the largest."""
    if not (rounded and its.is_floating_point()):
        return ~same_bits(mine, its)
    ulp = 8 * torch.finfo(its.dtype).eps
    largest = float(its.nan_to_num(0.0).abs().max())
    return ~torch.isclose(mine, its, rtol=ulp, atol=ulp * largest, equal_nan=True)


def _given(setting: Setting) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Positions, the tokens of each stream, and the queries of each key stream."""
    place = {name: x for name, x in _place() if setting.paged or name != "block_table"}
    new = [torch.randn(len(LENGTHS), KV_HEADS, max(LENGTHS), d) for d in setting.dims.values()]
    keys = [dim for name, dim in setting.dims.items() if name != "v"]
    queries = [2 * torch.randn(len(LENGTHS), HEADS, setting.tokens, dim) for dim in keys]
    return place, new, [q.to(setting.dtype) for q in queries]


def failures(backend: str, device: torch.device, setting: Setting) -> Iterator[str]:
    """One line for each difference in what was stored or computed."""
    where = f"{backend} {setting}"
    place, new, queries = _given(setting)
    options = {} if setting.decoupled else OPTIONS[setting.option]
    truth = _poisoned(setting)
    there = _moved(truth, device)
    with use_backend("reference"):
        _append(truth, new, place)
        out, lse = _attend(setting, truth, [q.float() for q in queries], place, options)
    moved = _moved(place, device)
    if setting.why_not(setting.append_op, backend, device) is None:
        with use_backend(backend):
            _append(there, _moved(new, device), moved)
        allowed = ROTATED_CODES if setting.rotated else 0.0
        for name in truth:
            for mine, its in zip(_parts(there[name]), _parts(truth[name]), strict=True):
                wrong = _differing(mine.cpu(), its, rounded=setting.rotated)
                if wrong.double().mean() > allowed:
                    yield f"{where}: {int(wrong.sum())} of {wrong.numel()} elements of {name} differ"
    with use_backend(backend):
        found = _attend(
            setting, _moved(truth, device), _moved(queries, device), moved, _moved(options, device)
        )
    error = relative_l2(found[0].cpu(), out.double())
    # The C++ kernels quantize queries, within the accuracy promised for a format.
    kept = BY_KIND[setting.kind] if backend == "cpp" else 0.0
    most = max(kept, TOLERANCE[setting.dtype]) * (ROTATED_ERROR if setting.rotated else 1)
    if not error <= most:
        yield f"{where}: relL2 {error:.2g} > {most:.2g}"
    if not torch.allclose(found[1].cpu(), lse, rtol=2e-3, atol=1e-2):
        yield f"{where}: lse differs by {float((found[1].cpu() - lse).abs().max()):.2g}"


def attention_failures(backend: str, device: torch.device, chosen: list[Setting]) -> Iterator[str]:
    """Failures of all settings; a setting that raises is one too, and the others still run."""
    for setting in chosen:
        if setting.why_not(setting.op, backend, device) is not None:
            continue
        try:
            yield from failures(backend, device, setting)
        except Exception as error:  # any failure is this setting's result
            yield f"{backend} {setting}: {described(error)}"
