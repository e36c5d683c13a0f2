"""KVView: one stored tensor as the attention ops read it.

Codes are (B, lanes, S, width): a lane is ``g`` neighbouring kv heads side by side, so that
``lane_dim = g * head_dim`` is a multiple of 32 whatever the head_dim. A (batch, lane) streams
contiguous memory; B and lanes may have any stride.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba_fast.formats import Format, check_block, resolve
from caramba_fast.ops import checks
from caramba_fast.ops.dequantize import reference as dequantize_reference

LANE_MULTIPLE = 32


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
    """Codes (B, lanes, S, width) -> values (B, lanes, S, lane_dim) in ``dtype``; reference only."""
    form = resolve(kind)
    if scales is None:
        return codes.to(dtype)
    return dequantize_reference(codes, scales, kind, form.value_width(codes.shape[-1]), dtype)


@dataclass(frozen=True)
class KVView:
    """Codes and scales of K or of V.

    Attributes:
        codes: (B, lanes, S, width), dtype and width as the format table has them.
        scales: (B, lanes, S, lane_dim / block) float16; None for fp32, fp16 and bf16.
        kind: kind name.
    """

    codes: Tensor
    scales: Tensor | None
    kind: str

    @property
    def format(self) -> Format:
        return resolve(self.kind)

    @property
    def lane_dim(self) -> int:
        return self.format.value_width(self.codes.shape[-1])

    def check(self, name: str) -> None:
        """Raises TypeError or ValueError naming what does not belong together."""
        if self.codes.ndim != 4:
            raise ValueError(
                f"{name} codes have shape {tuple(self.codes.shape)}; (B, lanes, S, width) is needed"
            )
        form = checks.codes_and_scales(name, self.codes, self.scales, self.kind)
        if self.scales is not None:
            check_block(self.lane_dim, self.lane_dim // self.scales.shape[-1], f"{form.name} block")

    def slice(self, length: int) -> KVView:
        """The view of the first ``length`` slots; no copy."""
        scales = None if self.scales is None else self.scales[:, :, :length]
        return KVView(self.codes[:, :, :length], scales, self.kind)
