"""What a GPU would compile for the cases of a grid, and for those that `run --compile-only` calls in their place.

Run by tests/bench/test_run.py in a process where kernels are not interpreted. Kernels are replaced by what looks for
compiled code. Prints a line for each case: its name, how many kernels it looked for, and those that would not have been
compiled ahead.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from support import specializations

from caramba_fast.bench.kernels import host_time
from caramba_fast.bench.kernels.registry import Case, cases
from caramba_fast.bench.kernels.run import smallest
from caramba_fast.bench.kernels.workloads import workload
from caramba_fast.kernels import dequantize, quantize, splits

CPU = torch.device("cpu")
#: Rows and tokens that stand for all.
MOST_ROWS, MOST_TOKENS = 3, 8192


def reduced(case: Case) -> Case:
    """The case with as many rows and tokens as fit here."""
    tokens = min(case.kv, MOST_TOKENS + case.kv % 4096)
    return replace(
        case, batch=min(case.batch, MOST_ROWS), kv=tokens, short=min(case.short, 1024), goal=""
    )


def keys(case: Case) -> set[str]:
    """Kernel and key of everything that calls of a case look for."""
    noted = specializations.noted()
    for entry in workload(case, CPU, fill=False).ours:
        entry.calls[0]()
    return {f"{name} {key}" for name, found in noted.items() for key in found.found}


def main() -> None:
    """Every case once, whatever its batch and its length are."""
    host_time.stand_in()
    splits.ASSUMED_PROCESSORS = 132
    for module, name in ((quantize, "quantize_kernel"), (dequantize, "dequantize_kernel")):
        specializations.KERNELS[module, name] = getattr(module, name)
    for case in dict.fromkeys(map(reduced, cases("core", "cuda"))):
        looked_for = keys(case)
        missing = looked_for - keys(smallest(case))
        print(case.name, "|", len(looked_for), "|", *sorted(missing))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
