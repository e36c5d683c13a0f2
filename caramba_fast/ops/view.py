"""KVView: one stored tensor as the attention ops read it.

Codes are (B, lanes, S, width): a lane is ``g`` neighbouring kv heads side by side, so that
``lane_dim = g * head_dim`` is a multiple of 32 whatever the head_dim. A (batch, lane) streams
contiguous memory; B and lanes may have any stride.

RepeatedCall: a call of an op that was checked and flattened once, for the calls that differ in numbers alone.

A decode step makes the same call in every layer as the step before. Checks and the making of some thirty arguments take
as long as a short op, so they are kept beside the stored tensors they are about (`KVView.calls`), and end with them.

Calls that were checked and found right: a decode step repeats them, and a check takes as long as a short op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor

from caramba_fast.formats import Format, resolve
from caramba_fast.ops import checks
from caramba_fast.ops.dequantize import op as dequantize_op
from caramba_fast.ops.transform import Transform

#: Calls of up to so many query tokens are told apart by their number.
MOST_TOKENS = 33


class RepeatedCall:
    """The flat arguments of one call, and what another has to have in common with it to be served by them.

    Args:
        op: what is called.
        tensors: the ones that change from call to call; shape, dtype and device may not. The last is (B,) lengths.
        views: the streams; the very same, and the call is kept by the first one.
        options: as given; tensors among them alike in shape, dtype and device, everything else equal.
        stated: the options of the op that describe the streams.
        leading: how many of ``tensors`` go before what is stored.
    """

    __slots__ = (
        "_kinds",
        "_layout",
        "_leading",
        "_op",
        "_options",
        "_others",
        "_stated",
        "_stored",
    )

    def __init__(
        self,
        op: Any,
        tensors: Sequence[Tensor],
        views: Sequence[KVView],
        options: Mapping[str, Any],
        stated: Mapping[str, Any],
        leading: int = 0,
    ) -> None:
        self._op, self._leading, self._others = op, leading, tuple(views[1:])
        self._layout = [_layout(x) for x in tensors]
        self._options = {
            name: _layout(value) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        self._stated = dict(stated)
        self._stored = [part for view in views for part in (view.codes, view.scales)]
        self._kinds = [view.kind for view in views]

    def serves(
        self, tensors: Sequence[Tensor], views: Sequence[KVView], options: Mapping[str, Any]
    ) -> bool:
        """Whether a call with the same first view differs in nothing that was looked at.

        Loops, not generators: it runs twice or three times a layer and step.
        """
        known = self._options
        if len(options) != len(known) or len(tensors) != len(self._layout):
            return False
        for name, value in options.items():
            if name not in known or not _same(value, known[name]):
                return False
        for x, layout in zip(tensors, self._layout, strict=True):
            if type(x) is not layout[0] or (x.shape, x.dtype, x.device) != layout[1:]:
                return False
        return all(map(is_, views[1:], self._others))

    def __call__(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        """Runs it with other numbers."""
        leading = self._leading
        return self._op(
            *tensors[:leading], *self._stored, *tensors[leading:], *self._kinds, **self._stated, **options
        )  # fmt: skip


def _layout(x: Tensor) -> tuple[Any, ...]:
    return (type(x), x.shape, x.dtype, x.device)


def _same(value: Any, known: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(_layout(value) == known)
    return value is known or (type(value) is type(known) and bool(value == known))


def call_name(op: str, first: Any) -> tuple[str, int]:
    """What a call is kept under, by its first tensor (B, H, T, D): decode steps beside longer stretches."""
    return op, min(first.shape[2], MOST_TOKENS) if getattr(first, "ndim", 0) == 4 else 0


def may_repeat() -> bool:
    """Not while tracing: what is kept from it would be of the trace."""
    return not torch.compiler.is_compiling()


LANE_MULTIPLE = 32
IDENTITY = Transform()


@dataclass(frozen=True)
class Lanes:
    """How the kv heads of one layer are put side by side.

    Attributes:
        n_kv_heads: heads stored.
        heads_per_lane: ``g``; the last lane is padded when it does not divide n_kv_heads.
    """

    n_kv_heads: int
    heads_per_lane: int

    @classmethod
    def of(cls, n_kv_heads: int, *head_dims: int) -> Lanes:
        """The smallest ``g`` that makes every stream's lane width a multiple of 32."""
        sizes = [LANE_MULTIPLE // math.gcd(LANE_MULTIPLE, dim) for dim in head_dims]
        return cls(n_kv_heads, math.lcm(*sizes))

    @property
    def count(self) -> int:
        """Lanes of the layer."""
        return -(-self.n_kv_heads // self.heads_per_lane)

    def pack(self, x: Tensor) -> Tensor:
        """x (B, H_kv, T, D) -> (B, lanes, T, g * D), zeros in the padding."""
        padding = self.count * self.heads_per_lane - self.n_kv_heads
        if padding:
            x = torch.cat((x, x.new_zeros(x.shape[0], padding, *x.shape[2:])), dim=1)
        return x.unflatten(1, (self.count, self.heads_per_lane)).transpose(2, 3).flatten(3)

    def unpack(self, x: Tensor) -> Tensor:
        """(B, lanes, T, g * D) -> (B, H_kv, T, D)."""
        dim = x.shape[-1] // self.heads_per_lane
        heads = x.unflatten(-1, (self.heads_per_lane, dim)).transpose(2, 3).flatten(1, 2)
        return heads[:, : self.n_kv_heads]


def stored_lanes(codes: Tensor, kind: str, n_kv_heads: int, head_dim: int) -> Lanes:
    """The lanes of a stored tensor, from its shape."""
    return Lanes(n_kv_heads, resolve(kind).value_width(codes.shape[-1]) // head_dim)


def load(codes: Tensor, scales: Tensor | None, kind: str, dtype: torch.dtype) -> Tensor:
    """Codes (..., width) -> values (..., lane_dim) in ``dtype``, on the backend in force."""
    form = resolve(kind)
    if scales is None:
        return codes.to(dtype)
    return dequantize_op(codes, scales, kind, form.value_width(codes.shape[-1]), dtype)


def stream_options(name: str) -> tuple[str, ...]:
    """The keyword options of the ops that describe stream ``name``."""
    parts = ("tail", "sink", "mean", "bias", "pairs", "phases", "scale")
    return (*(f"{name}_{part}" for part in parts), f"rotate_{name}")


def paged_slots(codes: Tensor, block_table: Tensor | None) -> int:
    """Tokens a transform's phases must cover: all slots, or up to the first of the last page.

    The last page may reach past the longest row a paged cache allows.
    """
    size = codes.shape[2]
    return size if block_table is None else (block_table.shape[1] - 1) * size + 1


def _rows_and_slots(buffer: Tensor | None) -> tuple[int, int] | None:
    return None if buffer is None else (buffer.shape[0], buffer.shape[2])


def common_problems(
    views: Mapping[str, KVView], block_table: Tensor | None, batch: int
) -> list[str]:
    """What is wrong with the streams of one layer taken together.

    Tail and sinks are in all streams alike or in none, values have no bias, pages have whole tiles.
    """
    problems: list[str] = []
    first = next(iter(views.values()))
    for part, wanted in (
        ("tail", _rows_and_slots(first.tail)),
        ("sink", _rows_and_slots(first.sink)),
    ):
        sizes = {name: _rows_and_slots(getattr(view, part)) for name, view in views.items()}
        if any(size != wanted for size in sizes.values()):
            problems.append(f"{part} buffers differ between streams: {sizes}")
        elif wanted is not None and wanted[0] != batch:
            problems.append(f"{part} buffers have B={wanted[0]}; B={batch} is needed")
    values = views["v"].transform
    if values.mean is not None or values.bias is not None:
        problems.append("v can be scaled and rotated; mean and bias are for keys")
    if block_table is not None and first.codes.shape[2] % LANE_MULTIPLE:
        problems.append(f"pages have {first.codes.shape[2]} slots; a multiple of 32 is needed")
    return problems


@dataclass(frozen=True)
class KVView:
    """One stored stream (K or V, or one of the two keys of decoupled attention).

    Attributes:
        codes: (B, lanes, S, width), or (pages, lanes, page_size, width) when paged; dtype and
            width as the format table has them.
        scales: codes' shape with lane_dim / block at the end, float16; None for unquantized kinds.
        kind: kind name.
        tail: (B, lanes, R, lane_dim) float16, a ring of the newest tokens in the stored basis:
            token j is in slot j % R. None for no tail.
        sink: (B, lanes, sink_len, lane_dim) float16, the first real tokens of each row.
        transform: the basis in which all of these are stored.
        fit: how append finds scales (`caramba_fast.ops.quantize`); reading does not depend on it.
    """

    codes: Tensor
    scales: Tensor | None
    kind: str
    tail: Tensor | None = None
    sink: Tensor | None = None
    transform: Transform = IDENTITY
    fit: str = "amax"

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is remembered beside them is made again, and holds ops, which cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def format(self) -> Format:
        """The row of the format table."""
        return resolve(self.kind)

    @property
    def lane_dim(self) -> int:
        """Values of one lane of one token."""
        return self.format.value_width(self.codes.shape[-1])

    def check(self, name: str) -> None:
        """Raises TypeError or ValueError naming what does not belong together."""
        if self.codes.ndim != 4:
            raise ValueError(
                f"{name} codes have shape {tuple(self.codes.shape)}; (B, lanes, S, width) is needed"
            )
        checks.codes_and_scales(name, self.codes, self.scales, self.kind)
        for part, tensor in (("tail", self.tail), ("sink", self.sink)):
            if tensor is not None and (
                tensor.ndim != 4
                or tensor.shape[1] != self.codes.shape[1]
                or tensor.shape[3] != self.lane_dim
                or tensor.dtype != torch.float16
            ):
                raise ValueError(
                    f"{name}_{part} is {tuple(tensor.shape)} {tensor.dtype}; (B, {self.codes.shape[1]}, "
                    f"n, {self.lane_dim}) float16 is needed"
                )

    @cached_property
    def description(self) -> tuple[Any, ...]:
        """Shapes, dtypes and devices of everything, and the kind: what `check` and the ops look at."""
        parts = (self.codes, self.scales, self.tail, self.sink)
        told = tuple(x if x is None else (x.shape, x.dtype, x.device) for x in parts)
        return (self.kind, *told, self.transform.description)

    def slice(self, length: int) -> KVView:
        """The view of the first ``length`` slots of a contiguous cache; no copy."""
        if torch.compiler.is_compiling():
            return self._sliced(length)
        if length not in self._slices:
            self._slices.clear()  # a growing cache asks for one length many times, then for the next
            self._slices[length] = self._sliced(length)
        return self._slices[length]

    def _sliced(self, length: int) -> KVView:
        scales = None if self.scales is None else self.scales[:, :, :length]
        return replace(self, codes=self.codes[:, :, :length], scales=scales)

    def options(self, name: str) -> dict[str, Any]:
        """The keyword options of the ops for stream ``name``, those in use; not to be changed."""
        if torch.compiler.is_compiling():
            return self._stated(name)
        if name not in self._options:
            self._options[name] = self._stated(name)
        return self._options[name]

    def _stated(self, name: str) -> dict[str, Any]:
        t = self.transform
        found = {
            f"{name}_tail": self.tail,
            f"{name}_sink": self.sink,
            f"{name}_mean": t.mean,
            f"{name}_bias": t.bias,
            f"{name}_pairs": t.pairs,
            f"{name}_phases": t.phases,
            f"{name}_scale": t.scale,
            f"rotate_{name}": t.rotate or None,
        }
        return {key: value for key, value in found.items() if value is not None}

    @cached_property
    def calls(self) -> dict[tuple[str, int], RepeatedCall]:
        """By op and query tokens: the latest call with this as its first stream."""
        return {}

    @cached_property
    def _slices(self) -> dict[int, KVView]:
        return {}

    @cached_property
    def _options(self) -> dict[str, dict[str, Any]]:
        return {}

    @classmethod
    def of(
        cls, name: str, codes: Tensor, scales: Tensor | None, kind: str, options: dict[str, Any]
    ) -> KVView:
        """The inverse of `options`: takes what belongs to stream ``name`` out of ``options``."""
        tail, sink = options.pop(f"{name}_tail", None), options.pop(f"{name}_sink", None)
        transform = Transform(
            **{
                part: options.pop(f"{name}_{part}", None)
                for part in ("mean", "bias", "pairs", "phases", "scale")
            },
            rotate=options.pop(f"rotate_{name}", False),
        )
        return cls(codes, scales, kind, tail, sink, transform)


MOST = 4096
_known: set[Any] = set()


def call_description(
    op: str,
    tensors: Iterable[Tensor],
    views: Iterable[KVView],
    options: Mapping[str, Any],
    *more: Any,
) -> Any:
    """Everything the checks of an op look at, hashable; None where that cannot be told, or while tracing.

    Args:
        op: its name.
        tensors: positional ones, outside of views.
        views, options: as given; of tensors shape, dtype and device are taken.
        more: anything else the checks look at.
    """
    if torch.compiler.is_compiling():
        return None
    parts: list[Any] = [op, more]
    for x in tensors:
        if type(x) is not Tensor:
            return None
        parts.append((x.shape, x.dtype, x.device))
    parts += [view.description for view in views]
    for name, value in options.items():
        if isinstance(value, Tensor):
            parts.append((name, value.shape, value.dtype, value.device))
        elif isinstance(value, (list, tuple)):
            parts.append((name, tuple(value)))
        else:
            parts.append((name, type(value), value))
    found = tuple(parts)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def check_once(described: Any, run: Callable[[], None]) -> None:
    """Runs a check, unless what it would look at has passed it before."""
    if described is not None and described in _known:
        return
    run()
    if described is not None:
        if len(_known) >= MOST:
            _known.clear()
        _known.add(described)
