"""Counts what a GPU would compile: run by test_specializations.py where the kernels are not interpreted.

Kernels are replaced by objects that do what Triton does up to the look-up of compiled code. Prints for each scenario
its name, the kernel, and the number of keys it would have been compiled under.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from support import cases
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from caramba_fast.kernels import append, balanced_launch, splits, splits_launch
from caramba_fast.ops import registry, use_backend

TARGET = GPUTarget("cuda", 90, 32)
PLACES = {
    "prepare_kernel": splits_launch, "partials_kernel": splits_launch, "merge_kernel": splits_launch,
    "schedule_kernel": balanced_launch, "balanced_kernel": balanced_launch, "append_kernel": append,
}  # fmt: skip
KERNELS = {(module, name): getattr(module, name) for name, module in PLACES.items()}


class Keys:
    """Stands in for a kernel: records the key under which each launch looks for compiled code, runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.found: set[str] = set()
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(TARGET)
        )

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            _, specialization, rest = self._bind(*args, **options)
            self.found.add(f"{specialization} {rest}")

        return launch


def noted() -> dict[str, Keys]:
    """Every kernel of a decode step, replaced."""
    found = {}
    for (module, name), kernel in KERNELS.items():
        found[name] = Keys(kernel)
        setattr(module, name, found[name])
    return found


def step(
    options: tuple[str, ...],
    batch: int,
    slots: int,
    kinds: tuple[str, ...] = ("q4_0", "q8_0"),
    num_splits: int = 0,
) -> None:
    """One decode step of a cache of ``slots`` slots: launches depend on shapes alone."""
    lengths = [slots - 1 - b % 7 for b in range(batch)]
    case = cases.build(
        options, dims={"k": 64, "v": 64}, kinds=kinds, lengths=[9] * batch, slots=slots, ring=32,
    )  # fmt: skip
    args, keywords = case.flat_append()
    args[4:6] = [x[:, :, :1].contiguous() for x in args[4:6]]
    keywords.pop("query_lens")
    registry._ops["append_"].launcher(*args, **keywords)
    case.lengths = lengths
    args, keywords = case.flat()
    keywords["num_splits"] = num_splits
    registry._ops["decode_attention"].launcher(*args, **keywords)


def prompt(options: tuple[str, ...], tokens: int, slots: int) -> None:
    """A prompt of ``tokens`` on a prefix that fills a cache of ``slots`` slots."""
    case = cases.build(
        options, dims={"k": 64, "v": 64}, kinds=("q4_0", "q8_0"), lengths=[9], slots=slots, tokens=tokens,
        ring=6 + tokens,
    )  # fmt: skip
    case.lengths = [slots - 1]
    args, keywords = case.flat()
    registry._ops["extend_attention"].launcher(*args, **keywords)


OPTIONS = {
    "plain": (), "paged": ("pages", "leftpad"), "all": (
        "tail", "sinks", "rotate_k", "rotate_v", "s_aux", "window_with_sinks",
    ),
    "channel": ("sinks", "rotate_v"),
}  # fmt: skip


def main() -> None:
    splits.ASSUMED_PROCESSORS = 132
    sizes = [128, 384, 1024, 1152, 4096, 8320, 32768, 131072]
    scenarios = {
        "growing": [(1, size) for size in sizes],
        "batches": [(batch, 1024) for batch in (1, 2, 3, 8, 16, 17)],
    }
    for name, options in OPTIONS.items():
        kinds = [("q4_channel", "q4_0")] if name == "channel" else []
        for scenario, shapes in scenarios.items():
            keys = noted()
            for batch, slots in shapes:
                step(options, batch, slots, *kinds)
            told(name, scenario, keys)
            keys = noted()
            for batch, slots in shapes:
                step(options, batch, slots, *(kinds or [("q4_0", "q8_0")]), num_splits=-1)
            told(name, f"{scenario}-balanced", keys)
        keys = noted()
        if kinds == []:
            for tokens, slots in (
                (65, 1024),
                (100, 4096),
                (512, 32768),
                (1000, 1152),
                (2048, 8320),
            ):
                prompt(options, tokens, slots)
            told(name, "prompts", keys)


def told(name: str, scenario: str, keys: dict[str, Keys]) -> None:
    """Prints the number of variants of each kernel."""
    for kernel, found in keys.items():
        print(name, scenario, kernel, len(found.found))
        if "-v" in sys.argv:
            print(*sorted(found.found), sep="\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    use_backend("reference")
    main()
