"""The rotation that makes K and V easier to quantize: an orthonormal Walsh-Hadamard transform over head_dim.

A key or value x is stored as ``H x``; the query takes ``H q``, so that ``q · k`` stays what it is, and an output is
turned back by ``H``, its own inverse. Exact in real arithmetic: QuaRot's rotation (arXiv:2404.00456), see
docs/transforms.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotated(x: Tensor, rotate: bool) -> Tensor:
    """x (..., D) to the stored basis, or back: `hadamard` of it where a stream is stored so."""
    return hadamard(x) if rotate else x


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension; its own inverse.

    A width that is no power of two is cut into its powers of two, largest first (80 = 64 + 16). As one
    product with the matrix: on a CPU a fast transform in torch ops costs more in calls than it saves.
    """
    key = (x.shape[-1], x.dtype, x.device)
    if type(x) is not Tensor:  # tracing: what is made now is not for later use
        return torch.matmul(x, hadamard_matrix(*key))
    if key not in _matrices:
        with torch.inference_mode(False):  # made under it, it could not be saved for a gradient
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
