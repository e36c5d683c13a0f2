"""The tests of the C++ kernels once more for every narrower instruction set; the widest is the one used unforced."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.isas import expected_isas, in_subprocess

FILES = (
    "extension",
    "cpp_attention",
    "cpp_bounds",
    "cpp_extremes",
    "causal_attention",
    "by_channel",
)


@pytest.mark.parametrize("isa", expected_isas()[:-1])
def test_every_instruction_set(isa):
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in FILES]
    options = ("-q", "-p", "no:cacheprovider", "-k", "extension or cpp")
    result = in_subprocess(isa, "-m", "pytest", *options, *files)
    assert result.returncode == 0, result.stdout + result.stderr
