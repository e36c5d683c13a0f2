"""What a layer cache holds as tensors and plain values, so that ``torch.save`` and ``weights_only`` loads take it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.cache.resize import fit_phases
from caramba_fast.cache.tensor import CacheTensor
from caramba_fast.ops import Transform

if TYPE_CHECKING:
    from caramba_fast.cache.base import LayerCache


def state_of(layer: LayerCache) -> dict[str, Any]:
    """The state of a contiguous cache: copies of what is stored, and what it is stored as.

    Raises:
        ValueError: a paged cache, whose pool may be shared.
    """
    if layer.pages is not None:
        raise ValueError("the state of a paged cache is not saved: its pool may be shared")
    layer._narrow()
    return {
        "batch_size": layer.batch_size,
        "max_seq_len": layer.max_seq_len,
        "n_kv_heads": layer.n_kv_heads,
        "lengths": list(layer.lengths.host),
        "tail_lowest": list(layer._tail.lowest),
        "streams": {name: _stream(s, layer.pos) for name, s in layer.streams.items()},
    }


def _stream(stream: CacheTensor, used: int) -> dict[str, Any]:
    transform = {f.name: getattr(stream.transform, f.name) for f in fields(Transform)}
    return {
        "head_dim": stream.head_dim,
        "config": stream.config.model_dump(mode="json"),
        "codes": stream.codes[:, :, :used].clone(),
        "scales": None if stream.scales is None else stream.scales[:, :, :used].clone(),
        "tail": None if stream.tail is None else stream.tail.clone(),
        "sink": None if stream.sink is None else stream.sink.clone(),
        "transform": {k: x.clone() if isinstance(x, Tensor) else x for k, x in transform.items()},
    }


def load_state(layer: LayerCache, state: dict[str, Any]) -> None:
    """Puts a state into a cache of the same sizes and storage.

    Raises:
        ValueError: one that differs, and in what.
    """
    problems = [
        f"{name} is {state.get(name)}, the cache has {getattr(layer, name)}"
        for name in ("batch_size", "n_kv_heads")
        if state.get(name) != getattr(layer, name)
    ]
    streams = state.get("streams", {})
    if list(streams) != list(layer.streams):
        problems.append(
            f"streams are {', '.join(streams)}; the cache has {', '.join(layer.streams)}"
        )
    else:
        for name, stream in layer.streams.items():
            mine = {"head_dim": stream.head_dim, "config": stream.config.model_dump(mode="json")}
            theirs = {key: streams[name][key] for key in mine}
            if mine != theirs:
                problems.append(f"{name} is stored as {theirs}, the cache stores {mine}")
    if layer.pages is not None:
        problems.append("the cache is paged")
    if problems:
        raise ValueError(f"the state does not fit: {'; '.join(problems)}")
    layer.reset()
    longest = max(state["lengths"])
    layer.grow(max(longest, 1))
    with torch.no_grad():
        for name, stream in layer.streams.items():
            _load_stream(stream, streams[name], longest, layer.device)
    layer.lengths.set(state["lengths"])
    layer._tail.lowest = list(state["tail_lowest"])
    fit_phases(layer)  # they may have been made for less room


def _load_stream(
    stream: CacheTensor, state: dict[str, Any], used: int, device: torch.device
) -> None:
    for part in ("codes", "scales"):
        buffer = getattr(stream, part)
        if buffer is not None:
            buffer[:, :, :used] = state[part].to(device)
    for part in ("tail", "sink"):
        if getattr(stream, part) is not None:
            getattr(stream, part).copy_(state[part])
    stream.replace_buffers(stream.codes, stream.scales, Transform(**state["transform"]).to(device))
