"""append_: quantize new K and V and write them behind what is cached, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba_fast.formats import resolve
from caramba_fast.ops import checks
from caramba_fast.ops.options import refuse_unbuilt
from caramba_fast.ops.quantize import reference as quantize_reference
from caramba_fast.ops.registry import register
from caramba_fast.ops.view import KVView, Lanes, stored_lanes

SCHEMA = (
    "(Tensor(a!) k_codes, Tensor(b!)? k_scales, Tensor(c!) v_codes, Tensor(d!)? v_scales, "
    "Tensor k_new, Tensor v_new, Tensor start, str k_kind, str v_kind, *, "
    "Tensor? block_table=None, Tensor? cache_leftpad=None, "
    "Tensor(e!)? k_tail=None, Tensor(f!)? v_tail=None, int residual_len=0, "
    "Tensor(g!)? k_sink=None, Tensor(h!)? v_sink=None, "
    "Tensor? k_bias=None, Tensor? k_pairs=None, Tensor? theta=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, bool rotate_k=False, bool rotate_v=False) -> ()"
)


def reference(
    k_codes: Tensor,
    k_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    k_new: Tensor,
    v_new: Tensor,
    start: Tensor,
    k_kind: str,
    v_kind: str,
    **options: Any,
) -> None:
    """The oracle: pure torch, any device."""
    refuse_unbuilt("append_", options)
    lanes = stored_lanes(k_codes, k_kind, k_new.shape[1], k_new.shape[3])
    _write(k_codes, k_scales, lanes, k_new, start, k_kind)
    _write(v_codes, v_scales, lanes, v_new, start, v_kind)


def _write(
    codes: Tensor, scales: Tensor | None, lanes: Lanes, new: Tensor, start: Tensor, kind: str
) -> None:
    """Slots start[b] … start[b] + T - 1 of row b; slots past the buffer are dropped."""
    packed = lanes.pack(new)
    if scales is None:
        _scatter(codes, packed.to(codes.dtype), start)
        return
    new_codes, new_scales = quantize_reference(packed, kind, packed.shape[-1] // scales.shape[-1])
    _scatter(codes, new_codes, start)
    _scatter(scales, new_scales, start)


def _scatter(buffer: Tensor, values: Tensor, start: Tensor) -> None:
    """Writes without a data-dependent shape.

    A slot past the end is redirected to a slot that is being written anyway, with that slot's
    own value: the row's first new token, or what already stands in the last slot of a full row.
    """
    capacity, length = buffer.shape[2], values.shape[2]
    begin = start.to(torch.int64)
    slots = begin[:, None] + torch.arange(length, device=buffer.device)
    home = begin.clamp(max=capacity - 1)
    rows = torch.arange(buffer.shape[0], device=buffer.device)
    old = buffer[rows, :, home][:, :, None]
    spare = torch.where((begin < capacity)[:, None, None, None], values[:, :, :1], old)
    inside = slots < capacity
    slots = torch.where(inside, slots, home[:, None])
    values = torch.where(inside[:, None, :, None], values, spare)
    buffer[rows[:, None], :, slots] = values.transpose(1, 2)


def fake(*_: Any, **__: Any) -> None:
    return None


_op = register("append_", SCHEMA, reference=reference, fake=fake)


def append_(
    k: KVView, v: KVView, k_new: Tensor, v_new: Tensor, start: Tensor, **options: Any
) -> None:
    """Writes T tokens into the buffers of ``k`` and ``v``, in place.

    Args:
        k, v: buffers to write to; capacity is S of their codes.
        k_new: (B, H_kv, T, D_k) float32, float16 or bfloat16.
        v_new: (B, H_kv, T, D_v), same dtypes.
        start: (B,) int32, tokens already cached in each row (the new ones excluded). Slots at or
            past the capacity are dropped, so padding at the end of a short row is harmless.
        options: the keyword options of DESIGN's append; those not built yet raise by name.

    Raises:
        TypeError, ValueError: naming the argument; nothing is written.
        NotImplementedError: an option this version does not have.
    """
    for name, new, view in (("k_new", k_new, k), ("v_new", v_new, v)):
        checks.float_tensor(name, new)
        view.check(name[0])
        if new.ndim != 4 or new.shape[0] != view.codes.shape[0]:
            raise ValueError(
                f"{name} has shape {tuple(new.shape)}; (B, H_kv, T, D) with "
                f"B={view.codes.shape[0]} is needed"
            )
        _check_lanes(name, new, view)
    if k_new.shape[:3] != v_new.shape[:3]:
        raise ValueError(
            f"k_new {tuple(k_new.shape)} and v_new {tuple(v_new.shape)} differ in B, H_kv or T"
        )
    if start.shape != (k_new.shape[0],) or start.dtype != torch.int32:
        raise ValueError(
            f"start has shape {tuple(start.shape)} and dtype {start.dtype}; "
            f"({k_new.shape[0]},) int32 is needed"
        )
    checks.same_device(k=k.codes, v=v.codes, k_new=k_new, v_new=v_new, start=start)
    _op(k.codes, k.scales, v.codes, v.scales, k_new, v_new, start, k.kind, v.kind, **options)


def _check_lanes(name: str, new: Tensor, view: KVView) -> None:
    heads, dim = new.shape[1], new.shape[3]
    grouped = view.lane_dim // dim if dim else 0
    if not grouped or view.lane_dim % dim or -(-heads // grouped) != view.codes.shape[1]:
        raise ValueError(
            f"{name} has {heads} heads of {dim}; the {view.codes.shape[1]} lanes of "
            f"{view.lane_dim} ({resolve(view.kind).name}) hold something else"
        )
