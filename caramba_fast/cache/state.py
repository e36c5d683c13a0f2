"""What a layer cache holds as tensors and plain values, so that ``torch.save`` and ``weights_only`` loads take it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.cache.resize import lengthened
from caramba_fast.cache.tensor import CacheTensor, capacity
from caramba_fast.config.files import shown
from caramba_fast.ops import Transform
from caramba_fast.ops.memory import empty

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


#: What is kept of a stream.
_STREAM = ("head_dim", "config", "codes", "scales", "tail", "sink", "transform")


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

    Nothing is allocated on the word of a number: lengths are held against the tensors that are there.

    Raises:
        ValueError: one that differs or contradicts itself, and in what; nothing has changed then.
    """
    problems = _mismatches(layer, state) or _contradictions(layer, state)
    if problems:
        raise ValueError(f"the state does not fit: {'; '.join(problems)}")
    longest = max(state["lengths"])
    slots = capacity(max(longest, layer.max_seq_len))
    with torch.inference_mode(False), torch.no_grad():
        parts = {name: _moved(state["streams"][name], layer.device) for name in layer.streams}
        transforms = {
            name: lengthened(Transform(**part["transform"]), layer.known.rotary.get(name), slots)
            for name, part in parts.items()
        }
        buffers = {name: _buffers(stream, slots) for name, stream in layer.streams.items()}
        # Whatever could fail has been done: what follows only copies.
        layer.reset()
        for name, stream in layer.streams.items():
            _fill(stream, buffers[name], parts[name], transforms[name], longest)
    layer.max_seq_len = max(longest, layer.max_seq_len)
    layer._tail.lowest = list(state["tail_lowest"])
    layer.lengths.set(state["lengths"])


def _mismatches(layer: LayerCache, state: Any) -> list[str]:
    """What of a state is of another cache than this."""
    if not isinstance(state, dict):
        return [f"it is a {type(state).__name__}, not a dict"]
    keys = {"batch_size", "max_seq_len", "n_kv_heads", "lengths", "tail_lowest", "streams"}
    problems = [f"it lacks {key!r}" for key in sorted(keys - state.keys())]
    problems += [
        f"{name} is {shown(state.get(name))}, the cache has {getattr(layer, name)}"
        for name in ("batch_size", "n_kv_heads")
        if state.get(name) != getattr(layer, name)
    ]
    if layer.pages is not None:
        problems.append("the cache is paged")
    streams = state.get("streams")
    if not isinstance(streams, dict) or set(streams) != set(layer.streams):
        found = ", ".join(map(str, streams)) if isinstance(streams, dict) else shown(streams)
        return [*problems, f"streams are {found}; the cache has {', '.join(layer.streams)}"]
    for name, stream in layer.streams.items():
        part = streams[name]
        if not isinstance(part, dict) or part.keys() != set(_STREAM):
            problems.append(f"{name} needs the keys {', '.join(_STREAM)}")
            continue
        mine = {"head_dim": stream.head_dim, "config": stream.config.model_dump(mode="json")}
        theirs = {key: part[key] for key in mine}
        if mine != theirs:
            problems.append(f"{name} is stored as {shown(theirs)}, the cache stores {mine}")
    return problems


def _contradictions(layer: LayerCache, state: dict[str, Any]) -> list[str]:
    """What of a state for this cache its own tensors belie."""
    problems = [
        f"{key} is {shown(state[key])}; {layer.batch_size} whole numbers from 0 on are needed"
        for key in ("lengths", "tail_lowest")
        if not _are_counts(state[key], layer.batch_size)
    ]
    if problems:
        return problems
    lengths, longest = state["lengths"], max(state["lengths"])
    ring = layer.residual_len + layer.tail_slack if layer.residual_len else None
    for row, (low, held) in enumerate(zip(state["tail_lowest"], lengths, strict=True)):
        first = 0 if ring is None else max(0, held - ring)
        if not first <= low <= longest:
            problems.append(f"tail_lowest of row {row} is {low}; {first} to {longest} is possible")
    for name, stream in layer.streams.items():
        part = state["streams"][name]
        for key in ("codes", "scales", "tail", "sink"):
            mine = getattr(stream, key)
            shape = None if mine is None else list(mine.shape)
            if shape is not None and key in ("codes", "scales"):
                shape[2] = longest
            problems += _tensor_problem(f"{key} of {name}", part[key], mine, shape)
        problems += _transform_problems(layer, name, part["transform"], longest)
    return problems


def _are_counts(value: Any, rows: int) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == rows
        and all(type(count) is int and 0 <= count < 2**31 for count in value)
    )


def _tensor_problem(
    name: str, found: Any, mine: Tensor | None, shape: list[int] | None
) -> list[str]:
    if mine is None:
        return [] if found is None else [f"{name} is there, and the cache has none"]
    if not isinstance(found, Tensor):
        return [f"{name} is a {type(found).__name__}; a tensor is needed"]
    if list(found.shape) != shape or found.dtype != mine.dtype or found.layout != torch.strided:
        return [f"{name} is {tuple(found.shape)} {found.dtype}; {shape} {mine.dtype} is needed"]
    return []


def _transform_problems(layer: LayerCache, name: str, found: Any, longest: int) -> list[str]:
    """What is wrong with the constants of a stream: kernels look channels up by them."""
    names = {f.name for f in fields(Transform)}
    if not isinstance(found, dict) or found.keys() != names:
        return [f"transform of {name} needs the keys {', '.join(sorted(names))}"]
    wrong = [
        f"{key} of {name} is a {type(value).__name__}; a tensor or None is needed"
        for key, value in found.items()
        if key != "rotate" and not (value is None or isinstance(value, Tensor))
    ]
    dim = layer.streams[name].head_dim
    if type(found["rotate"]) is not bool:
        wrong.append(f"rotate of {name} is {shown(found['rotate'])}; True or False is needed")
    if wrong:
        return wrong
    transform = Transform(**found)
    wrong = transform.problems(name, layer.n_kv_heads, dim, longest)
    if wrong or transform.pairs is None:
        return wrong
    if any(not 0 <= channel < dim for channel in transform.pairs.flatten().tolist()):
        return [f"{name}_pairs names channels outside 0 to {dim - 1}"]
    return []


def _moved(part: dict[str, Any], device: torch.device) -> dict[str, Any]:
    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    transform = {key: there(value) for key, value in part["transform"].items()}
    return {**{key: there(value) for key, value in part.items()}, "transform": transform}


def _buffers(stream: CacheTensor, slots: int) -> tuple[Tensor, Tensor | None]:
    """Codes and scales with room for so many slots: the stream's own where they have it."""

    def roomy(buffer: Tensor) -> Tensor:
        if buffer.shape[2] >= slots:
            return buffer
        return empty((*buffer.shape[:2], slots, buffer.shape[3]), buffer.dtype, buffer.device)

    return roomy(stream.codes), None if stream.scales is None else roomy(stream.scales)


def _fill(
    stream: CacheTensor,
    buffers: tuple[Tensor, Tensor | None],
    part: dict[str, Any],
    transform: Transform,
    used: int,
) -> None:
    codes, scales = buffers
    codes[:, :, :used] = part["codes"]
    if scales is not None:
        scales[:, :, :used] = part["scales"]
    for side in (stream.tail, stream.sink):
        if side is not None:
            side.copy_(part["tail" if side is stream.tail else "sink"])
    stream.replace_buffers(codes, scales, transform)
