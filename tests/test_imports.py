"""Importing costs what it says, and every public name is there."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import caramba_fast

HEAVY = ("transformers", "triton", "sympy")
LAZY = (*HEAVY, "pydantic", "typer", "rich", "safetensors", "tokenizers", "filelock", "yaml")
PACKAGES = (
    "cache", "config", "distributed", "formats", "infer", "models", "ops", "policy", "quality", "serve"
)  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """Top-level modules of a fresh interpreter after ``statement``."""
    listing = "print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    code = f"import sys, json\n{statement}\n{listing}"
    root = str(Path(caramba_fast.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def torch_alone() -> set[str]:
    return loaded_by("import torch")


def test_importing_the_package_loads_nothing() -> None:
    assert not loaded_by("import caramba_fast") & {"torch", "numpy", *LAZY}


def test_the_command_line_loads_torch_with_a_command_alone() -> None:
    loaded = loaded_by("import caramba_fast.cli.app, typer.rich_utils")
    assert not loaded & {"torch", "numpy", "pydantic", "transformers", "tokenizers", "yaml"}


def test_importing_the_layers_loads_nothing_heavy(torch_alone: set[str]) -> None:
    statement = "\n".join(f"import caramba_fast.{package}" for package in PACKAGES)
    loaded = loaded_by(statement)
    assert not loaded & (set(HEAVY) - torch_alone)
    assert not loaded & ({"typer", "tokenizers", "rich"} - torch_alone)


def test_generating_loads_nothing_heavy(torch_alone: set[str]) -> None:
    """Not even torch's compiler, which sympy stands for: torch would import it to initialise weights without memory."""
    statement = (
        "import caramba_fast\n"
        "from caramba_fast.models import demo_path, load\n"
        "caramba_fast.generate(load(demo_path()), [[1, 2]], 3, cache_kind='q4')"
    )
    assert not loaded_by(statement) & (set(HEAVY) - torch_alone)


@pytest.mark.parametrize("name", caramba_fast.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(caramba_fast, name) is not None
    assert name in dir(caramba_fast)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_layer_resolves(package: str) -> None:
    module = importlib.import_module(f"caramba_fast.{package}")
    assert getattr(caramba_fast, package) is module
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None


def test_a_star_import_brings_every_public_name() -> None:
    namespace: dict[str, object] = {}
    exec("from caramba_fast import *", namespace)
    assert set(caramba_fast.__all__) <= set(namespace)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("infer", ["Generator", "GenerateConfig", "generate"]),
        ("cache", ["LayerKVCache"]),
        ("config.kvcache", ["KVCacheKind", "KVCacheTensorConfig"]),
    ],
)
def test_the_documented_paths_give_the_same_objects(module: str, names: list[str]) -> None:
    for name in names:
        found = getattr(importlib.import_module(f"caramba_fast.{module}"), name)
        assert getattr(caramba_fast, name) is found


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"caramba_fast.*no attribute 'nothing'"):
        _ = caramba_fast.nothing
    assert not hasattr(caramba_fast, "nothing")
    with pytest.raises(ImportError):
        exec("from caramba_fast import nothing")


UNASKED = """
import torch
def asked(name):
    def ask(*_, **__):
        raise AssertionError(f"torch.cuda.{name} was called by an import")
    return ask
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_properties",
             "get_device_capability"):
    setattr(torch.cuda, name, asked(name))
torch._C._cuda_getDeviceCount = asked("_C._cuda_getDeviceCount")
import caramba_fast, caramba_fast.ops, caramba_fast.cache, caramba_fast.infer
print(torch._C._dispatch_has_kernel_for_dispatch_key("caramba_fast::decode_attention", "CUDA"))
"""


def test_importing_never_asks_for_a_cuda_device() -> None:
    """A process that asked cannot fork workers that use CUDA; the kernels are registered all the same."""
    done = subprocess.run(
        [sys.executable, "-c", UNASKED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(importlib.util.find_spec("triton") is not None)


def test_a_setuptools_that_cannot_read_pyproject_is_named() -> None:
    """As Python 3.10 and 3.11 put into a new environment, where some torch take it as it is."""
    code = (
        "import runpy, setuptools, sys; setuptools.__version__ = '65.5.0'; "
        "sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py', run_name='__main__')"
    )
    root = Path(__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1 and found.stderr.strip().endswith(
        "setuptools is 65.5.0 and pyproject.toml needs 77 or newer: pip install 'setuptools>=77'"
    )
