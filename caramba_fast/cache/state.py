"""Validation of saved cache states, which may come from damaged or untrusted files, before a cache changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from caramba_fast.cache.stream import CacheTensor
from caramba_fast.config.files import shown
from caramba_fast.config.kvcache import REMOVED, KVCacheTensorConfig, ring_size

T = TypeVar("T")

#: Keys of a stream's state.
_STREAM = ("head_dim", "config", "codes", "scales", "tail", "sink")
#: A key that earlier versions also saved: the basis of a stream, with constants that this version does not read.
_TRANSFORM = "transform"


def deepcopied(cache: T, memo: dict[int, Any]) -> T:
    """``__deepcopy__`` of caches: the copy can be used outside of the inference mode it is made in, as they can."""
    made: T = type(cache).__new__(type(cache))
    memo[id(cache)] = made
    with torch.inference_mode(False):
        vars(made).update(copy.deepcopy(vars(cache), memo))
    return made


def without_constants(state: Any) -> Any:
    """Converts a state of an earlier version that has no constants to the current format; others are unchanged.

    Raises ValueError if a stream was stored with a mean or bias subtracted, or divided by factors.
    """
    parts = state.get("streams") if isinstance(state, dict) else None
    if not isinstance(parts, dict):
        return state
    return {**state, "streams": {name: _rotated_at_most(name, x) for name, x in parts.items()}}


def _rotated_at_most(name: str, part: Any) -> Any:
    """The state of a stream without an earlier version's description of its basis, which `rotate` covers."""
    basis = part.get(_TRANSFORM) if isinstance(part, dict) else None
    if not isinstance(basis, dict) or not isinstance(part.get("config"), dict):
        return part
    constants = [str(key) for key, x in basis.items() if key != "rotate" and x is not None]
    if constants:
        raise ValueError(
            f"the state does not fit: {shown(name)} was stored with {shown(', '.join(constants))} of an earlier "
            "version, which this one does not read (keys by channel need no constants); fill the cache anew"
        )
    config = {key: x for key, x in part["config"].items() if key not in REMOVED}
    if basis.get("rotate") is not config.get("rotate"):
        return part
    return {**{key: x for key, x in part.items() if key != _TRANSFORM}, "config": config}


def mismatches(
    state: Any, sizes: Mapping[str, int], streams: Mapping[str, CacheTensor], *, paged: bool
) -> list[str]:
    """In what a state differs from a cache of these sizes and streams."""
    if not isinstance(state, dict):
        return [f"it is a {type(state).__name__}, not a dict"]
    keys = {"batch_size", "max_seq_len", "n_kv_heads", "lengths", "tail_lowest", "streams"}
    problems = [f"it lacks {key!r}" for key in sorted(keys - state.keys())]
    problems += [
        f"{name} is {shown(state.get(name))}, the cache has {mine}"
        for name, mine in sizes.items()
        if not _equal(state.get(name), mine)
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
        if not _equal(_as_read(theirs), _as_read(mine)):
            problems.append(f"{name} is stored as {shown(theirs)}, the cache stores {mine}")
    return problems


def _equal(found: Any, mine: Any) -> bool:
    try:
        return bool(found == mine)
    except (RuntimeError, ValueError):
        return False


def _as_read(part: dict[str, Any]) -> dict[str, Any]:
    """The storage settings that matter for reading; ``fit``, how scales were chosen, may differ."""
    config = part["config"]
    if not isinstance(config, dict):
        return part
    return {**part, "config": {key: x for key, x in config.items() if key != "fit"}}


def contradictions(
    state: dict[str, Any], sizes: Mapping[str, int], streams: Mapping[str, CacheTensor]
) -> list[str]:
    """In what a state for such a cache contradicts its own tensors."""
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
    if not is_stored(found):
        return [f"{name} is {described(found)}"]
    if list(found.shape) != shape or found.dtype != mine.dtype:
        return [f"{name} is {tuple(found.shape)} {found.dtype}; {shape} {mine.dtype} is needed"]
    return []


def is_stored(x: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor with memory for every value: a file may have one of a few bytes and any shape."""
    return (
        isinstance(x, Tensor)
        and not (x.is_nested or x.is_meta)
        and x.layout == torch.strided
        and x.untyped_storage().nbytes() >= x.numel() * x.element_size()
    )


def described(x: Any) -> str:
    """What a value is that is not `is_stored`, and what is needed."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}; a tensor is needed"
    kind = "nested" if x.is_nested else "on the meta device" if x.is_meta else "expanded or sparse"
    return f"a tensor that is {kind}; one with memory for every value is needed"


def on_device(part: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The state of a stream with its tensors on ``device``."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return {key: there(value) for key, value in part.items()}


def without_leftovers(state: dict[str, Any]) -> dict[str, Any]:
    """Zeroes unused parts of a state, in place, so that stale memory does not get into a file.

    Unused are codes and scales past the end of a row (for per-channel kinds also those of an incomplete group), and
    ring slots without a token of the row.
    """
    for part in state["streams"].values():
        group = KVCacheTensorConfig(**part["config"]).group
        for row, (length, low) in enumerate(
            zip(state["lengths"], state["tail_lowest"], strict=True)
        ):
            full = length // group
            part["codes"][row, :, full * group :] = 0
            if part["scales"] is not None:
                part["scales"][row, :, full:] = 0
            if part["tail"] is not None:
                size = part["tail"].shape[2]
                held = torch.arange(min(low, length), length, device="cpu") % size
                unused = torch.ones(size, dtype=torch.bool, device="cpu")
                unused[held] = False
                part["tail"][row][:, unused.to(part["tail"].device)] = 0
            if part["sink"] is not None:
                part["sink"][row, :, length:] = 0
    return state
