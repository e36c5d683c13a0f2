"""What `torch.distributed` leaves open about its collectives: how long one may take, and whether an error is one's.

`RankGroup` sits on it; on its part it knows nothing of ranks that are gone.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: torch 2.13 has given it another name.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
#: Every collective called from Python passes through one of them, those of DTensor through the second.
MODULES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
#: Here the second runs whatever op comes behind a collective.
DISPATCH = "__torch_dispatch__"


def from_collective(error: RuntimeError) -> bool:
    """Whether a collective raised it, rather than the computation between two of them.

    Gloo raises plain RuntimeErrors, so it is the place that tells, not the type.
    """
    if isinstance(error, dist.DistError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_globals.get("__name__") in MODULES and frame.f_code.co_name != DISPATCH
        for frame in frames
    )


def gloo_backends(process_group: Any) -> list[Any]:
    """Those of the group's backends that wait in the host, one for each sort of device."""
    if not dist.is_gloo_available():
        return []
    found = [process_group._get_backend(device) for device in process_group._device_types]
    return [backend for backend in found if isinstance(backend, dist.ProcessGroupGloo)]


@contextmanager
def limited(backends: list[Any], timeout: float) -> Iterator[None]:
    """Within it, whoever starts a collective of gloo, it waits for a peer ``timeout`` seconds at most.

    Collectives inside a model, such as DTensor's, take no timeout of their own: they go by the backend's.
    """
    before = [backend.options._timeout for backend in backends]
    for backend in backends:
        backend._set_default_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        for backend, known in zip(backends, before, strict=True):
            backend._set_default_timeout(known)
