"""Host time of a decode step: ``python -m caramba_fast.bench.kernels.host_time [--out FILE]``.

Microseconds of append + attend of one token in one layer (32/8 heads of 128, bfloat16) with Triton's kernels: first as
a call is made for the first time, then as the layer's plan repeats it; and those of an empty kernel. With a GPU the
launches are real. Without one a stand-in for Triton's driver takes every launch and does nothing: kernels are compiled
for sm_90 as far as Triton's own IR, our code and Triton's run up to the driver, tensors are on the CPU; a GPU's
allocations and launches would come on top. First, both ways are compared on two layers that were filled alike: by
results, or without a GPU by what the driver gets. The exit status is 1 where they differ, or where no plan kept a call
to repeat.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from caramba_fast import sharing
from caramba_fast.bench.environment import environment
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.out import write_text
from caramba_fast.ops import registry
from caramba_fast.ops.apply_rotary_emb import rotary_op

TARGET = GPUTarget("cuda", 90, 32)


class Launcher:
    """A compiled kernel; the arguments of its launches go to `launched`."""

    launched: list[Any] | None = None

    def __init__(self, src: Any, metadata: Any) -> None:  # noqa: ARG002 - Triton's interface
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        """Called to launch the kernel."""
        if Launcher.launched is not None:
            x, y, z, _stream, _function, _packed, _metadata, _enter, _exit, *given = args
            Launcher.launched.append((self.name, (x, y, z), given))


def described(launches: list[Any], held: dict[int, str]) -> list[Any]:
    """Launches, with each tensor as name, dtype and shape.

    ``held`` names tensors by address; those made by the step itself are numbered in order.
    """
    new: dict[int, int] = {}

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            place = x.data_ptr()
            name = held.get(place) or f"new {new.setdefault(place, len(new))}"
            return ("tensor", name, str(x.dtype), tuple(x.shape))
        if isinstance(x, tuple | list):
            return tuple(of(part) for part in x)
        return x if isinstance(x, int | float | None) else str(x)

    return [of(launch) for launch in launches]


class StandIn(DriverBase):
    """A driver of a GPU that does not exist."""

    def __init__(self) -> None:
        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (object(), 1, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
            unload_module=lambda _: None,
        )

    @classmethod
    def is_active(cls) -> bool:
        """Never chosen by Triton itself."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Unused: nothing is compiled for the host."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The compilation target."""
        return TARGET

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of tensors."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Unused: nothing runs."""
        raise NotImplementedError


@triton.jit
def empty_kernel(x, n: tl.constexpr):
    """Does nothing."""


def microseconds(call: Callable[[], Any], count: int = 200, rounds: int = 7) -> float:
    """Microseconds of a call: the least of several medians, since other load only adds."""
    taken = []
    for _ in range(rounds):
        times = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        taken.append(statistics.median(times))
    return 1e6 * min(taken)


class Step:
    """append + attend of one token in one layer; ``behind`` another layer, with which it shares what it can.

    Unwritten memory holds zeros, so that two layers filled alike can be compared as a whole.
    """

    def __init__(
        self,
        kind: str,
        device: str,
        batch: int = 1,
        page_size: int | None = None,
        rope: str | None = None,
        behind: bool = False,
        **options: Any,
    ) -> None:
        self.results: dict[Any, Any] = {}
        if behind:
            with sharing.shared(self.results):
                Step(kind, device, batch, page_size, rope, **options)
        cache: Any = import_module("caramba_fast.cache")  # needs pydantic, which a machine may lack
        cache_configs = import_module("caramba_fast.config").cache_configs
        self.rope_of = cache.Rope
        heads, kv_heads, dim = 32, 8, 128
        self.options = {"softmax_scale": 0.1, **options}
        self.layer = cache.LayerKVCache(
            batch, 4096, kv_heads * dim, kv_heads * dim, n_kv_heads=kv_heads, page_size=page_size,
            device=device, **cache_configs(kind),
        )  # fmt: skip
        new = torch.randn(batch, kv_heads, 1, dim).to(device, torch.bfloat16)
        self.k, self.v = new, new.clone()
        self.q = torch.randn(batch, heads, 1, dim).to(device, torch.bfloat16)
        prompt = torch.randn(batch, kv_heads, PROMPT, dim).to(device, torch.bfloat16)
        self.buffers = [x for stream in self.layer.streams.values() for x in stream.buffers]
        for x in self.buffers:
            x.zero_()
        self.layer.append(prompt, prompt, will_attend=False)
        self.rope, self.angles = rope, torch.randn(2, batch, 1, dim).to(device, torch.bfloat16)
        given = (self.k, self.v, self.q, self.layer.seq_lens, *self.angles, *self.results.values())
        self.held = {x.data_ptr(): f"held {i}" for i, x in enumerate((*self.buffers, *given))}
        self()  # makes the plans of one token

    def __call__(self) -> Tensor:
        """Appends a token and attends: (B, H_q, 1, D)."""
        k, q, rope = self.k, self.q, None
        if self.rope == "before":
            q, k = rotary_op.call(q, k, *self.angles)
        elif self.rope == "with":
            rope = self.rope_of(q, *self.angles)
        self.layer.append(k, self.v, rope=rope)
        turned = q if rope is None else rope.out
        attend: Callable[..., Tensor] = self.layer.attend
        if not self.results:
            return attend(turned, **self.options)
        with sharing.shared(self.results):
            return attend(turned, **self.options)

    @property
    def plans(self) -> dict[str, Any]:
        """The layer's plans by op."""
        return {name[0]: plan for name, plan in self.layer.plans._plans.items()}

    def launches(self) -> list[Any]:
        """The launches of a step, as the driver gets them."""
        Launcher.launched = []
        self()
        found, Launcher.launched = Launcher.launched, None
        return described(found, self.held)

    def effect(self) -> list[Tensor]:
        """The output of a step and all buffers after it, as bytes."""
        out = self()
        return [x.contiguous().view(torch.uint8).cpu() for x in (out, *self.buffers)]

    def always_first(self) -> None:
        """Makes every step from now on run as a first call."""
        for plan in self.plans.values():
            plan.replay = None

    def calls(self) -> int:
        """Number of Python functions a step calls."""
        count = 0

        def note(_frame: FrameType, event: str, _: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        self()
        sys.setprofile(None)
        return count

    def microseconds(self) -> float:
        """Microseconds of a step; shortening the cache in between is not counted."""
        least = float("inf")
        for _ in range(ROUNDS):
            self.layer.truncate(PROMPT)
            self()
            self()
            least = min(least, microseconds(self, 100, 1))
        return least


def fresh(kind: str, device: str, **options: Any) -> Step:
    """A new step; the same arguments give the same numbers."""
    torch.manual_seed(0)
    return Step(kind, device, **options)


def differing(kind: str, device: str, **options: Any) -> list[int]:
    """Which results of a repeated step differ from those of a first call: 0 is the output, others the buffers."""
    repeated, first = (fresh(kind, device, **options) for _ in range(2))
    first.always_first()
    pairs = zip(repeated.effect(), first.effect(), strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


def row(kind: str, device: str, **options: Any) -> dict[str, Any]:
    """Figures of one case; launches are compared where none is real."""
    found: dict[str, Any] = {}
    if device != "cpu":
        wrong = differing(kind, device, **options)
        found |= {"same": not wrong, **({"differing": wrong} if wrong else {})}
    step = fresh(kind, device, **options)
    found["kept"] = sorted(name for name, plan in step.plans.items() if plan.replay)
    if device == "cpu":
        first = fresh(kind, device, **options)
        first.always_first()
        launched = step.launches()
        found |= {"same": launched == first.launches(), "launches": len(launched)}
    found |= {"repeated_us": round(step.microseconds(), 1), "calls": step.calls()}
    step.always_first()
    return {**found, "first_us": round(step.microseconds(), 1)}


PROMPT, ROUNDS = 200, 7
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp16": ("fp16", {}), "q8": ("q8", {}), "q4": ("q4", {}), "nf4": ("nf4", {}), "q4:plain": ("q4:plain", {}),
    "q8:plain, rotated": ("q8:plain,rotate", {}), "q8, paged": ("q8", {"page_size": 64}),
    "q4, RoPE before": ("q4", {"rope": "before"}), "q4, RoPE with it": ("q4", {"rope": "with"}),
    "q8, 8 rows": ("q8", {"batch": 8}), "q4, 8 rows, balanced": ("q4", {"batch": 8, "num_splits": -1}),
    "q4, 8 rows, balanced, behind": ("q4", {"batch": 8, "num_splits": -1, "behind": True}),
}  # fmt: skip


def compared(cases: Sequence[str]) -> int:
    """Prints the differences in each case; returns 1 if there are any."""
    wrong = {name: differing(CASES[name][0], "cuda", **CASES[name][1]) for name in cases}
    for name, found in wrong.items():
        print(f"{name}: {f'results {found} of a repeated step differ' if found else 'same'}")
    return int(any(wrong.values()))


Stages = dict[str, Callable[[Any, dict[str, Any]], Any]]


def with_stages(change: Callable[[Stages], None], name: str) -> None:
    """Changes the stages of Triton's compiler in this process; ``name`` tells what it makes from real kernels."""

    def hook(_backend: Any = None, stages: Stages | None = None, *_: Any) -> tuple[str, str] | None:
        if stages is None:
            return name, name
        change(stages)
        return None

    triton.knobs.runtime.add_stages_inspection_hook = hook
    # Triton 3.6 has no such name in the keys of its cache.
    triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / name)


def only_named(stages: Stages) -> None:
    """For kernels that are launched and never run: compilation ends with Triton's own IR."""

    def unmade(source: Any, metadata: dict[str, Any]) -> bytes:
        sizes = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
        aligned = ("global_scratch_align", "profile_scratch_align")
        metadata |= dict.fromkeys(sizes, 0) | dict.fromkeys(aligned, 1)
        named = re.search(r"tt\.func public @(\w+)", str(source))
        assert named is not None, "the kernel has no name"
        metadata |= {"name": named[1], "tensordesc_meta": []}
        return b""

    for name in [name for name in stages if name != "ttir"]:
        del stages[name]
    stages["cubin"] = unmade


def stand_in(*, compiled: bool = False) -> None:
    """Replaces Triton's driver by the stand-in in this process.

    ``compiled``: to the end, for those who ask what shared memory a kernel takes.
    """
    triton.runtime.driver.set_active(StandIn())
    if not compiled:
        with_stages(only_named, "only-named")
    registry._forced = "triton"
    for op in registry._ops.values():
        serves = op.why_not("triton", "cuda", suppose=True) is None
        registry._routes[op.name] = {"cpu": op.launcher if serves else op.reference}
        op.call = op.__call__


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.kernels.host_time", description=__doc__
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shard", type=Shard.parse, metavar="I/N",
                        help="with a GPU: compare every N-th case, which compiles it, and end")  # fmt: skip
    given = parser.parse_args(argv)
    if given.shard is not None:
        return compared(given.shard.of(given.cases))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        stand_in()
    x = torch.zeros(1, device=device)
    empty_kernel[(1,)](x, n=1)
    torch.manual_seed(0)
    cases = {name: row(CASES[name][0], device, **CASES[name][1]) for name in given.cases}
    found = {
        "empty_us": round(microseconds(lambda: empty_kernel[(1,)](x, n=1)), 1),
        "cases": cases,
        **environment(torch.device(device)),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        write_text(given.out, text + "\n")
    return 0 if all(case["same"] and case["kept"] for case in cases.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
