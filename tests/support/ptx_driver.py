"""A stand-in for Triton's driver with `ptx_cta` as its GPU: kernels are compiled for sm_80, and their PTX is run here.

Launchers, Triton's specialization and its compiler are real. Not for a process that interprets kernels.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from support.ptx_cta import Cta, Kernel
from support.ptx_memory import Device
from support.ptx_program import parse
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from caramba_fast.bench.kernels import host_time
from caramba_fast.ops import registry

EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
#: Changes a kernel's text before it runs: (name, PTX) -> PTX.
Change = Callable[[str, str], str]
_running: list[Emulator] = []


@functools.cache
def _kernel(text: str) -> Kernel:
    return Kernel(parse(text))


class Emulator(TorchDispatchMode):
    """Runs the kernels launched inside of it, and tracks memory that torch allocates without filling it."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.device, self.change = Device(), change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name in EMPTY and found.numel():
            self.device.part(found).written[:] = False
        elif func._schema.is_mutable:
            for x in args:
                if isinstance(x, Tensor) and x.numel():
                    self.device.part(x).written[:] = True
        return found

    def missing(self, x: Tensor) -> int:
        """Number of bytes of a contiguous x that were never written."""
        return int((~self.device.part(x).written).sum())

    def launch(
        self, name: str, text: str, shared: int, grid: Sequence[int], given: list[tuple[str, Any]]
    ) -> None:
        """Runs all CTAs of a grid, x first; ``given`` are type and value of each parameter."""
        kernel = _kernel(self.change(name, text))
        program = kernel.program
        given += [("*i8", None)] * (len(program.params) - len(given))  # unused scratch memory
        sizes = zip(program.params.items(), given, strict=True)
        params = {param: self._bits(kind, x, size) for (param, size), (kind, x) in sizes}
        self.device.begin()
        places = itertools.product(*(range(n) for n in reversed(grid)))
        for number, place in enumerate(places):
            at = (tuple(reversed(place)), grid)
            kernel.run(Cta(program, self.device, shared, params, at, number))

    def _bits(self, kind: str, value: Any, size: int) -> bytes:
        if isinstance(value, Tensor):
            return self.device.address(value).to_bytes(8, "little")
        if kind == "fp32":
            return struct.pack("<f", value)
        return int(value or 0).to_bytes(size, "little", signed=True)


def flattened(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Type and value of a kernel's actual arguments: without constants, tuples by their parts."""
    if isinstance(kind, tuple):
        for one, x in zip(kind, value, strict=True):
            yield from flattened(one, x)
    elif kind != "constexpr":
        yield kind, value


class Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.name, self.shared = metadata.name, metadata.shared
        self.types = tuple(src.signature.values())
        path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")
        self.text = Path(path).read_text("utf-8")

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        """As Triton launches: stream, function, two of metadata, two hooks, then the arguments."""
        given = [*flattened(self.types, rest[6:])]
        _running[-1].launch(self.name, self.text, self.shared, (x, y, z), given)


class Driver(host_time.StandIn):
    """A driver of an sm_80 that does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)


def install() -> None:
    """Makes this process run compiled kernels on CPU tensors for the backend "triton"."""
    assert not triton.knobs.runtime.interpret, "interpreted kernels are not compiled"
    triton.runtime.driver.set_active(Driver())
    host_time.with_stages(lambda stages: stages.update(cubin=lambda *_: b""), "no-binary")
    registry._check_choice = lambda _: None
    registry.Op._why_not_triton = lambda self, device, suppose: None


@contextmanager
def emulated(change: Change = lambda _, text: text) -> Iterator[Emulator]:
    """Runs kernels in this block with the emulator it gives."""
    with Emulator(change) as emulator:
        _running.append(emulator)
        try:
            yield emulator
        finally:
            _running.pop()
