"""RankGroup: the ranks that share a cache or a model, over a process group of `torch.distributed`.

It counts the bytes moved, limits how long a collective may take, and names the rank that is lost if one is.
"""

from __future__ import annotations

import hashlib
import os
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from caramba_fast.distributed.heartbeat import INTERVAL, Heartbeat, RankLostError, StoreHolder

#: torch 2.13 renamed it.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
#: Every collective called from Python passes through one of these modules, those of DTensor through the second.
MODULES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
#: A function of the second module that runs ops after a collective, which are not collectives.
DISPATCH = "__torch_dispatch__"


def from_collective(error: RuntimeError) -> bool:
    """Whether a collective raised ``error``; by its traceback, because Gloo raises plain RuntimeErrors."""
    if isinstance(error, dist.DistError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_globals.get("__name__") in MODULES and frame.f_code.co_name != DISPATCH
        for frame in frames
    )


def gloo_backends(process_group: Any) -> list[Any]:
    """The group's gloo backends, one per device type."""
    if not dist.is_gloo_available():
        return []
    found = [process_group._get_backend(device) for device in process_group._device_types]
    return [backend for backend in found if isinstance(backend, dist.ProcessGroupGloo)]


@contextmanager
def limited(backends: list[Any], timeout: float) -> Iterator[None]:
    """Context in which every gloo collective waits at most ``timeout`` seconds for a peer.

    Collectives inside a model, such as DTensor's, take no timeout argument and use the backend's.
    """
    before = [backend.options._timeout for backend in backends]
    for backend in backends:
        backend._set_default_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        for backend, known in zip(backends, before, strict=True):
            backend._set_default_timeout(known)


def seconds(name: str, given: float | timedelta) -> float:
    """``given`` in seconds; raises ValueError unless it is positive."""
    value = given.total_seconds() if isinstance(given, timedelta) else float(given)
    if not value > 0:
        raise ValueError(f"{name} is {given}; a positive number of seconds is needed")
    return value


#: Default timeout of a collective, in seconds.
TIMEOUT = 60.0
#: Size of every message of `RankGroup.gather_on_host`, so that ranks in different calls find out; 8 describe the rest.
HOST_BYTES = 2048
#: Global rank whose process hosts the store, unless torchrun does.
STORE_RANK = 0
#: Number of groups made so far by their ranks, by the group of all ranks.
_made: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


@dataclass
class Traffic:
    """Data moved by `RankGroup.all_gather`: number of calls, bytes this rank gave, bytes received from other ranks."""

    collectives: int = 0
    given: int = 0
    received: int = 0

    def add(self, given: int, received: int) -> None:
        """Counts one collective."""
        self.collectives += 1
        self.given += given
        self.received += received


class RankGroup:
    """This rank and its peers.

    Args:
        process_group: of `torch.distributed`; by default all ranks.
        timeout: seconds (or a timedelta) that a gloo collective waits for a peer, and that this waits for all ranks at
            the start; NCCL collectives use the timeout of the process group.
        heartbeat: seconds (or a timedelta) between heartbeats; a rank that misses six is lost.

    Attributes:
        rank, size: this rank, and the number of ranks.
        traffic: data moved by `all_gather` so far; `gather_on_host` and collectives within a model are not counted.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError: this process is not in the group, or a timeout that is not positive.
        RankLostError: a peer does not show up within the timeout.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float | timedelta = TIMEOUT,
        heartbeat: float | timedelta = INTERVAL,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group first "
                "(under torchrun it needs the backend alone: 'gloo' for CPUs, 'nccl' for GPUs)"
            )
        self.process_group: Any = process_group or dist.group.WORLD
        self.rank = dist.get_rank(self.process_group)
        self.size = dist.get_world_size(self.process_group)
        if self.rank < 0:
            raise ValueError("this process is not in process_group")
        self.timeout, self.traffic = seconds("timeout", timeout), Traffic()
        beat = seconds("heartbeat", heartbeat)
        self.backend: str = dist.get_backend(self.process_group)
        self._gloo = gloo_backends(self.process_group)
        self._heart: Heartbeat | None = None
        self._host: Any = None  # a gloo group of the same ranks, for `gather_on_host`
        if self.size > 1:
            abort = getattr(self.process_group, "abort", None) if self.backend == "nccl" else None
            store = self._store()
            self._heart = Heartbeat(
                store, self._holder(), self.rank, self.size, self.timeout, abort, beat
            )
            self._closing = weakref.finalize(self, self._heart.stop)
            # `dist.new_group` needs all ranks of the process, and those of this group alone are here.
            host = distributed_c10d.PrefixStore("host", store.clone())
            within = timedelta(seconds=max(self.timeout, TIMEOUT))
            self._host = dist.ProcessGroupGloo(host, self.rank, self.size, within)
            self._host._set_default_timeout(timedelta(seconds=self.timeout))

    def _store(self) -> Any:
        """A store with keys of this group alone, over a connection of its own."""
        ranks = ",".join(map(str, dist.get_process_group_ranks(self.process_group)))
        # All ranks create their groups in the same order, so the number is the same on every rank; a process that
        # replaces a lost one counts from 1, and so do the others after `destroy_process_group`.
        made = _made.setdefault(dist.group.WORLD, {})
        number = made[ranks] = made.get(ranks, 0) + 1
        default: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(f"caramba_fast/{ranks}/{number}", default.clone())

    def _holder(self) -> StoreHolder:
        """The process that hosts the store, which all groups share."""
        process = "the process that holds the store of torch.distributed"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return StoreHolder(None, f"{process} (torchrun)")
        members = dist.get_process_group_ranks(self.process_group)
        rank = members.index(STORE_RANK) if STORE_RANK in members else None
        return StoreHolder(rank, f"{process} (global rank {STORE_RANK}, not in this group)")

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather of x (N, ...), of the same shape and dtype on all ranks -> (size, N, ...), in rank order.

        Raises:
            RankLostError: a rank is lost; the message names it.
            RuntimeError: the collective failed though all ranks are alive, for example because one is late.
        """
        if self.size == 1:
            return x[None]
        x = x.contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        with self.guarded():
            all_gather(gathered.flatten(0, 1), x, self.process_group)
        self.traffic.add(x.nbytes, (self.size - 1) * x.nbytes)
        return gathered

    def gather_on_host(self, x: Tensor) -> Tensor:
        """All-gather of x (N, ...) on the CPU, as `all_gather`, apart from the collectives of a model.

        A rank that is still waiting in one of these cannot take this one for it. RuntimeError, on every rank, if one
        gathers something of another shape or dtype, in another call.
        """
        if self._heart is None:
            return x[None]
        self._check()
        kind = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode()).digest()[:8]
        data = kind + x.contiguous().numpy().tobytes()
        if len(data) > HOST_BYTES:
            raise ValueError(f"x has {x.nbytes} bytes; up to {HOST_BYTES - 8} are allowed")
        mine = torch.frombuffer(bytearray(data.ljust(HOST_BYTES, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._host.allgather([gathered], [mine]).wait()
        except RuntimeError as error:
            loss = self._heart.find_loss()
            raise (loss or error) from error
        if any(not torch.equal(other[:8], mine[:8]) for other in gathered):
            raise RuntimeError("the ranks are in different calls; each has to make the same ones")
        return torch.stack([y[8 : len(data)].view(x.dtype).view(x.shape) for y in gathered])

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Context whose body, without collectives, has to succeed on every rank; else it raises on every rank."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        call = list(hashlib.sha256(what.encode()).digest()[:8])
        mine = torch.tensor([*call, failure is not None], dtype=torch.uint8, device="cpu")
        try:
            found = self.gather_on_host(mine)
        except RankLostError:
            raise
        except RuntimeError as error:
            raise failure or RuntimeError(f"not all ranks have come to {what}") from error
        if failure is not None:
            raise failure
        if not torch.equal(found[:, :8], mine[:8].expand(self.size, 8)):
            raise RuntimeError(f"not all ranks are at {what}; each has to make the same calls")
        failed = found[:, 8].nonzero().flatten().tolist()
        if failed:
            raise RuntimeError(f"rank {failed[0]} of {self.size} failed at {what}, so all do")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context in which a collective that fails because a rank is lost raises RankLostError.

        Gloo collectives, including those inside a model, get ``timeout`` seconds; other errors propagate at once.
        """
        self._check()
        try:
            with limited(self._gloo, self.timeout):
                yield
        except RankLostError:
            raise
        except RuntimeError as error:
            heart = self._heart if from_collective(error) else None
            loss = heart.find_loss() if heart is not None else None
            if loss is not None:
                raise loss from error
            raise
        self._check()  # an aborted communicator raises nothing

    def _check(self) -> None:
        loss = self._heart.loss if self._heart is not None else None
        if loss is not None:
            raise loss

    def close(self) -> None:
        """Stops the heartbeat; the process group stays open."""
        if self._heart is not None:
            self._closing()
