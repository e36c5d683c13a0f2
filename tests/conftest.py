"""Options and fixtures every test shares.

On the CPU the Triton kernels run interpreted; the variable has to be set before triton is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

KINDS = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "nf4")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda", "mps"), help="where to run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param
