"""append_ and decoupled_append_: apply RoPE, rotate (Hadamard), quantize and write new tokens, in one launch.

Tokens are written after the cached ones: into the codes and, if the cache has them, into the fp16 tail (a ring of the
newest tokens) and the fp16 sinks (the first real tokens). RoPE is optional, as with flash-attention's ``rotary_cos``
and ``rotary_sin``: unrotated keys and the queries of the same tokens are rotated as `ops.apply_rotary_emb` would do.

Per-channel kinds encode a group of tokens when its last token arrives, from the contents of the tail, so the codes do
not depend on how tokens were split into calls. Until then the group's tokens are only in the tail. Padding and sinks,
which are never read from codes, do not count for a channel's range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from caramba_fast.ops import checks
from caramba_fast.ops.apply_rotary_emb import ROTARY, rotary_problems, rotated_heads
from caramba_fast.ops.hadamard import rotated
from caramba_fast.ops.plan import CallPlan
from caramba_fast.ops.quantize import FITS, encode_groups
from caramba_fast.ops.quantize import op as quantize_op
from caramba_fast.ops.registry import DECOUPLED, STANDARD, Op, append_schema, register
from caramba_fast.ops.view import KVView, common_problems, stored_lanes


class Destination:
    """Where each of T new tokens of B rows is written; the same for every stream. Arguments as in `append_`."""

    def __init__(
        self,
        start: Tensor,
        tokens: int,
        query_lens: Tensor | None,
        leftpad: Tensor | None,
        block_table: Tensor | None,
    ) -> None:
        index = torch.arange(tokens, device=start.device)
        self.position = start.to(torch.int64)[:, None] + index
        self.real = torch.ones_like(self.position, dtype=torch.bool)
        self.count = torch.full_like(start, tokens, dtype=torch.int64)
        if query_lens is not None:
            self.count = query_lens.to(torch.int64)
            self.real = index < self.count[:, None]
        self.index = index
        self.t = self.position if leftpad is None else self.position - leftpad[:, None]
        self.block_table = block_table

    def write(self, view: KVView, new: Tensor) -> None:
        """new (B, H_kv, T, D), any float dtype."""
        lanes = stored_lanes(view.codes, view.kind, new.shape[1], new.shape[3])
        packed = lanes.pack(rotated(new.float(), view.rotate))
        if view.group > 1:
            self._write_groups(view, packed)
        else:
            self._write_codes(view, packed)
        rows = torch.arange(new.shape[0], device=new.device)[:, None].expand_as(self.position)
        if view.tail is not None:
            ring = view.tail.shape[2]
            newest = self.real & (self.index >= self.count[:, None] - ring)
            scatter(view.tail, packed, rows, self.position % ring, newest)
        if view.sink is not None:
            first = self.real & (self.t >= 0) & (self.t < view.sink.shape[2])
            scatter(view.sink, packed, rows, self.t.clamp(0, view.sink.shape[2] - 1), first)

    def _place(
        self, buffer: Tensor, position: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row or page, slot in it, and whether it exists, for positions (B, N) of a buffer."""
        slots = buffer.shape[2]
        if self.block_table is None:
            row = torch.arange(position.shape[0], device=position.device)[:, None]
            return row.expand_as(position), position.clamp(max=slots - 1), real & (position < slots)
        pages = self.block_table.shape[1]
        page = (position // slots).clamp(max=pages - 1)
        place = self.block_table.to(torch.int64).gather(1, page)
        exists = (place >= 0) & (place < buffer.shape[0])
        keep = real & (position < pages * slots) & exists
        return place.clamp(0, buffer.shape[0] - 1), position % slots, keep

    def _write_groups(self, view: KVView, packed: Tensor) -> None:
        """Encodes the groups whose last token is among the new ones: packed (B, lanes, T, lane_dim)."""
        assert view.tail is not None and view.scales is not None
        size, start = view.group, self.position[:, :1]
        count = -(-packed.shape[2] // size)  # most groups that so many tokens complete
        group = start // size + torch.arange(count, device=start.device)
        full = group < (start + self.count[:, None]) // size
        if full.device.type == "cpu" and not torch.compiler.is_compiling() and not full.any():
            return
        # Earlier tokens of the first group, at most ``size``, are in the tail.
        before = start - size + torch.arange(size, device=start.device)
        rows = torch.arange(len(start), device=start.device)[:, None]
        held = view.tail[rows, :, before % view.tail.shape[2]].transpose(1, 2)
        recent = torch.cat((held.float(), packed.to(view.tail.dtype).float()), dim=2)
        position = (group[..., None] * size + torch.arange(size, device=start.device)).flatten(1)
        index = (position - start + size).clamp(0, recent.shape[2] - 1)
        index = index[:, None, :, None].expand(-1, recent.shape[1], -1, recent.shape[3])
        values = recent.gather(2, index).unflatten(2, (count, size))
        first = 0 if view.sink is None else view.sink.shape[2]
        t = position + (self.t - self.position)[:, :1]
        codes, scales = encode_groups(
            values, view.kind, (t >= first).unflatten(1, (count, size))[:, None], view.fit,
            None if view.query_rms is None else view.query_rms[:, None],
        )  # fmt: skip
        scatter(view.scales, scales, *self._place(view.scales, group, full))
        whole = full[..., None].expand(-1, -1, size).flatten(1)
        scatter(view.codes, codes.flatten(2, 3), *self._place(view.codes, position, whole))

    def _write_codes(self, view: KVView, packed: Tensor) -> None:
        place, slot, keep = self._place(view.codes, self.position, self.real)
        if view.scales is None:
            scatter(view.codes, packed, place, slot, keep)
            return
        block = packed.shape[-1] // view.scales.shape[-1]
        codes, scales = quantize_op(packed, view.kind, block, view.fit)
        scatter(view.codes, codes, place, slot, keep)
        scatter(view.scales, scales, place, slot, keep)


def scatter(buffer: Tensor, values: Tensor, place: Tensor, slot: Tensor, keep: Tensor) -> None:
    """buffer[place[b, t], :, slot[b, t]] = values[b, :, t] wherever keep[b, t].

    So that index shapes do not depend on data, tokens that are not kept repeat the write of the first kept one, or
    rewrite the first place with its own contents.
    """
    place, slot, keep = place.reshape(-1), slot.reshape(-1), keep.reshape(-1)
    flat = values.transpose(1, 2).flatten(0, 1).to(buffer.dtype)  # (B * T, lanes, width)
    first = keep.to(torch.int32).argmax()[None]
    old = buffer[place[first], :, slot[first]]
    spare = torch.where(keep.any(), flat[first], old)
    flat = torch.where(keep[:, None, None], flat, spare)
    buffer[torch.where(keep, place, place[first]), :, torch.where(keep, slot, slot[first])] = flat


def reference(streams: tuple[str, ...], *args: Any, **options: Any) -> None:
    count = len(streams)
    stored, new = args[: 2 * count], args[2 * count : 3 * count]
    start, kinds = args[3 * count], args[3 * count + 1 :]
    destination = Destination(
        start, new[0].shape[2], options.pop("query_lens", None), options.pop("cache_leftpad", None),
        options.pop("block_table", None),
    )  # fmt: skip
    rotary = [options.pop(name, None) for name in ROTARY]
    views: list[KVView] = []
    for index, stream in enumerate(streams):
        fit = options.pop(f"fit_{stream}", "amax")
        rms = options.pop(f"{stream}_query_rms", None)
        view = KVView.of(stream, stored[2 * index], stored[2 * index + 1], kinds[index], options)
        view = replace(view, fit=fit, query_rms=rms)
        for part in ("codes", "scales", "tail", "sink"):
            buffer = getattr(view, part)
            if buffer is not None:
                checks.writable(f"{stream}_{part}", buffer)
        views.append(view)
    if any(x is not None for x in rotary):
        checks.raise_all(
            "append_", rotary_problems(dict(zip(ROTARY, rotary, strict=True)), new[-2])
        )
        q, cos, sin, out = rotary
        new = (*new[:-2], rotated_heads(new[-2], cos, sin), new[-1])
        out.copy_(rotated_heads(q, cos, sin))
    for view, x in zip(views, new, strict=True):
        destination.write(view, x)


def fake(*_: Any, **__: Any) -> None:
    return None


append_op = register(
    "append_",
    append_schema(STANDARD),
    reference=partial(reference, STANDARD),
    fake=fake,
)
decoupled_append_op = register(
    "decoupled_append_",
    append_schema(DECOUPLED),
    reference=partial(reference, DECOUPLED),
    fake=fake,
)


def plan_append(
    op: Op,
    views: Mapping[str, KVView],
    new: Sequence[Tensor],
    start: Tensor,
    options: Mapping[str, Any],
) -> CallPlan:
    """Checks a call of `append_op` or `decoupled_append_op` and flattens its arguments.

    Args:
        views: the streams by name, in the op's order.
        new: (B, H_kv, T, D) of each stream.
        start: (B,) int32.
        options: the given ones of block_table, cache_leftpad, query_lens, rotary_q and so on.

    Raises:
        TypeError, ValueError: as `append_`.
    """
    _check(views, dict(zip(views, new, strict=True)), start, **options)
    stated: dict[str, Any] = {}
    for name, view in views.items():
        stated.update(view.options(name))
        if view.fit != "amax":
            stated[f"fit_{name}"] = view.fit
            if view.query_rms is not None:
                stated[f"{name}_query_rms"] = view.query_rms
    return CallPlan.of(op, tuple(views.values()), stated)


def append_(
    k: KVView,
    v: KVView,
    k_new: Tensor,
    v_new: Tensor,
    start: Tensor,
    *,
    block_table: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    query_lens: Tensor | None = None,
    rotary_q: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
) -> Tensor | None:
    """Writes T tokens into the buffers of ``k`` and ``v``, in place.

    Args:
        k, v: buffers to write to.
        k_new: (B, H_kv, T, D_k) float32, float16 or bfloat16.
        v_new: (B, H_kv, T, D_v), same dtypes.
        start: (B,) int32, tokens already cached in each row (new ones excluded). Tokens past the capacity, or without a
            page, are dropped.
        block_table: (B, pages) int32, for paged buffers; -1 where a row has no page.
        cache_leftpad: (B,) int32, leading slots that hold padding; sinks begin after them.
        query_lens: (B,) int32, how many of the T tokens are real and written; by default all.
        rotary_q: (B, H_q, T, D_k), the queries of these tokens; RoPE is applied to them and to k_new. Same dtype as
            k_new, as are the following two.
        rotary_cos, rotary_sin: (B or 1, T, D_k), or (B or 1, T, D_k / 2) if both halves of a head have the same angles;
            for these tokens, not for all positions.

    Returns:
        With ``rotary_q`` the rotated queries, contiguous, those of padding included; else None. No gradient flows.

    Raises:
        TypeError, ValueError: naming the argument; nothing is written.
    """
    options = _given(block_table, cache_leftpad, query_lens, rotary_q, rotary_cos, rotary_sin)
    plan = plan_append(append_op, {"k": k, "v": v}, (k_new, v_new), start, options)
    plan.run((k_new, v_new, start), options)
    return options.get("rotary_out")


def decoupled_append_(
    k_sem: KVView,
    k_geo: KVView,
    v: KVView,
    k_sem_new: Tensor,
    k_geo_new: Tensor,
    v_new: Tensor,
    start: Tensor,
    *,
    block_table: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    query_lens: Tensor | None = None,
    rotary_q: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
) -> Tensor | None:
    """`append_` for decoupled attention: semantic keys, geometric keys, and values. RoPE applies to geometric keys."""
    options = _given(block_table, cache_leftpad, query_lens, rotary_q, rotary_cos, rotary_sin)
    new = (k_sem_new, k_geo_new, v_new)
    views = {"k_sem": k_sem, "k_geo": k_geo, "v": v}
    plan_append(decoupled_append_op, views, new, start, options).run((*new, start), options)
    return options.get("rotary_out")


def _given(
    block_table: Tensor | None,
    cache_leftpad: Tensor | None,
    query_lens: Tensor | None,
    *rotary: Tensor | None,
) -> dict[str, Tensor]:
    named = {"block_table": block_table, "cache_leftpad": cache_leftpad, "query_lens": query_lens}
    named |= dict(zip(ROTARY, rotary, strict=False))
    if isinstance(rotary[0], Tensor):
        named["rotary_out"] = rotary[0].new_empty(rotary[0].shape)
    return {name: value for name, value in named.items() if value is not None}


def _check(
    views: Mapping[str, KVView],
    new: Mapping[str, Tensor],
    start: Tensor,
    block_table: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    query_lens: Tensor | None = None,
    **rotary: Tensor,
) -> None:
    problems: list[str] = []
    first = next(iter(new.values()))
    for name, view in views.items():
        checks.float_tensor(f"{name}_new", new[name])
        view.check(name)
        problems += _stream_problems(name, view, new[name], first, block_table)
    rows = {"start": start, "cache_leftpad": cache_leftpad, "query_lens": query_lens}
    checks.tensors(**rows, block_table=block_table)
    for name, tensor in rows.items():
        problems += checks.row_integers(name, tensor, first.shape[0])
    problems += checks.block_table(block_table, first.shape[0])
    keys = new[[*new][-2]]
    if rotary and not problems:
        problems += rotary_problems(rotary, keys)
    if not problems:
        problems += common_problems(views, block_table, first.shape[0])
    checks.raise_all("append_", problems)
    checks.same_device(
        **rows, block_table=block_table, **{f"{n}_codes": v.codes for n, v in views.items()},
        **{f"{n}_new": x for n, x in new.items()}, **rotary,
        **{f"{n}_query_rms": v.query_rms for n, v in views.items()},
    )  # fmt: skip


def _stream_problems(
    name: str, view: KVView, new: Tensor, first: Tensor, block_table: Tensor | None
) -> list[str]:
    if new.ndim != 4 or 0 in new.shape or new.shape[:3] != first.shape[:3]:
        same = "" if new is first else f", agreeing with {tuple(first.shape)} in B, H_kv and T,"
        return [f"{name}_new has shape {tuple(new.shape)}; (B, H_kv, T, D){same} is needed"]
    batch, heads, _, dim = new.shape
    problems = []
    if view.fit not in FITS:
        problems.append(f"{name} has fit {view.fit!r}; allowed are {', '.join(FITS)}")
    if block_table is None and view.codes.shape[0] != batch:
        problems.append(f"{name}_new has B={batch}, its codes {view.codes.shape[0]}")
    grouped = view.lane_dim // dim
    if not grouped or view.lane_dim % dim or -(-heads // grouped) != view.codes.shape[1]:
        problems.append(
            f"{name}_new has {heads} heads of {dim}; the {view.codes.shape[1]} lanes of "
            f"{view.lane_dim} hold something else"
        )
    return problems
