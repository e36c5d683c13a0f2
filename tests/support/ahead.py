"""Compares what a GPU would compile for the cases of a grid with what `run --compile-only` compiles ahead.

Run by tests/bench/test_run.py in a process where kernels are not interpreted, but replaced by objects that look up
compiled code. Prints for each case its name, the number of look-ups, and those that were not compiled ahead.
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
#: Limits of rows and tokens, which do not affect compilation.
MOST_ROWS, MOST_TOKENS = 3, 8192


def reduced(case: Case) -> Case:
    """The case with rows and tokens limited."""
    tokens = min(case.kv, MOST_TOKENS + case.kv % 4096)
    return replace(
        case, batch=min(case.batch, MOST_ROWS), kv=tokens, short=min(case.short, 1024), goal=""
    )


def keys(case: Case) -> set[str]:
    """Kernel and key of every look-up of compiled code in a case's calls."""
    noted = specializations.noted()
    for entry in workload(case, CPU, fill=False).ours:
        entry.calls[0]()
    return {f"{name} {key}" for name, found in noted.items() for key in found.found}


def main() -> None:
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
