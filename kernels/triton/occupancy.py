"""How many programs of a kernel an SM runs at once: from what the compiled kernel uses, not from a guess.

A program holds registers for its warps and shared memory until it ends; an SM has so much of each. The compiler decides
how many registers a thread gets, so the kernel is compiled before its grid is chosen (it would be compiled a moment
later anyway, and is the same one).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton

#: Programs of 4 warps an SM runs at once where no compiled kernel says it: interpreted, and on AMD.
ASSUMED_RESIDENT = 2
#: 32-bit registers of an SM. A warp gets them in such lots, from one of the four register files; shared memory of a
#: program is rounded up as well, and a kilobyte more is taken (CUDA C++ Programming Guide, compute capability 8.0
#: to 12.0).
REGISTERS, REGISTER_LOT, FILES, SHARED_LOT, SHARED_RESERVED = 65536, 256, 4, 128, 1024
WARP = 32


class Multiprocessor(NamedTuple):
    """What one SM has besides registers: bytes of shared memory, threads."""

    shared: int
    threads: int

    @staticmethod
    def of(device: torch.device) -> Multiprocessor:
        """Those of a CUDA device."""
        about = torch.cuda.get_device_properties(device)
        return Multiprocessor(
            about.shared_memory_per_multiprocessor, about.max_threads_per_multi_processor
        )


def resident(registers: int, shared: int, warps: int, sm: Multiprocessor) -> int:
    """Programs an SM runs at once; at least 1.

    Args:
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.
    """
    lot = -(-max(registers, 1) * WARP // REGISTER_LOT) * REGISTER_LOT
    by_registers = REGISTERS // FILES // lot * FILES // warps
    taken = -(-(shared + SHARED_RESERVED) // SHARED_LOT) * SHARED_LOT
    return max(1, min(by_registers, sm.shared // taken, sm.threads // (WARP * warps)))


_known: dict[Hashable, int] = {}


def resident_of(
    key: Hashable,
    device: torch.device,
    kernel: Any,
    arguments: Callable[[], Sequence[Any]],
    **options: Any,
) -> int:
    """`resident` of a kernel as it would be launched.

    Args:
        key: what the kernel is specialized for; asked for again, the answer is kept.
        kernel, arguments, options: of the launch. A dtype stands for a tensor that is not made yet.
    """
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return ASSUMED_RESIDENT
    key = (kernel.__name__, device, key)
    if key not in _known:
        compiled = kernel.warmup(*arguments(), grid=(1,), **options)
        compiled[1, 1, 1]  # loads it, which tells its registers
        _known[key] = resident(
            compiled.n_regs, compiled.metadata.shared, compiled.metadata.num_warps,
            Multiprocessor.of(device),
        )  # fmt: skip
    return _known[key]
