"""What a CUDA graph does, on any device: a step's torch calls are noted, and done again on replay.

A graph keeps addresses and numbers: a replay reads the same tensors and uses the numbers the host had while
recording. So does this, and like a graph it refuses what makes the host wait or hands it over fresh data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = {"_local_scalar_dense", "nonzero", "lift_fresh", "lift_fresh_copy", "equal"}


class _Note(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in FORBIDDEN:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        if func._schema.is_mutable:
            out = args[0] if func._schema.returns else None  # noted, not done
        else:
            out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class Recorder:
    """A stand-in for `caramba_fast.infer.cuda_graph.CudaRecorder`; counts what it is asked for."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    def warm_up(self, step: Callable[[], None]) -> None:
        self.warmed += 1
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        with _Note() as note:
            step()

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, out in note.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay
