"""Exact changes of basis that make K and V easier to quantize, and how attention undoes them.

A key is stored as ``rotate((k - mean - R_t bias) / scale)`` and a value as ``rotate(v / scale)``:

    mean      a constant vector of each kv head, for dims without RoPE
    bias      a vector on a few RoPE pairs of each kv head, which turns with the position t; it is
              what ``k_proj.bias`` becomes (Qwen2): constant before RoPE, oscillating after
    scale     one factor a channel (for K the same on both dims of a RoPE pair)
    rotate    an orthonormal Walsh-Hadamard transform over head_dim

The query takes ``rotate(q * scale)``, and what was subtracted comes back as ``q · (mean + R_t bias)`` in
the logit: one constant and, for each pair, ``A cos(theta t) + B sin(theta t)``. All of it is exact in real
arithmetic. The rotation is QuaRot's (arXiv:2404.00456); the derivations are in docs/transforms.md.

``t`` is the slot index minus ``cache_leftpad``. Phases come from one table that append and decode of every
backend read, built in float64 on the CPU: 128 in-tile angles, then one angle for each tile start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

#: Tokens of one tile of the phase table.
PHASE_TILE = 128


@dataclass(frozen=True)
class Transform:
    """Constants of one stream, per kv head, shared by the batch. None or False leaves a step out.

    Attributes:
        mean: (H_kv, D) float32, subtracted from every key.
        bias: (H_kv, P, 2) float32, the un-rotated bias on each pair's two dims.
        pairs: (H_kv, P, 2) int32, the two dims of each pair, so that half-split, interleaved and
            partial RoPE need no further flag. An unused pair has bias 0.
        phases: (H_kv, P, 128 + tiles, 2) float32, cos and sin, from `phase_table`.
        scale: (H_kv, D) float32, positive; divided out of what is stored.
        rotate: whether the Walsh-Hadamard transform is applied.
    """

    mean: Tensor | None = None
    bias: Tensor | None = None
    pairs: Tensor | None = None
    phases: Tensor | None = None
    scale: Tensor | None = None
    rotate: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether nothing is changed."""
        tensors = (self.mean, self.bias, self.scale)
        return not self.rotate and all(tensor is None for tensor in tensors)

    def problems(self, name: str, heads: int, dim: int, slots: int) -> list[str]:
        """What is wrong with the constants for ``heads`` kv heads of ``dim`` and ``slots`` tokens."""
        wrong: list[str] = []
        for field, tensor in (("mean", self.mean), ("scale", self.scale)):
            if tensor is not None and (
                tensor.shape != (heads, dim) or tensor.dtype != torch.float32
            ):
                wrong.append(_describe(f"{name}_{field}", tensor, f"({heads}, {dim}) float32"))
        parts = {"bias": self.bias, "pairs": self.pairs, "phases": self.phases}
        missing = [field for field, tensor in parts.items() if tensor is None]
        if self.bias is None or self.pairs is None or self.phases is None:
            if len(missing) < 3:
                wrong.append(
                    f"{name}: bias, pairs and phases go together; missing {', '.join(missing)}"
                )
            return wrong
        count = self.bias.shape[1] if self.bias.ndim == 3 else 0
        if self.bias.shape != (heads, count, 2) or self.bias.dtype != torch.float32:
            wrong.append(_describe(f"{name}_bias", self.bias, f"({heads}, P, 2) float32"))
        if self.pairs.shape != (heads, count, 2) or self.pairs.dtype != torch.int32:
            wrong.append(_describe(f"{name}_pairs", self.pairs, f"({heads}, {count}, 2) int32"))
        tiles = -(-slots // PHASE_TILE)
        rows = self.phases.shape[2] if self.phases.ndim == 4 else 0
        if (
            self.phases.shape != (heads, count, rows, 2)
            or rows < PHASE_TILE + tiles
            or self.phases.dtype != torch.float32
        ):
            needed = f"({heads}, {count}, {PHASE_TILE + tiles} or more, 2) float32"
            wrong.append(_describe(f"{name}_phases", self.phases, needed))
        return wrong

    def to(self, device: torch.device | str) -> Transform:
        """The same constants on another device."""
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()}
        return Transform(**moved)


def _describe(name: str, tensor: Tensor, needed: str) -> str:
    return f"{name} is {tuple(tensor.shape)} {tensor.dtype}; {needed} is needed"


def phase_table(theta: Tensor, slots: int) -> Tensor:
    """cos and sin of ``theta * t`` for t below ``slots``, in two levels.

    Args:
        theta: (H_kv, P), radians per token; computed on the CPU in float64 whatever its dtype.
        slots: tokens to cover.

    Returns:
        (H_kv, P, 128 + tiles, 2) float32 on theta's device: rows 0…127 are the angles of t = 0…127,
        row 128 + i the angle of t = 128 i.
    """
    exact = theta.detach().to("cpu", torch.float64)[..., None]
    inside = torch.arange(PHASE_TILE, dtype=torch.float64)
    starts = torch.arange(-(-slots // PHASE_TILE), dtype=torch.float64) * PHASE_TILE
    angle = torch.remainder(exact * torch.cat((inside, starts)), 2 * math.pi)
    table = torch.stack((angle.cos(), angle.sin()), dim=-1)
    return table.to(torch.float32).to(theta.device)


def phases_at(phases: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin at tokens t (B, N): each (B, H_kv, P, N), by the angle-addition rule."""
    t = t.clamp(0, (phases.shape[2] - PHASE_TILE) * PHASE_TILE - 1)  # padding may lie outside
    inside = phases[:, :, t % PHASE_TILE]  # (H_kv, P, B, N, 2)
    start = phases[:, :, PHASE_TILE + t // PHASE_TILE]
    cos = start[..., 0] * inside[..., 0] - start[..., 1] * inside[..., 1]
    sin = start[..., 1] * inside[..., 0] + start[..., 0] * inside[..., 1]
    return cos.permute(2, 0, 1, 3), sin.permute(2, 0, 1, 3)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension; its own inverse.

    A width that is no power of two is cut into its powers of two, largest first (80 = 64 + 16). As one
    product with the matrix: on a CPU a fast transform in torch ops costs more in calls than it saves.
    """
    key = (x.shape[-1], x.dtype, x.device)
    if type(x) is not Tensor:  # tracing: what is made now is not for later use
        return torch.matmul(x, hadamard_matrix(*key))
    if key not in _matrices:
        _matrices[key] = hadamard_matrix(*key)
    return torch.matmul(x, _matrices[key])


_matrices: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def hadamard_matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(width, width), symmetric and orthonormal, block-diagonal where width is no power of two."""
    blocks, left = [], width
    while left:
        size = 1 << (left.bit_length() - 1)
        index = torch.arange(size)
        common = index[:, None] & index  # entry (i, j) is -1 to the number of ones in i & j
        ones = sum((common >> bit) & 1 for bit in range(size.bit_length()))
        blocks.append((1 - 2 * (torch.as_tensor(ones) % 2)).double() / math.sqrt(size))
        left -= size
    return torch.block_diag(*blocks).to(device, dtype)


def _pair_dims(transform: Transform) -> tuple[Tensor, Tensor]:
    assert transform.pairs is not None
    dims = transform.pairs.to(torch.int64)
    return dims[..., 0], dims[..., 1]


def apply_to_key(x: Tensor, t: Tensor, transform: Transform) -> Tensor:
    """x (B, H_kv, T, D) float32 at tokens t (B, T) -> what is quantized."""
    if transform.mean is not None:
        x = x - transform.mean[:, None]
    if transform.bias is not None:
        assert transform.phases is not None
        cos, sin = phases_at(transform.phases, t)
        first, second = transform.bias[..., 0, None], transform.bias[..., 1, None]
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
        dims = torch.stack(_pair_dims(transform), dim=-1)  # (H_kv, P, 2)
        index = dims[None, :, None].flatten(-2).expand(x.shape[0], -1, x.shape[2], -1)
        x = x.scatter_add(-1, index, -turned.transpose(2, 3).flatten(-2))
    if transform.scale is not None:
        x = x / transform.scale[:, None]
    return hadamard(x) if transform.rotate else x


def apply_to_value(x: Tensor, transform: Transform) -> Tensor:
    """x (B, H_kv, T, D) float32 -> what is quantized."""
    if transform.scale is not None:
        x = x / transform.scale[:, None]
    return hadamard(x) if transform.rotate else x


def undo_on_value(x: Tensor, transform: Transform) -> Tensor:
    """x (B, H_kv, N, D) float32 in the stored basis -> the model's basis; values and outputs alike."""
    x = hadamard(x) if transform.rotate else x
    return x if transform.scale is None else x * transform.scale[:, None]


def undo_on_key(x: Tensor, t: Tensor, transform: Transform) -> Tensor:
    """The inverse of `apply_to_key`, for reading keys back."""
    x = undo_on_value(x, transform)
    shift = Transform(transform.mean, transform.bias, transform.pairs, transform.phases)
    return x - apply_to_key(torch.zeros_like(x), t, shift)


def apply_to_query(q: Tensor, transform: Transform) -> Tensor:
    """q (B, H_kv, N, D) float32 -> the query that meets stored keys."""
    if transform.scale is not None:
        q = q * transform.scale[:, None]
    return hadamard(q) if transform.rotate else q


def logit_shift(q: Tensor, t: Tensor, transform: Transform) -> Tensor | None:
    """What centering took out of the logits: q · (mean + R_t bias), or None for nothing.

    Args:
        q: (B, H_kv, N, D) float32, untransformed.
        t: (B, S) tokens of the keys.

    Returns:
        (B, H_kv, N, S) or (B, H_kv, N, 1).
    """
    shift: Tensor | None = None
    if transform.mean is not None:
        shift = torch.matmul(q, transform.mean[:, :, None])
    if transform.bias is not None:
        assert transform.phases is not None
        cos, sin = phases_at(transform.phases, t)
        first, second = _pair_dims(transform)
        q_first = q.gather(-1, first[None, :, None].expand(q.shape[0], -1, q.shape[2], -1))
        q_second = q.gather(-1, second[None, :, None].expand(q.shape[0], -1, q.shape[2], -1))
        b_first, b_second = transform.bias[:, None, :, 0], transform.bias[:, None, :, 1]
        in_phase = q_first * b_first + q_second * b_second
        quadrature = q_second * b_first - q_first * b_second
        turning = torch.matmul(in_phase, cos) + torch.matmul(quadrature, sin)
        shift = turning if shift is None else shift + turning
    return shift
