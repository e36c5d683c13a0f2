"""Rows of bench/kernels/registry.py as pytest-benchmark entries: ``make bench-rows [DEVICE=cuda] [GRID=quick]``.

Not collected by ``make test``. On CUDA a call is timed with its launch and the wait for its end; graph replay, peers in
the same rounds and shares of bandwidth are what ``make bench`` has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from caramba_fast.bench.kernels.measure import UNQUANTIZED
from caramba_fast.bench.kernels.registry import ATTENTION, Case, cases
from caramba_fast.bench.kernels.timing import threads
from caramba_fast.bench.kernels.workloads import Workload, workload

pytest.importorskip("pytest_benchmark")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--device")
    listed = cases(os.environ.get("GRID", "quick"), device)
    pairs = [
        (case, name)
        for case in listed
        for name in (*case.kinds, *(UNQUANTIZED if case.op in ATTENTION else ()))
    ]
    ids = [f"{case.name}-{name}".replace(" ", "-") for case, name in pairs]
    metafunc.parametrize(("case", "name"), pairs, ids=ids, scope="module")


@pytest.fixture(scope="module")
def _threads(case: Case) -> Iterator[None]:
    with threads(case.threads):
        yield


@pytest.fixture(scope="module")
def work(case: Case, device: torch.device, _threads: None) -> Workload:
    """The inputs, shared by everything that is timed on a case."""
    return workload(case, device)


def test_row(case: Case, name: str, work: Workload, device: torch.device, benchmark) -> None:
    entries = {entry.kind: entry for entry in work.ours} | {peer.name: peer for peer in work.peers}
    if name not in entries:
        pytest.skip(work.absent.get(name, f"{name} is not for {device.type} or this case"))
    if name in work.errors:
        found, allowed = work.errors[name]()
        assert found <= allowed
    call = entries[name].calls[0]

    def finished() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    benchmark.group = case.name
    benchmark.extra_info["bytes"] = entries[name].moved
    benchmark(finished)
