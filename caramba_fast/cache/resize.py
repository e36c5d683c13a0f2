"""A layer cache made larger, cut at the front, or moved to another device."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caramba_fast.cache.statistics import full_phases
from caramba_fast.cache.tensor import CacheTensor, capacity
from caramba_fast.config import Rotary
from caramba_fast.ops import Transform
from caramba_fast.ops.memory import empty
from caramba_fast.ops.transform import PHASE_TILE

if TYPE_CHECKING:
    from caramba_fast.cache.base import LayerCache


def grow(layer: LayerCache, max_seq_len: int) -> None:
    """Gives rows of a contiguous cache room for ``max_seq_len`` tokens; what is stored stays, byte by byte.

    Raises:
        ValueError: a paged cache, or transforms set by hand whose phases end before.
    """
    if layer.pages is not None:
        raise ValueError("a paged cache does not grow; make its pool larger")
    if max_seq_len <= layer.max_seq_len:
        return
    slots = capacity(max_seq_len)
    fit_phases(layer, slots)
    with torch.inference_mode(False):
        for stream in layer.streams.values():
            stream.replace_buffers(
                _copied(stream.codes, slots, layer.pos),
                None if stream.scales is None else _copied(stream.scales, slots, layer.pos),
                stream.transform,
            )
    layer.max_seq_len = max_seq_len


def fit_phases(layer: LayerCache, slots: int = 0) -> None:
    """Makes the phases of centered keys reach ``slots`` tokens, or all that rows have room for."""
    wanted = max(slots, capacity(layer.max_seq_len))
    for name, stream in layer.streams.items():
        longer = lengthened(stream.transform, layer.known.rotary.get(name), wanted)
        if longer is not stream.transform:
            stream.replace_buffers(stream.codes, stream.scales, longer)


def _copied(buffer: Tensor, slots: int, used: int) -> Tensor:
    if buffer.shape[2] >= slots:
        return buffer
    shape = (*buffer.shape[:2], slots, buffer.shape[3])
    new = empty(shape, buffer.dtype, buffer.device)
    new[:, :, :used] = buffer[:, :, :used]
    return new


def lengthened(transform: Transform, rotary: Rotary | None, slots: int) -> Transform:
    """The same constants with phases for ``slots`` tokens."""
    phases = transform.phases
    if phases is None or phases.shape[2] >= PHASE_TILE + slots // PHASE_TILE:
        return transform
    table = full_phases(_needed(rotary), slots)[0][_places(transform, rotary)]
    return replace(transform, phases=table.to(phases.device))


def _turned(transform: Transform, rotary: Rotary | None, count: int) -> Transform:
    """The constants of the same stored keys, where token t is called ``t - count``."""
    bias = transform.bias
    if bias is None or not count:
        return transform
    frequencies = torch.tensor(_needed(rotary).inv_freq, dtype=torch.float64)
    angle = torch.remainder(frequencies[_places(transform, rotary)] * count, 2 * math.pi)
    first, second = bias.double().cpu().unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return replace(transform, bias=turned.to(bias))


def _needed(rotary: Rotary | None) -> Rotary:
    if rotary is None:
        raise ValueError(
            "a bias that was set by hand, without RoPE, cannot be moved: reset() first"
        )
    return rotary


def _places(transform: Transform, rotary: Rotary | None) -> Tensor:
    """(H_kv, P): which of the pairs of ``rotary`` each pair of the transform is."""
    assert transform.pairs is not None
    place = {dims: index for index, dims in enumerate(_needed(rotary).pairs)}
    pairs = [[(a, b) for a, b in head] for head in transform.pairs.tolist()]
    strange = {pair for head in pairs for pair in head} - place.keys()
    if strange:
        raise ValueError(f"the bias is on pairs of channels that RoPE does not turn: {strange}")
    return torch.tensor([[place[pair] for pair in head] for head in pairs])


def drop_front(layer: LayerCache, count: int, max_seq_len: int) -> None:
    """Forgets the first ``count`` tokens of every row; the others move to the front.

    What stood in slot s stands in slot ``s - count``; the bias of centered keys turns along, so that what was
    subtracted stays the same.

    Args:
        max_seq_len: room a row has afterwards, for no fewer than the tokens that stay.

    Raises:
        ValueError: a paged cache, rows of different lengths, a count that would move the tail's ring, or no room
            for what stays.
    """
    ring = layer.residual_len + layer.tail_slack if layer.residual_len else 1
    if layer.pages is not None or len(set(layer.lengths.host)) > 1:
        raise ValueError("tokens in front are dropped of contiguous rows of equal length alone")
    if not 0 <= count <= layer.pos or count % ring:
        raise ValueError(f"count is {count}; a multiple of {ring} up to {layer.pos} is allowed")
    if max_seq_len < layer.pos - count:
        raise ValueError(f"max_seq_len is {max_seq_len}; {layer.pos - count} tokens stay")
    layer._narrow()
    kept = layer.pos - count
    with torch.inference_mode(False):
        for name, stream in layer.streams.items():
            transform = _turned(stream.transform, layer.known.rotary.get(name), count)
            codes = _front(stream.codes, count, kept, capacity(max_seq_len))
            scales = stream.scales
            if scales is not None:
                scales = _front(scales, count, kept, capacity(max_seq_len))
            stream.replace_buffers(codes, scales, transform)
    layer.max_seq_len = max_seq_len
    layer._tail.lowest = [max(low - count, 0) for low in layer._tail.lowest]
    layer.lengths.set([length - count for length in layer.lengths.host])


def _front(buffer: Tensor, start: int, kept: int, slots: int) -> Tensor:
    """The slots from ``start`` on at the front, of the same buffer or of one of another size."""
    moving = buffer[:, :, start : start + kept]
    if buffer.shape[2] == slots:
        buffer[:, :, :kept] = moving.clone()
        return buffer
    new = empty((*buffer.shape[:2], slots, buffer.shape[3]), buffer.dtype, buffer.device)
    new[:, :, :kept] = moving
    return new


def moved(layer: LayerCache, device: torch.device | str) -> LayerCache:
    """The cache on another device; itself where it is there already.

    Raises:
        ValueError: a paged cache, whose pool may be shared.
    """
    target = torch.empty(0, device=device).device
    if target == layer.device:
        return layer
    if layer.pages is not None:
        raise ValueError("a paged cache cannot be moved: its pool may be shared")
    layer._narrow()
    other = copy.copy(layer)
    other.device = target
    with torch.inference_mode(False):
        other.streams = {name: _moved(stream, target) for name, stream in layer.streams.items()}
        other.lengths = layer.lengths.taken(range(layer.batch_size))
        other.lengths.seq_lens = other.lengths.seq_lens.to(target)
    other._tail = layer._tail.taken(range(layer.batch_size))
    other._name_streams()
    return other


def _moved(stream: CacheTensor, device: torch.device) -> CacheTensor:
    other = copy.copy(stream)
    other.tail = None if stream.tail is None else stream.tail.to(device)
    other.sink = None if stream.sink is None else stream.sink.to(device)
    scales = None if stream.scales is None else stream.scales.to(device)
    other.replace_buffers(stream.codes.to(device), scales, stream.transform.to(device))
    return other
