"""The record of what the emulator ran: ``make emulate`` runs all cases with both Tritons, then writes it.

Compiled kernels change with their sources, the emulator and Triton alone, and all cases take minutes, so
tests/ops/test_compiled_code.py runs a part of them again, which one the sources say.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.compiled_cases import CASES

from caramba_fast.bench.kernels import aot

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
RECORD = ROOT / "bench" / "results" / "emulated.json"
#: Where `make test` puts the oldest Triton that is supported, and what it is tried on: it lays registers out otherwise.
OLDEST = ROOT / "build" / "triton-oldest"
ATTENTION = [
    case
    for case in CASES
    if case.startswith(("decode", "decoupled")) and "T 8" not in case and "long loop" not in case
]
#: What results depend on, beside Triton.
SOURCES = (*aot.SOURCES, "tests/support/ptx_*.py", "tests/support/compiled_cases.py")


def pinned(constraints: str) -> str:
    """The version of Triton that a file of constraints has."""
    found = re.search(r"^triton==(\S+)$", (ROOT / constraints).read_text("utf-8"), re.MULTILINE)
    assert found, constraints
    return found[1]


def wanted() -> dict[str, object]:
    """What a record that is up to date says."""
    return {
        "sources": aot.sources(SOURCES),
        "right": {pinned("constraints.txt"): [*CASES], pinned("constraints-oldest.txt"): ATTENTION},
    }


def started(*cases: str, path: tuple[Path, ...] = ()) -> subprocess.Popen[str]:
    """Runs cases in a process of its own, where kernels are compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*path, TESTS)))
    command = [sys.executable, "-m", "support.compiled_cases", *cases]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> dict[str, str]:
    """The fault found in each case; "" where there is none."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    reports: dict[str, str] = json.loads(out)
    return reports


def main() -> int:
    """Writes the record; 1, and nothing written, if some case is wrong."""
    processes = [started(*CASES), started(*ATTENTION, path=(OLDEST,))]
    wrong = [f"{name}: {fault}" for one in processes for name, fault in ended(one).items() if fault]
    print(*wrong, sep="\n", file=sys.stderr)
    if not wrong:
        RECORD.write_text(json.dumps(wanted(), indent=1) + "\n", "utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
