"""The stand-ins for CUDA graphs refuse what a graph refuses, or would leave out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.recorder import Recorder, Rerun

X = torch.arange(6.0)
#: What a step must not do while it is recorded.
WAITS: dict[str, Callable[[], object]] = {
    "_local_scalar_dense": lambda: X.sum().item(),
    "tolist": X.tolist,
    "cpu": X.cpu,
    "numpy": X.numpy,
    "nonzero": X.nonzero,
    "index": lambda: X[X > 2],
    "masked_select": lambda: X.masked_select(X > 2),
    "lift_fresh": lambda: torch.tensor([1.0]),
    "add over cpu and meta": lambda: torch.empty(6, device="meta").add(X),
}
#: What differs with the number of the replay.
CHANGES: dict[str, Callable[[int], object]] = {
    "another op": lambda n: X + 1 if n == 0 else X * 1,
    "another number": lambda n: X + n,
    "another shape": lambda n: X[: 4 + min(n, 1)] * 2,
    "another tensor": lambda n: torch.empty(6).add(X) if n == 0 else X.add(torch.zeros(6)),
    "a tensor from elsewhere": lambda n: X + OTHERS[n],
    "one more": lambda n: [X + 1 for _ in range(n + 1)],
}
OTHERS = [torch.zeros(6) for _ in range(4)]


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("kind", [Recorder, Rerun])
def test_what_makes_the_host_wait_is_refused(name: str, kind: type[Recorder]) -> None:
    with pytest.raises(RuntimeError, match=f"{name}.*: operation not permitted"):
        kind().record(WAITS[name])


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_from_what_was_recorded_is_refused(name: str) -> None:
    count = iter(range(4))
    replay = Rerun().record(lambda: CHANGES[name](next(count)))
    with pytest.raises(RuntimeError, match="recorded"):
        replay()


def test_what_stays_is_done_again() -> None:
    total = torch.zeros(6)
    replay = Rerun().record(lambda: total.add_(X * 2))
    assert total.sum() == 0
    replay()
    replay()
    assert torch.equal(total, X * 4)
