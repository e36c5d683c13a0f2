"""What the compiler makes of our kernels, run without a GPU: the PTX for sm_80, by an emulator of one CTA.

It finds what the interpreter cannot: wrong layouts, races, memory that is read before it is written, addresses out of
bounds. Codes, scales and rotations have to be the reference's bits; attention is as near to float64 as on any device.
Kernels are compiled, so a process of its own runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.compiled_cases import CASES, DAMAGED

TESTS = Path(__file__).resolve().parents[1]
#: Where `make test` puts the oldest Triton that is supported, and what it is tried on: it lays registers out otherwise.
OLDEST = TESTS.parent / "build" / "triton-oldest"
ATTENTION = [
    case
    for case in CASES
    if case.startswith(("decode", "decoupled")) and "T 8" not in case and "long loop" not in case
]


def run(*cases: str, path: tuple[Path, ...] = ()) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*path, TESTS)))
    command = [sys.executable, "-m", "support.compiled_cases", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports: dict[str, str] = json.loads(done.stdout)
    return reports


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run()


@pytest.fixture(scope="module")
def found_with_the_oldest() -> dict[str, str]:
    assert (OLDEST / "triton").is_dir(), f"make {OLDEST}/.done"
    return run(*ATTENTION, path=(OLDEST,))


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_that_the_oldest_triton_compiles_is_right(found_with_the_oldest, case):
    assert found_with_the_oldest[case] == ""


@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_give_the_results_of_the_reference(found, case):
    assert found[case] == ""


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_to_the_code_is_found(found, damage):
    """Otherwise the emulator would see nothing wrong with anything."""
    assert DAMAGED[damage][2] in found[damage]
