"""How many tokens each row of a cache holds: a host mirror, and a device tensor kernels read.

Every decision is taken on the host mirror; the device is written to and never read back, so no
step waits for the GPU.

A layer cache made larger, cut at the front, or moved to another device.

What a layer cache holds as tensors and plain values, so that ``torch.save`` and ``weights_only`` loads take it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.cache.plans import LayerPlans
from caramba_fast.cache.statistics import full_phases
from caramba_fast.cache.stream import CacheTensor, capacity, empty
from caramba_fast.config import Rotary
from caramba_fast.config.files import shown
from caramba_fast.ops import Transform
from caramba_fast.ops.transform import PHASE_TILE

if TYPE_CHECKING:
    from caramba_fast.cache.layer import LayerCache


Counts = int | Sequence[int] | Tensor


class RowLengths:
    """Lengths of B rows.

    Attributes:
        host: list of B ints.
        seq_lens: (B,) int32 on the device, updated in place, equal to ``host``.
        newest: tokens of the last append, padding included; 0 after anything else.
        query_lens: (B,) int32, how many of them are real in each row, or None for all.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.host = [0] * batch_size
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.newest = 0
        self.query_lens: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.host)

    def on_device(self, counts: Sequence[int]) -> Tensor:
        """(B,) int32 beside ``seq_lens``."""
        return torch.tensor(counts, dtype=torch.int32).to(self.seq_lens.device, non_blocking=True)

    def advance(self, tokens: int, added: Sequence[int], query_lens: Tensor | None) -> None:
        """Row b grows by ``added[b]`` of the ``tokens`` appended; ``query_lens`` says so on the device."""
        self.host = [length + count for length, count in zip(self.host, added, strict=True)]
        self.seq_lens.add_(tokens if query_lens is None else query_lens)
        self.newest, self.query_lens = tokens, query_lens

    def advance_all(self, tokens: int) -> None:
        """Every row grows by ``tokens``."""
        self.host = [length + tokens for length in self.host]
        self.seq_lens.add_(tokens)
        self.newest, self.query_lens = tokens, None

    def set(self, lengths: Sequence[int]) -> None:
        """Replaces all lengths."""
        self.host = list(lengths)
        self.seq_lens.copy_(torch.tensor(self.host, dtype=torch.int32), non_blocking=True)
        self.newest, self.query_lens = 0, None

    def select_rows(self, rows: Sequence[int]) -> RowLengths:
        """Lengths of a cache whose row b is what row ``rows[b]`` is here."""
        other = RowLengths(len(rows), self.seq_lens.device)
        other.set([self.host[row] for row in rows])
        return other

    def per_row(self, name: str, counts: Counts) -> list[int]:
        """``counts`` as B host ints.

        Raises:
            TypeError: not an int, a sequence of ints or a CPU integer tensor.
            ValueError: a wrong number of rows.
        """
        if isinstance(counts, bool) or not isinstance(counts, (int, Sequence, Tensor)):
            raise TypeError(
                f"{name} is a {type(counts).__name__}; an int or one int a row is needed"
            )
        if isinstance(counts, int):
            return [counts] * len(self.host)
        if isinstance(counts, Tensor):
            if counts.device.type != "cpu" or counts.is_floating_point() or counts.ndim != 1:
                raise TypeError(
                    f"{name} is a {tuple(counts.shape)} {counts.dtype} tensor on {counts.device}; "
                    "a (B,) integer tensor on cpu is needed (lengths are never read from a device)"
                )
            counts = counts.tolist()
        if len(counts) != len(self.host):
            raise ValueError(f"{name} has {len(counts)} entries for {len(self.host)} rows")
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            raise TypeError(f"{name} is {counts!r}; ints are needed")
        return list(counts)


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
        longer = lengthened(stream.transform, layer.calibration.rotary.get(name), wanted)
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
            transform = _turned(stream.transform, layer.calibration.rotary.get(name), count)
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
    other.device, other.plans = target, LayerPlans()
    with torch.inference_mode(False):
        other.streams = {
            name: _moved_stream(stream, target) for name, stream in layer.streams.items()
        }
        other.lengths = layer.lengths.select_rows(range(layer.batch_size))
        other.lengths.seq_lens = other.lengths.seq_lens.to(target)
    other._tail = layer._tail.select_rows(range(layer.batch_size))
    other._name_streams()
    return other


def _moved_stream(stream: CacheTensor, device: torch.device) -> CacheTensor:
    other = copy.copy(stream)
    other.tail = None if stream.tail is None else stream.tail.to(device)
    other.sink = None if stream.sink is None else stream.sink.to(device)
    scales = None if stream.scales is None else stream.scales.to(device)
    other.replace_buffers(stream.codes.to(device), scales, stream.transform.to(device))
    return other


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
            name: lengthened(
                Transform(**part["transform"]), layer.calibration.rotary.get(name), slots
            )
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
