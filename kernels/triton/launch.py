"""What every launcher shares: compile options, the device guard, flattening to rows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

#: Codes are bit-exact only if ``a * b + c`` rounds twice, as it does in the reference.
EXACT = {"enable_fp_fusion": False}


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU current: Triton launches on the current one, not on the pointers'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def has_ptx() -> bool:
    """Whether kernels of this process compile to PTX, so that inline assembly can be used."""
    return not triton.knobs.runtime.interpret and torch.version.hip is None


def dense(x: Tensor | None) -> Tensor | None:
    """x as kernels read what has no strides of its own in their arguments: itself in every ordinary call."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """(..., dim) -> (rows, dim), last dimension contiguous; a view wherever the strides allow."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
