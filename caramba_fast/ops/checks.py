"""Argument checks shared by the ops: errors name the argument, its value, and what is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from caramba_fast.formats import (
    BLOCK_SIZES,
    CHANNEL_KINDS,
    PACKED_TOGETHER,
    QUANTIZED_KINDS,
    SCALE_DTYPE,
    Format,
    resolve,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def tangents_go_along() -> bool:
    """Whether forward-mode differentiation is active, even under no_grad: our ops do not support it."""
    return bool(forward_ad._current_level >= 0)


def float_tensor(name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is a tensor of fp32, fp16 or bf16."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is needed")
    if value.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed are float32, float16, bfloat16")


def writable(name: str, buffer: Tensor) -> None:
    """Raises ValueError if elements of an output buffer share memory, as in an expanded tensor."""
    if any(
        step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)
    ):
        raise ValueError(
            f"{name} of strides {buffer.stride()} has elements that share memory; a buffer that is written needs "
            "memory for each"
        )


def same_device(**tensors: Tensor | None) -> None:
    """Raises ValueError if the named tensors are on different devices."""
    places = {name: value.device for name, value in tensors.items() if value is not None}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in places.items())
        raise ValueError(f"tensors must share one device; got {listed}")


def quantized_kind(kind: object) -> Format:
    """The format of a quantized kind; raises ValueError for fp32, fp16 and bf16."""
    form = resolve(kind)
    if not form.quantized:
        raise ValueError(
            f"kind {form.name!r} stores values as they are; quantized kinds are "
            f"{', '.join((*QUANTIZED_KINDS, *CHANNEL_KINDS))}"
        )
    return form


def codes_and_scales(name: str, codes: Tensor, scales: Tensor | None, kind: object) -> None:
    """Checks one stored tensor: dtypes, leading shape, and a block size that fits."""
    form = resolve(kind)
    if codes.dtype != form.dtype:
        raise TypeError(f"{name} codes have dtype {codes.dtype}; {form.name} stores {form.dtype}")
    if not form.quantized:
        if scales is not None:
            raise ValueError(f"{name} scales were given, but {form.name} has none")
        return
    if scales is None:
        raise ValueError(f"{name} scales are missing; {form.name} needs one for each block")
    if scales.dtype != SCALE_DTYPE:
        raise TypeError(f"{name} scales have dtype {scales.dtype}; allowed is {SCALE_DTYPE}")
    if form.by_channel:
        _check_groups(name, codes, scales, form)
        return
    if codes.shape[:-1] != scales.shape[:-1]:
        raise ValueError(
            f"{name} codes {tuple(codes.shape)} and scales {tuple(scales.shape)} differ before "
            "the last dimension"
        )
    width = form.value_width(codes.shape[-1])
    blocks = scales.shape[-1]
    if blocks == 0 or width % blocks or width // blocks not in (32, 64, 128):
        raise ValueError(
            f"{name}: {width} values with {blocks} scales is no block of 32, 64 or 128 values"
        )


def _check_groups(name: str, codes: Tensor, scales: Tensor, form: Format) -> None:
    """Raises ValueError unless per-channel codes and scales match."""
    width = form.value_width(codes.shape[-1])
    fits = codes.ndim == scales.ndim >= 2 and codes.shape[:-2] == scales.shape[:-2]
    sizes = [size for size in BLOCK_SIZES if fits and codes.shape[-2] == size * scales.shape[-2]]
    empty = fits and codes.shape[-2] == scales.shape[-2] == 0
    if not (sizes or empty) or scales.shape[-1] != 2 * width or width % PACKED_TOGETHER:
        raise ValueError(
            f"{name} codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not fit; {form.name} needs "
            f"(..., N * G, {codes.shape[-1]}) and (..., N, {2 * width}) for groups of G = "
            f"{', '.join(map(str, BLOCK_SIZES))} tokens, of a multiple of {PACKED_TOGETHER} channels"
        )


def tensors(**given: object) -> None:
    """Raises TypeError if an argument is neither a tensor nor None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; a tensor is needed")


def window(value: Any) -> list[str]:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if pair and all(isinstance(side, (int, torch.SymInt)) and side >= -1 for side in value):
        return []
    return [f"window_size is {value!r}; (left, right), each -1 or more, is needed"]


def row_integers(name: str, tensor: Tensor | None, batch: int) -> list[str]:
    """Problems of a per-row (B,) int32 tensor; None is fine."""
    if tensor is None or (tensor.shape == (batch,) and tensor.dtype == torch.int32):
        return []
    return [f"{name} is {tuple(tensor.shape)} {tensor.dtype}; ({batch},) int32 is needed"]


def block_table(table: Tensor | None, batch: int) -> list[str]:
    """Problems of a (B, pages) int32 block table; None is fine."""
    if table is None:
        return []
    if (
        table.ndim != 2
        or table.shape[0] != batch
        or table.dtype != torch.int32
        or not table.shape[1]
    ):
        return [
            f"block_table is {tuple(table.shape)} {table.dtype}; ({batch}, pages) int32 is needed"
        ]
    return []


def raise_all(op: str, problems: list[str]) -> None:
    """Raises one ValueError that lists every problem; does nothing without any."""
    if len(problems) == 1:
        raise ValueError(f"{op}: {problems[0]}")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(f"{op} cannot run for {len(problems)} reasons:\n{listed}")
