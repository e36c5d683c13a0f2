"""KVView: the buffers of one stored stream, as the ops take them.

Codes are (B, lanes, S, width). A lane is ``g`` neighbouring kv heads, concatenated, so that ``lane_dim = g * head_dim``
is a multiple of 32 for any head_dim. The memory of one (batch, lane) is contiguous; B and lanes may have any stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from caramba_fast.formats import Format, resolve
from caramba_fast.ops import checks
from caramba_fast.ops.dequantize import op as dequantize_op

LANE_MULTIPLE = 32


@dataclass(frozen=True)
class Lanes:
    """How the kv heads of one layer are concatenated into lanes.

    ``heads_per_lane`` is ``g``; the last lane is padded if ``g`` does not divide ``n_kv_heads``.
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
    """Codes (..., width) -> values (..., lane_dim) in ``dtype``; for per-channel kinds whole groups."""
    form = resolve(kind)
    if scales is None:
        return codes.to(dtype)
    return dequantize_op(codes, scales, kind, form.value_width(codes.shape[-1]), dtype)


def stream_options(name: str) -> tuple[str, ...]:
    """The keyword options of the ops that describe stream ``name``."""
    return f"{name}_tail", f"{name}_sink", f"rotate_{name}"


def _rows_and_slots(buffer: Tensor | None) -> tuple[int, int] | None:
    return None if buffer is None else (buffer.shape[0], buffer.shape[2])


def common_problems(
    views: Mapping[str, KVView], block_table: Tensor | None, batch: int
) -> list[str]:
    """Problems of the streams taken together: all need the same tail and sinks, or none, and pages of whole tiles."""
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
    group = group_of(views.values())
    if group > 1 and (first.tail is None or first.tail.shape[2] < group):
        size = "none" if first.tail is None else f"one of {first.tail.shape[2]}"
        problems.append(
            f"kinds by channel in groups of {group} need a tail of {group} or more tokens in every stream, there is "
            f"{size}"
        )
    if block_table is not None and first.codes.shape[2] % LANE_MULTIPLE:
        problems.append(f"pages have {first.codes.shape[2]} slots; a multiple of 32 is needed")
    return problems


def group_of(views: Iterable[KVView]) -> int:
    """Tokens of a layer read from the tail together: the largest of the groups, which are powers of two."""
    return max(view.group for view in views)


@dataclass(frozen=True)
class KVView:
    """One stored stream (K or V, or one of the two keys of decoupled attention).

    Attributes:
        codes: (B, lanes, S, width), or (pages, lanes, page_size, width) if paged, page_size a multiple of 32; dtype
            and width as in the format table.
        scales: float16, the shape of codes with lane_dim / block as last dimension; for per-channel kinds
            (B, lanes, S / G, 2 * lane_dim), the scales of a group of G tokens followed by the zeros. None for
            unquantized kinds.
        kind: kind name.
        tail: (B, lanes, R, lane_dim) float16, a ring of the newest tokens in the stored basis: token j is in slot
            j % R. None for no tail. For per-channel kinds it is the only storage of an incomplete group. T queries need
            R >= residual_len + T - 1, plus G - 1 with groups of G, which also need R >= G.
        sink: (B, lanes, sink_len, lane_dim) float16, the first real tokens of each row.
        rotate: whether all of these are stored in the basis of a Walsh-Hadamard transform over head_dim.
        fit: how append chooses scales (`caramba_fast.ops.quantize`); reading does not depend on it.
        query_rms: (lanes, lane_dim) float32, the root mean square of the queries per key channel, in the stored basis:
            how append with fit "mse" divides the bytes of q4_channel. None for equal weights; other kinds ignore it.
    """

    codes: Tensor
    scales: Tensor | None
    kind: str
    tail: Tensor | None = None
    sink: Tensor | None = None
    rotate: bool = False
    fit: str = "amax"
    query_rms: Tensor | None = None

    @property
    def format(self) -> Format:
        """The row of the format table."""
        return resolve(self.kind)

    @property
    def lane_dim(self) -> int:
        """Values of one lane of one token."""
        return self.format.value_width(self.codes.shape[-1])

    @property
    def group(self) -> int:
        """Tokens that share scales: the group size of per-channel kinds, else 1."""
        if self.scales is None or not self.format.by_channel:
            return 1
        return self.codes.shape[2] // max(1, self.scales.shape[2])

    def check(self, name: str) -> None:
        """Raises TypeError or ValueError naming what does not match."""
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

        rms, shape = self.query_rms, (self.codes.shape[1], self.lane_dim)
        if rms is not None and (rms.shape != shape or rms.dtype != torch.float32):
            raise ValueError(
                f"{name}_query_rms is {tuple(rms.shape)} {rms.dtype}; {shape} float32 is needed"
            )

    def slice(self, length: int) -> KVView:
        """A view of the first ``length`` slots of a contiguous cache (per-channel kinds: whole groups); no copy."""
        scales = None if self.scales is None else self.scales[:, :, : length // self.group]
        return replace(self, codes=self.codes[:, :, :length], scales=scales)

    def options(self, name: str) -> dict[str, Any]:
        """The keyword options of the ops for stream ``name``, without unused ones."""
        found = {
            f"{name}_tail": self.tail,
            f"{name}_sink": self.sink,
            f"rotate_{name}": self.rotate or None,
        }
        return {key: value for key, value in found.items() if value is not None}

    @classmethod
    def of(
        cls, name: str, codes: Tensor, scales: Tensor | None, kind: str, options: dict[str, Any]
    ) -> KVView:
        """The inverse of `options`: pops the options of stream ``name`` from ``options``."""
        tail, sink = options.pop(f"{name}_tail", None), options.pop(f"{name}_sink", None)
        return cls(codes, scales, kind, tail, sink, options.pop(f"rotate_{name}", False))
