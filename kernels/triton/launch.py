"""What every launcher shares: compile options, the device guard, flattening to rows, and launches that are kept.

A launcher that starts its kernels with `start` and takes its outputs from `made` can have a call recorded: another call
of the same shapes repeats the launches with other tensors, without anything that decides what is launched. That takes
Triton's own way from a kernel to the driver out of every step but the first, and ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from caramba_fast import sharing

#: Codes are bit-exact only if ``a * b + c`` rounds twice, as it does in the reference.
EXACT = {"enable_fp_fusion": False}
#: Triton compiles another variant for pointers that are a multiple of so many bytes.
ALIGNED = 16


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


# -- launches that are kept --------------------------------------------------------------------

_local = threading.local()


@dataclass
class Recording:
    """The launches of one call, as they happen.

    Attributes:
        launches: compiled kernel, grid, and its arguments in order, constants included.
        found, left: what it took of calls before it, and what it left to those behind it (`sharing`).
        outputs: what the launcher returned, once it has said so.
    """

    launches: list[tuple[Any, tuple[int, ...], list[Any]]] = field(default_factory=list)
    allocated: list[Tensor] = field(default_factory=list)
    found: dict[int, Tensor] = field(default_factory=dict)
    left: dict[int, Tensor] = field(default_factory=dict)
    outputs: tuple[Tensor, ...] | None = None
    is_whole: bool = True

    def note(self, kernel: Any, grid: tuple[int, ...], compiled: Any, args: Any, kw: Any) -> None:
        """One launch."""
        if compiled is None or not hasattr(kernel, "signature") or kernel.pre_run_hooks:
            self.is_whole = False  # interpreted, or somebody listens
            return
        named = {name: value for name, value in kw.items() if name in kernel.signature.parameters}
        bound = kernel.signature.bind(*args, **named)
        bound.apply_defaults()
        whole = (*grid, 1, 1)[:3]
        self.launches.append((compiled, whole, list(bound.arguments.values())))

    def replay(
        self,
        inputs: Sequence[Tensor],
        fixed: Sequence[Tensor | None],
        call: Any = None,  # noqa: ARG002 - launches say which tensor is which
    ) -> Replay | None:
        """The same with other ``inputs``; None where that cannot be said to be the same.

        Args:
            inputs: tensors that will be others in the next call.
            fixed: those that stay.
            call: `ops.planned.Call`.
        """
        if not self.is_whole or self.outputs is None or not self.launches:
            return None
        changing = (*inputs, *self.found.values(), *self.allocated)
        places = {id(x): i for i, x in enumerate(changing)}
        stays = {id(x) for x in fixed}
        if len(places) < len(changing) or not stays.isdisjoint(places):
            return None  # one tensor in two places: in the next call there may be two
        steps = []
        for compiled, grid, args in self.launches:
            if any(id(x) not in places and id(x) not in stays for x in _tensors(args)):
                return None  # a copy, which the next call would have to make again
            steps.append((compiled[grid], *_holes(args, places)))
        return Replay(
            steps, [(x.stride(), x.data_ptr() % ALIGNED) for x in inputs],
            [(tuple(x.shape), x.dtype) for x in self.allocated],
            [places[id(x)] for x in self.outputs], inputs[0].device, list(self.found),
            {key: places[id(x)] for key, x in self.left.items()},
        )  # fmt: skip


def _tensors(args: Any) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)


class Hole(NamedTuple):
    """Where an argument of a launch changes.

    Attributes:
        at: which argument, or which part of a tuple.
        tensor: the number of the tensor that goes there; -1 for a tuple of which parts change.
        fixed, holes: of a tuple, what stays of it and where it changes.
    """

    at: int
    tensor: int
    fixed: list[Any]
    holes: list[Hole]


def _holes(args: Sequence[Any], places: dict[int, int]) -> tuple[list[Any], list[Hole]]:
    """What stays of arguments, and where tensors of ``places`` (by id: their number) stand in them."""
    fixed, holes = list(args), []
    for at, x in enumerate(args):
        if id(x) in places and isinstance(x, Tensor):
            fixed[at] = None
            holes.append(Hole(at, places[id(x)], [], []))
        elif isinstance(x, tuple) and any(id(part) in places for part in _tensors(x)):
            fixed[at] = None
            holes.append(Hole(at, -1, *_holes(x, places)))
    return fixed, holes


def _filled(fixed: list[Any], holes: list[Hole], tensors: Sequence[Tensor]) -> list[Any]:
    """Arguments with tensors of a call; what is kept holds none of them."""
    found = fixed.copy()
    for at, number, parts, inner in holes:
        found[at] = tensors[number] if number >= 0 else tuple(_filled(parts, inner, tensors))
    return found


class Replay:
    """Launches of a recorded call, for other tensors of the same shapes and dtypes.

    Args:
        launches: what starts each kernel, its arguments, and which of them change.
        layouts: strides and alignment of each input.
        allocated: shape and dtype of what the launcher makes.
        outputs: which of all tensors it returns.
        device: where.
        found: what it needs of calls before it, behind the inputs (`sharing`).
        left: what it leaves to calls behind it, and which of all tensors that is.
    """

    #: As a call that the C++ extension keeps has it (`ops.planned`).
    direct = None

    def __init__(
        self,
        launches: Sequence[tuple[Callable[..., Any], list[Any], list[Hole]]],
        layouts: Sequence[tuple[Any, int]],
        allocated: Sequence[tuple[tuple[int, ...], torch.dtype]],
        outputs: Sequence[int],
        device: torch.device,
        found: Sequence[int],
        left: dict[int, int],
    ) -> None:
        self._launches, self._layouts, self._allocated = launches, layouts, allocated
        self._outputs, self._device = outputs, device
        self._found, self._left = found, left

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Outputs (none of an op that writes in place).

        None where the inputs lie otherwise or what it needs of calls before it is not there, and nothing was done.
        """
        for x, (stride, offset) in zip(inputs, self._layouts, strict=True):
            if x.stride() != stride or x.data_ptr() % ALIGNED != offset:
                return None
        if self._found:
            there = sharing.results() or {}
            if any(key not in there for key in self._found):
                return None
            inputs = (*inputs, *[there[key] for key in self._found])
        device = self._device
        if device.index is not None and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        tensors, device = [*inputs], self._device
        for shape, dtype in self._allocated:
            tensors.append(torch.empty(shape, dtype=dtype, device=device))
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        for launch, fixed, holes in self._launches:
            launch(*_filled(fixed, holes, tensors), stream=stream)
        there = sharing.results() if self._left else None
        if there is not None:
            there.update({key: tensors[i] for key, i in self._left.items()})
        return tuple([tensors[i] for i in self._outputs])


@contextmanager
def recording() -> Iterator[Recording]:
    """Notes what the launchers of this thread start."""
    found = _local.recording = Recording()
    try:
        yield found
    finally:
        _local.recording = None


def is_recording() -> bool:
    """Whether launches of this thread are noted."""
    return getattr(_local, "recording", None) is not None


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, noted if somebody records."""
    compiled = kernel[grid](*args, **options)
    found = getattr(_local, "recording", None)
    if found is not None:
        found.note(kernel, grid, compiled, args, options)


def made(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor for kernels to fill, noted if somebody records."""
    new = like.new_empty(tuple(shape), dtype=dtype or like.dtype)
    found = getattr(_local, "recording", None)
    if found is not None:
        found.allocated.append(new)
    return new


_keys: dict[Hashable, int] = {}
#: Each is taken once, also while another thread takes one.
_numbers = count()


def once(key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` makes by `made` and `start`, or what another call made that shares it (`sharing`).

    Args:
        key: says what it is made of but lengths, which are the same for all who share.
    """
    there = sharing.results()
    if there is None:
        return make()
    number = _keys.setdefault(key, next(_numbers))  # which is looked up faster
    is_new = number not in there
    if is_new:
        there[number] = make()
    found = getattr(_local, "recording", None)
    if found is not None:
        (found.left if is_new else found.found)[number] = there[number]
    return there[number]


def returned(*outputs: Tensor) -> None:
    """A launcher is done: `start` has seen all its kernels, and it returns these."""
    found = getattr(_local, "recording", None)
    if found is not None:
        found.outputs = outputs
