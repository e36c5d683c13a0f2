"""The rotation that makes K and V easier to quantize: an orthonormal Walsh-Hadamard transform H over head_dim.

A key or value x is stored as ``H x``. Queries become ``H q``, so that ``q · k`` is unchanged, and outputs are
transformed back by ``H``, its own inverse. QuaRot's rotation (arXiv:2404.00456); see docs/formats.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from caramba_fast.ops.registry import autocast_off


def rotated(x: Tensor, rotate: bool) -> Tensor:
    """Transforms x (..., D) to the stored basis or back: `hadamard` if ``rotate``, else x itself."""
    return hadamard(x) if rotate else x


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension; its own inverse.

    A width that is not a power of two is split into powers of two, largest first (80 = 64 + 16). Computed as a matrix
    product: on a CPU a fast transform in torch ops costs more in calls than it saves.
    """
    key = (x.shape[-1], x.dtype, x.device)
    with autocast_off(x.device):
        if type(x) is not Tensor:  # tracing: do not cache the matrix
            return torch.matmul(x, hadamard_matrix(*key))
        if key not in _matrices:
            with torch.inference_mode(False):  # autograd cannot save inference tensors
                _matrices[key] = hadamard_matrix(*key)
        return torch.matmul(x, _matrices[key])


_matrices: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def hadamard_matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(width, width), symmetric and orthonormal; block-diagonal if width is not a power of two."""
    blocks, left = [], width
    while left:
        size = 1 << (left.bit_length() - 1)
        index = torch.arange(size, device="cpu")
        common = index[:, None] & index  # entry (i, j) is -1 to the number of ones in i & j
        ones = sum((common >> bit) & 1 for bit in range(size.bit_length()))
        blocks.append((1 - 2 * (torch.as_tensor(ones) % 2)).double() / math.sqrt(size))
        left -= size
    return torch.block_diag(*blocks).to(device, dtype)
