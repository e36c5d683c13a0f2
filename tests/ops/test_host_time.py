"""A decode step on a GPU repeats what its plan has launched: the same launches, through few calls of Python.

Kernels are compiled and a stand-in for the driver takes the launches, in a process of its own, for here they are
interpreted. `caramba_fast.bench.kernels.host_time` measures times with it; they are no test.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from caramba_fast import sharing
from caramba_fast.cache import LayerKVCache
from caramba_fast.kernels import launch
from caramba_fast.ops import use_backend

CASES = (
    "q8",
    "q4",
    "q4, RoPE before",
    "q4, RoPE with it",
    "q8:plain, rotated",
    "q8, paged",
    "q8, 8 rows",
    "q4, 8 rows, balanced",
    "q4, 8 rows, balanced, behind",
)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    if torch.cuda.is_available():
        pytest.skip("the stand-in is for machines without a GPU")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "caramba_fast.bench.kernels.host_time", "--cases", *CASES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_step_launches_the_same(measured: dict[str, Any], case: str) -> None:
    found = measured["cases"][case]
    assert found["kept"] == ["append_", "decode_attention"]
    balanced = "balanced" in case and "behind" not in case  # a schedule is the first layer's matter
    more = "rotated" in case or balanced or "before" in case
    assert found["same"] and found["launches"] == (4 if more else 3)


@pytest.mark.parametrize("case", [case for case in CASES if "paged" not in case])
def test_a_repeated_step_calls_few_functions(measured: dict[str, Any], case: str) -> None:
    """Eighty of append and attend together; the first way takes some two hundred and fifty. RoPE is twenty more."""
    assert measured["cases"][case]["calls"] <= (105 if "RoPE" in case else 85)


# -- what a recording is worth ----------------------------------------------------------------


class Kernel:
    """Stands in for a compiled kernel and what compiles it."""

    pre_run_hooks = ()

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.signature = inspect.signature(lambda x, pair, n: None)

    def __getitem__(self, grid: Sequence[int]) -> Any:
        def run(*args: Any, **_: Any) -> Kernel:
            self.given.append((tuple(grid), *args))
            return self

        return run


def record(
    kernel: Kernel, x: torch.Tensor, other: torch.Tensor, fixed: Sequence[torch.Tensor] = ()
) -> Any:
    with launch.recording() as found:
        out = launch.made(x, (3,), torch.float32)
        launch.start(kernel, (5,), x, (7, other, (other, out)), n=2)
        launch.returned(out)
    return found.replay((x, other), fixed)


def test_other_tensors_go_where_the_recorded_ones_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    kernel, (x, other) = Kernel(), torch.zeros(2, 4)
    replay, (a, b) = record(kernel, x, other), torch.ones(2, 4)
    (out,) = replay((a, b))
    assert out.shape == (3,) and out.dtype == torch.float32
    grid, first, (seven, second, (third, last)), n = kernel.given[-1]
    assert (grid, seven, n) == ((5, 1, 1), 7, 2)
    assert first is a and second is b and third is b and last is out
    (again,) = replay((a, b))
    assert again is not out
    assert not any(isinstance(x, torch.Tensor) for x in launch._tensors(replay._launches[0][1]))


def test_other_strides_or_alignment_are_not_the_same_call() -> None:
    kernel, (x, other) = Kernel(), torch.zeros(2, 4)
    replay = record(kernel, x, other)
    count = len(kernel.given)
    assert replay((torch.zeros(8)[::2], other)) is None
    assert replay((x, torch.zeros(5)[1:])) is None
    assert len(kernel.given) == count


def test_a_copy_that_a_launcher_made_is_not_repeated() -> None:
    kernel, (x, other) = Kernel(), torch.zeros(2, 4)
    with launch.recording() as found:
        launch.start(kernel, (5,), x, (7, other.clone()), n=2)
        launch.returned()
    assert found.replay((x, other), ()) is None
    assert record(kernel, x, other) is not None


def test_one_tensor_in_two_places_is_not_repeated() -> None:
    """Keys that were values as well may be others in the next call: nothing says which place was whose."""
    x, other = torch.zeros(2, 4)
    assert record(Kernel(), x, x) is None
    assert record(Kernel(), x, other, fixed=[other]) is None
    assert record(Kernel(), x, other) is not None


def test_what_one_call_leaves_the_next_ones_find(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    kernel, (x, other) = Kernel(), torch.zeros(2, 4)

    def recorded() -> Any:
        with launch.recording() as found:
            part = launch.once("schedule", lambda: launch.made(x, (2,)))
            launch.start(kernel, (5,), x, (part, other), n=2)
            launch.returned()
        return found.replay((x, other), ())

    with sharing.shared({}):
        first, second = recorded(), recorded()
    assert second((x, other)) is None, "nobody has left anything"
    with sharing.shared({}):
        assert second((x, other)) is None
        assert first((x, other)) == ()
        left = kernel.given[-1][2][0]
        assert second((x, other)) == ()
        assert kernel.given[-1][2][0] is left
    assert first((x, other)) == () and kernel.given[-1][2][0] is not left
    assert sharing.results() is None


def test_a_launcher_that_does_not_say_it_is_done_is_not_repeated() -> None:
    kernel, (x, other) = Kernel(), torch.zeros(2, 4)
    with launch.recording() as found:
        launch.start(kernel, (5,), x, (7, other), n=2)
    assert found.replay((x, other), ()) is None


def test_a_kernel_that_somebody_listens_to_is_not_repeated() -> None:
    kernel, (x, other) = Kernel(), torch.zeros(2, 4)
    kernel.pre_run_hooks = (print,)  # type: ignore[assignment]
    assert record(kernel, x, other) is None


class Asked(list[Any]):
    """Notes calls in place of a replay: of launches, or of a call that the extension keeps."""

    direct: Any = None

    def __call__(self, inputs: Any) -> None:
        self.append(inputs)


@pytest.mark.parametrize("kept", ["launches", "call"])
def test_another_backend_and_autograd_get_the_op_itself(kept: str) -> None:
    layer = LayerKVCache(1, 64, 32, 32)
    x = torch.randn(1, 1, 1, 32)
    layer.append(x, x)
    layer.attend(x)
    plan = next(p for name, p in layer.plans._plans.items() if name[0] == "decode_attention")
    asked = plan.replay = Asked()
    if kept == "call":
        asked.direct = lambda *given: (
            asked.append(given)
            or plan.op.call(given[0], *plan.stored, *given[1:], *plan.kinds, **plan.stated)
        )
    layer.attend(x)
    assert len(asked) == 1
    with torch.enable_grad():
        layer.attend(x.clone().requires_grad_())
    with use_backend("reference"):
        layer.attend(x)
    assert len(asked) == 1
