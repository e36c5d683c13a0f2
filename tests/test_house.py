"""The house stands: what lies where, and what it may not shadow."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from caramba_fast.ops.registry import _ops

ROOT = Path(__file__).resolve().parent.parent

BESIDE = """
import kernels, transformers
import caramba_fast.kernels, caramba_fast.bench
assert hasattr(kernels, "get_kernel"), kernels
assert kernels.__file__ != caramba_fast.kernels.__file__
"""


def test_kernels_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("folder", [ROOT, Path("/")])
def test_hugging_faces_kernels_package_is_found_beside_ours(folder):
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_one_op_is_one_stem():
    for name in _ops:
        stem = name.rstrip("_").removeprefix("decoupled_")
        files = {path.stem for path in (ROOT / "caramba_fast" / "ops").glob("*.py")}
        assert {stem, f"decoupled_{stem}"} & files, name


def test_every_dependency_has_a_lower_bound():
    """Without one, pip keeps a version that is too old for us and says nothing."""
    text = (ROOT / "pyproject.toml").read_text()
    project = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    named = re.findall(r'"((?!caramba-fast\[)[A-Za-z][^"]*)"', project)
    assert len(named) > 12 and [name for name in named if ">=" not in name] == []
