"""RankGroup: the ranks that share a cache or a model, over a process group of `torch.distributed`.

Gloo between CPUs, NCCL between GPUs: whatever the process group was made with. It counts what it is given to move,
and says which rank is gone where one is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from caramba_fast.distributed.liveness import INTERVAL, Heartbeat, RankLostError, seconds

#: Seconds a rank may keep the others waiting.
TIMEOUT = 60.0
_made: dict[str, int] = {}
#: torch 2.13 has given it another name.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class Traffic:
    """What collectives have moved.

    Attributes:
        collectives: how many there were.
        given: bytes this rank gave to them.
        received: bytes that came from other ranks.
    """

    collectives: int = 0
    given: int = 0
    received: int = 0

    def add(self, given: int, received: int) -> None:
        """One more collective."""
        self.collectives += 1
        self.given += given
        self.received += received


class RankGroup:
    """This rank and its peers.

    Args:
        process_group: of `torch.distributed`; by default all ranks.
        timeout: seconds (or a timedelta) that a collective on the CPU, or a peer at the start, may take.
        heartbeat: seconds (or a timedelta) between signs of life; a rank that misses six is gone.

    Attributes:
        rank, size: this rank, and how many there are.
        traffic: what was moved so far.

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
        self._heart: Heartbeat | None = None
        if self.size > 1:
            abort = getattr(self.process_group, "abort", None) if self.backend == "nccl" else None
            self._heart = Heartbeat(self._store(), self.rank, self.size, self.timeout, abort, beat)
            self._closing = weakref.finalize(self, self._heart.stop)

    def _store(self) -> Any:
        """Keys of this group, through a connection of their own."""
        ranks = ",".join(map(str, dist.get_process_group_ranks(self.process_group)))
        # Groups are made together: the number is the same on every rank.
        number = _made[ranks] = _made.get(ranks, 0) + 1
        default: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(f"caramba_fast/{ranks}/{number}", default.clone())

    def all_gather(self, x: Tensor) -> Tensor:
        """What every rank gives, (size, *x.shape), in the order of the ranks.

        Args:
            x: (N, ...), of one shape and dtype on all ranks.

        Raises:
            RankLostError: a rank is gone; it is named.
            RuntimeError: the collective failed though all ranks are alive, such as when one is late.
        """
        if self.size == 1:
            return x[None]
        x = x.contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        with self.guarded():
            work = _all_gather(gathered.flatten(0, 1), x, self.process_group, async_op=True)
            if x.device.type == "cpu":
                work.wait(timedelta(seconds=self.timeout))
            else:  # the stream waits, the host goes on
                work.wait()
        self.traffic.add(x.nbytes, (self.size - 1) * x.nbytes)
        return gathered

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within it, a collective that fails because a rank is gone raises RankLostError."""
        if self._heart is not None and self._heart.lost:
            raise self._loss(self._heart.lost)
        try:
            yield
        except RankLostError:
            raise
        except RuntimeError as error:
            lost = self._heart.find_lost() if self._heart is not None else []
            if lost:
                raise self._loss(lost) from error
            raise
        if self._heart is not None and self._heart.lost:  # an aborted communicator raises nothing
            raise self._loss(self._heart.lost)

    def _loss(self, ranks: list[int]) -> RankLostError:
        assert self._heart is not None
        why = f"no sign of life for {self._heart.patience:g} s; what it held is lost, start again without it"
        return RankLostError(ranks, self.size, why)

    def close(self) -> None:
        """Ends the signs of life; the process group stays."""
        if self._heart is not None:
            self._closing()
