"""Options and fixtures shared by all tests.

On the CPU, Triton kernels run in the interpreter; its variable must be set before triton is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from support.interpreter import patch_the_language_once

#: Files that take longest, each with few tests. They come first, so that at the end no process is left with one alone.
LONG = (
    "bench/test_gpu_check.py", "bench/test_real_decode.py", "distributed/test_ranks.py", "hf/test_compile.py",
    "hf/test_static_cache.py", "hf/test_upstream.py", "infer/test_compiled.py", "models/test_demo_model.py",
    "ops/test_cpp_attention.py", "cli/test_streams.py",
)  # fmt: skip
KINDS = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "nf4")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda", "mps"), help="where to run")


def pytest_configure(config: pytest.Config) -> None:
    # Inductor keys its cache by op name, so the user's cache may have code compiled for an older schema.
    folder = tempfile.TemporaryDirectory(
        prefix="caramba-fast-inductor-", ignore_cleanup_errors=True
    )
    config.add_cleanup(folder.cleanup)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
    config.addinivalue_line("markers", "device: compares ops with the oracle on --device")
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        if importlib.util.find_spec("triton"):
            patch_the_language_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


def pytest_collection_finish() -> None:
    """Thousands of tests and all libraries stay to the end: without them a full collection of garbage is short."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    """Extension modules report what is left at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") == "cpu":
        # torch.manual_seed would also note its caller for every absent device.
        torch.default_generator.manual_seed(0)
    else:
        torch.manual_seed(0)
    torch.set_grad_enabled(True)  # an interrupted test may have left it off


@pytest.fixture
def on_reference() -> Iterator[None]:
    """Runs a test on the reference backend, for exact comparisons: faster backends round differently."""
    from caramba_fast.ops import use_backend

    with use_backend("reference"):
        yield


@pytest.fixture
def python_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps have loops in C++, called from Python: compiling the calls too takes longer than all else."""
    from caramba_fast.infer import compiled

    ours = compiled._inductor

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with ours(), torch._inductor.config.patch(cpp_wrapper=False):
            yield

    monkeypatch.setattr(compiled, "_inductor", settings)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param
