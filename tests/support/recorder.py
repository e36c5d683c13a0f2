"""CUDA graphs emulated on any device: a step's torch calls are recorded, and repeated on replay.

A graph keeps addresses and numbers: a replay reads the same tensors and uses the host's numbers at recording. So does
`Recorder`, and like a graph it refuses what waits for the device or gives it new host data. `Rerun` instead runs the
step's Python again and refuses any difference from the recording: if there is none, a graph leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FORBIDDEN = {"_local_scalar_dense", "nonzero", "lift_fresh", "lift_fresh_copy", "equal"} | {
    "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
}  # fmt: skip
#: Functions that do not reach torch's dispatcher on the CPU.
HOST = {"tolist", "cpu", "numpy", "__array__"}
#: Ops that wait for the device if an index is a mask.
MASKED = {"index", "index_put", "index_put_", "_index_put_impl_"}


def _refuse(name: str) -> None:
    raise RuntimeError(f"{name}: operation not permitted when stream is capturing")


class _NoHost(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST:
            _refuse(name)
        return func(*args, **(kwargs or {}))


class _Note(TorchDispatchMode):
    """Records calls; writing ones are recorded but not executed, unless ``does``."""

    def __init__(self, does: bool = False) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.does = does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        places = {str(x.device) for x in _tensors((args, kwargs)) if x.dim()}
        if name == "_to_copy" and kwargs.get("device") is not None:
            places.add(str(kwargs["device"]))
        if name in FORBIDDEN or (name in MASKED and any(map(_is_mask, args[1]))):
            _refuse(name)
        if len(places) > 1:
            _refuse(f"{name} over {' and '.join(sorted(places))}")
        if func._schema.is_mutable and not self.does:
            out = args[0] if func._schema.returns else None  # recorded, not executed
        else:
            out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def noted(does: bool = False) -> Iterator[_Note]:
    """Records the torch calls of the block; RuntimeError for those a graph cannot hold."""
    with _NoHost(), _Note(does) as note:
        yield note


class Recorder:
    """A stand-in for `caramba_fast.infer.cuda_graph.CudaRecorder` that counts its calls."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    def warm_up(self, step: Callable[[], object]) -> None:
        self.warmed += 1
        step()

    def record(self, step: Callable[[], object]) -> Callable[[], None]:
        self.recorded += 1
        with noted() as note:
            step()

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, out in note.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


class Rerun(Recorder):
    """Runs the step again at every replay; RuntimeError if an op, host number, shape or outside tensor differs."""

    def record(self, step: Callable[[], object]) -> Callable[[], None]:
        self.recorded += 1
        with noted() as kept:  # keeps its tensors, so that their addresses are not reused
            step()

        def replay() -> None:
            self.replayed += 1
            with noted(does=True) as note:
                step()
            wanted, found = described(kept.calls), described(note.calls)
            for place, (was, now) in enumerate(zip(wanted, found, strict=False)):
                if was != now:
                    raise RuntimeError(f"call {place} was {was} when recorded, and is {now}")
            if len(wanted) != len(found):
                raise RuntimeError(f"{len(wanted)} calls were recorded, and {len(found)} are done")

        return replay


def described(calls: list[tuple[Any, Any, Any, Any]]) -> list[Any]:
    """Calls without what may change at a replay: the ops, host numbers, shapes, and addresses of outside tensors."""
    made: dict[int, int] = {}

    def of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        memory = x.untyped_storage()._cdata
        whose = f"made by call {made[memory]}" if memory in made else f"at {memory:x}"
        return (whose, tuple(x.shape), x.stride(), x.dtype, x.storage_offset())

    found = []
    for place, (func, args, kwargs, out) in enumerate(calls):
        given = tree_map(of, (args, kwargs))
        known = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(out):
            if x.untyped_storage()._cdata not in known:
                made[x.untyped_storage()._cdata] = place
        found.append((str(func), given, tree_map(of, out)))
    return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
