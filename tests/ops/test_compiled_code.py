"""What the compiler makes of our kernels, run without a GPU: the PTX for sm_80, by an emulator of one CTA.

It finds what the interpreter cannot: wrong layouts, races, memory that is read before it is written, addresses out of
bounds. Codes, scales and rotations have to be the reference's bits; attention is as near to float64 as on any device.
Kernels are compiled, so a process of its own runs them. All cases were run when kernels, emulator or Triton last
changed (`make emulate`); a part of them, and every damage, is run again.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from support import emulated
from support.compiled_cases import CASES, DAMAGED

#: Of the cases, one part in so many is run again.
PARTS = 4
SAMPLE = int(emulated.wanted()["sources"], 16) % PARTS
AGAIN, WITH_THE_OLDEST = [*CASES][SAMPLE::PARTS], emulated.ATTENTION[SAMPLE::PARTS]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return emulated.ended(emulated.started(*AGAIN, *DAMAGED))


@pytest.fixture(scope="module")
def found_with_the_oldest() -> dict[str, str]:
    assert (emulated.OLDEST / "triton").is_dir(), f"make {emulated.OLDEST}/.done"
    return emulated.ended(emulated.started(*WITH_THE_OLDEST, path=(emulated.OLDEST,)))


def test_the_record_is_of_these_kernels() -> None:
    """Every case, with the oldest Triton those of attention, and of these sources."""
    recorded = json.loads(emulated.RECORD.read_text("utf-8"))
    assert recorded == emulated.wanted(), (
        "kernels, the emulator or Triton changed since bench/results/emulated.json was made: make emulate"
    )


@pytest.mark.parametrize("case", WITH_THE_OLDEST)
def test_attention_that_the_oldest_triton_compiles_is_right(found_with_the_oldest, case):
    assert found_with_the_oldest[case] == ""


@pytest.mark.parametrize("case", AGAIN)
def test_compiled_kernels_give_the_results_of_the_reference(found, case):
    assert found[case] == ""


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_to_the_code_is_found(found, damage):
    """Otherwise the emulator would see nothing wrong with anything."""
    assert DAMAGED[damage][2] in found[damage]
