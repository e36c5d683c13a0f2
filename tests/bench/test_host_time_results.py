"""On a GPU `host_time` compares what a repeated step leaves with what a first one does; here C++ repeats its calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from caramba_fast.ops.registry import load_error

pytest.importorskip("triton")

from caramba_fast.bench.kernels import host_time

pytestmark = pytest.mark.skipif(load_error() is not None, reason=str(load_error()))


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("case", host_time.CASES)
def test_a_repeated_step_leaves_what_a_first_one_does(case: str) -> None:
    kind, options = host_time.CASES[case]
    step = host_time.fresh(kind, "cpu", **options)
    assert all(plan.replay for plan in step.plans.values())
    step.microseconds()  # what is timed moves on, and is not what is compared
    assert host_time.differing(kind, "cpu", **options) == []


@pytest.mark.parametrize("case", ["q8", "q4", "fp16"])
def test_what_a_repeated_step_does_otherwise_is_told(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = host_time.CASES[case]
    step_once = host_time.Step.__call__

    def otherwise(step: host_time.Step) -> torch.Tensor:
        out = step_once(step)
        if all(plan.replay for plan in step.plans.values()):
            out[0, 3, 0, 7] += 1
            step.layer.v.codes.view(torch.uint8)[0, 0, host_time.PROMPT + 1, 5] += 1
        return out

    monkeypatch.setattr(host_time.Step, "__call__", otherwise)
    step = host_time.fresh(kind, "cpu", **options)
    places = [i for i, x in enumerate(step.buffers, 1) if x is step.layer.v.codes]
    assert host_time.differing(kind, "cpu", **options) == [0, *places]
