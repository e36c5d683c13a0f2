"""Nothing is compiled in the middle of a generation: however a cache grows, one variant of each kernel serves it.

On a GPU a variant takes seconds to compile. What would be compiled is counted without one, in a process of its own, for
here the kernels are interpreted (specializations.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def counts() -> dict[tuple[str, str], dict[str, int]]:
    """(options, scenario) -> kernel -> variants."""
    tests = str(Path(__file__).parents[1])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "support.specializations"]
    done = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, str], dict[str, int]] = {}
    for line in done.stdout.splitlines():
        options, scenario, kernel, count = line.split()
        found.setdefault((options, scenario), {})[kernel] = int(count)
    return found


@pytest.mark.parametrize("scenario", ["growing", "batches"])
@pytest.mark.parametrize("options", ["plain", "paged", "all", "channel"])
def test_one_variant_of_each_kernel_serves_every_length_and_batch(counts, options, scenario):
    """Caches from 128 to 131,072 slots, and up to 17 rows."""
    prepares = options == "all"
    found = {"prepare_kernel": int(prepares), "merge_kernel": 1, "append_kernel": 1}
    by_shape = {"partials_kernel": 1, "schedule_kernel": 0, "balanced_kernel": 0}
    balanced = {"partials_kernel": 0, "schedule_kernel": 1, "balanced_kernel": 1}
    assert counts[options, scenario] == {**found, **by_shape}
    assert counts[options, f"{scenario}-balanced"] == {**found, **balanced}


@pytest.mark.parametrize("options", ["plain", "paged", "all"])
def test_one_variant_of_each_kernel_serves_every_prompt(counts, options):
    """Of 65 to 2,048 tokens, on prefixes up to 32,768."""
    assert counts[options, "prompts"] == {
        "prepare_kernel": int(options == "all"), "partials_kernel": 1, "merge_kernel": 1, "append_kernel": 0,
        "schedule_kernel": 0, "balanced_kernel": 0,
    }  # fmt: skip
