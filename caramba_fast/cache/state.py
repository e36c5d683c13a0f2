"""Whether a saved state is one of this cache: plain values and tensors, so that ``weights_only`` loads take it.

A state may come from a damaged file or from somebody else. It is held against what the cache is made of before anything
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.stream import CacheTensor
from caramba_fast.config.files import shown
from caramba_fast.config.kvcache import ring_size
from caramba_fast.ops import Transform

#: What is kept of a stream.
_STREAM = ("head_dim", "config", "codes", "scales", "tail", "sink", "transform")


def mismatches(
    state: Any, sizes: Mapping[str, int], streams: Mapping[str, CacheTensor], *, paged: bool
) -> list[str]:
    """What of a state is of another cache than one of these sizes and streams."""
    if not isinstance(state, dict):
        return [f"it is a {type(state).__name__}, not a dict"]
    keys = {"batch_size", "max_seq_len", "n_kv_heads", "lengths", "tail_lowest", "streams"}
    problems = [f"it lacks {key!r}" for key in sorted(keys - state.keys())]
    problems += [
        f"{name} is {shown(state.get(name))}, the cache has {mine}"
        for name, mine in sizes.items()
        if state.get(name) != mine
    ]
    if paged:
        problems.append("the cache is paged")
    parts = state.get("streams")
    if not isinstance(parts, dict) or set(parts) != set(streams):
        found = ", ".join(map(str, parts)) if isinstance(parts, dict) else shown(parts)
        return [*problems, f"streams are {found}; the cache has {', '.join(streams)}"]
    for name, stream in streams.items():
        part = parts[name]
        if not isinstance(part, dict) or part.keys() != set(_STREAM):
            problems.append(f"{name} needs the keys {', '.join(_STREAM)}")
            continue
        mine = {"head_dim": stream.head_dim, "config": stream.config.model_dump(mode="json")}
        theirs = {key: part[key] for key in mine}
        if mine != theirs:
            problems.append(f"{name} is stored as {shown(theirs)}, the cache stores {mine}")
    return problems


def contradictions(
    state: dict[str, Any], sizes: Mapping[str, int], streams: Mapping[str, CacheTensor]
) -> list[str]:
    """What of a state for such a cache its own tensors belie."""
    rows = sizes["batch_size"]
    problems = [
        f"{key} is {shown(state[key])}; {rows} whole numbers from 0 on are needed"
        for key in ("lengths", "tail_lowest")
        if not _are_counts(state[key], rows)
    ]
    if problems:
        return problems
    lengths, longest = state["lengths"], max(state["lengths"])
    ring = ring_size(stream.config for stream in streams.values()) or None
    for row, (low, held) in enumerate(zip(state["tail_lowest"], lengths, strict=True)):
        first = 0 if ring is None else max(0, held - ring)
        if not first <= low <= longest:
            problems.append(f"tail_lowest of row {row} is {low}; {first} to {longest} is possible")
    for name, stream in streams.items():
        part = state["streams"][name]
        for key in ("codes", "scales", "tail", "sink"):
            mine = getattr(stream, key)
            shape = None if mine is None else list(mine.shape)
            if shape is not None and key in ("codes", "scales"):
                shape[2] = longest if key == "codes" else -(-longest // stream.group)
            problems += _tensor_problem(f"{key} of {name}", part[key], mine, shape)
        problems += _transform_problems(
            name, part["transform"], sizes["n_kv_heads"], stream.head_dim, longest
        )
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


def _transform_problems(name: str, found: Any, heads: int, dim: int, longest: int) -> list[str]:
    """What is wrong with the constants of a stream: kernels look channels up by them."""
    names = {f.name for f in fields(Transform)}
    if not isinstance(found, dict) or found.keys() != names:
        return [f"transform of {name} needs the keys {', '.join(sorted(names))}"]
    wrong = [
        f"{key} of {name} is a {type(value).__name__}; a tensor or None is needed"
        for key, value in found.items()
        if key != "rotate" and not (value is None or isinstance(value, Tensor))
    ]
    if type(found["rotate"]) is not bool:
        wrong.append(f"rotate of {name} is {shown(found['rotate'])}; True or False is needed")
    if wrong:
        return wrong
    transform = Transform(**found)
    wrong = transform.problems(name, heads, dim, longest)
    if wrong or transform.pairs is None:
        return wrong
    if any(not 0 <= channel < dim for channel in transform.pairs.flatten().tolist()):
        return [f"{name}_pairs names channels outside 0 to {dim - 1}"]
    return []


def on_device(part: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The state of a stream with its tensors on ``device``."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    transform = {key: there(value) for key, value in part["transform"].items()}
    return {**{key: there(value) for key, value in part.items()}, "transform": transform}
