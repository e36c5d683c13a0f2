"""RankGroup: the ranks that share a cache or a model, over a process group of `torch.distributed`.

Gloo between CPUs, NCCL between GPUs: whatever the process group was made with. It counts what it is given to move,
and says which rank is gone where one is.

What `torch.distributed` leaves open about its collectives: how long one may take, and whether an error is one's.

`RankGroup` sits on it; on its part it knows nothing of ranks that are gone.

Heartbeat: every rank shows that it lives, so that one that died can be named.

A collective that fails says that a connection is closed or that time is up, not whose fault it is. Beside the work, a
thread of each rank counts up a key of its own in the store of `torch.distributed` and looks at those of the others; a
count that has stopped is a rank that is gone. The store is in some process too, mostly that of global rank 0. When that
is killed the connection breaks; when it is only stuck, no call returns, with whatever timeout, so a second thread
watches the first.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

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


#: Seconds between two signs of life, and how many may be missing.
INTERVAL, MISSED = 0.5, 6
VERDICT = "verdict"
#: Looks in a row without a sign from which a rank is suspected, where no more can be had.
SUSPECT = 2


class RankLostError(RuntimeError):
    """A rank is gone, and with it the pages or heads it held.

    Attributes:
        ranks: those that are gone, as ranks of the group; none if it is the process with the store that is gone,
            and no rank of the group runs in it.
        certain: whether all of ``ranks`` are gone; False where one of them is, and which cannot be known.
    """

    def __init__(
        self, ranks: Sequence[int], size: int, why: str, other: str = "", *, certain: bool = True
    ) -> None:
        self.ranks, self.certain = list(ranks), certain or len(ranks) < 2
        many = "ranks" if len(ranks) > 1 else "rank"
        named = f"{many} {', '.join(map(str, ranks))} of {size}" if ranks else other
        super().__init__(
            f"{named} gone: {why}" if self.certain else f"one of {named} is gone: {why}"
        )


@dataclass(frozen=True)
class StoreHolder:
    """The process that holds the store.

    Attributes:
        rank: its rank in the group, None if it has none.
        name: what to call it then.
    """

    rank: int | None
    name: str


class Heartbeat:
    """Signs of life of one rank, and what is known of the others'.

    Nobody is found to be gone unless somebody asks (`find_loss`), the store breaks, or ``on_loss`` is given: a rank
    that is only slow may take its time.

    Args:
        store: a `torch.distributed.Store` with keys of this group alone, and a connection of its own: a thread uses it.
        holder: of the store.
        rank, size: of the group.
        timeout: seconds to wait for the others to come.
        on_loss: called once, from a thread, as soon as a rank or the store is gone.
        interval: seconds between two signs.

    Raises:
        RankLostError: a rank has not come in time, or the store does not answer.
    """

    def __init__(
        self,
        store: Any,
        holder: StoreHolder,
        rank: int,
        size: int,
        timeout: float,
        on_loss: Callable[[], None] | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self.rank, self.size, self.interval = rank, size, interval
        self._store, self._holder, self._on_loss = store, holder, on_loss
        others = [other for other in range(size) if other != rank]
        self._count, self._asked, self._lock = 0, False, threading.Lock()
        self._lost: set[int] | None = None  # nobody in it: the store's process is gone
        self._why = f"no sign of life for {self.patience:g} s"
        self._certain = True
        self._told = threading.Event()  # all others that live know of the loss
        self._absent, self._answers = others, 0
        self._latest = dict.fromkeys(others, "")
        self._missed = dict.fromkeys(others, 0)  # looks in a row that found nothing new
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"heartbeat{target.__name__}", daemon=True)
            for target in (self._run, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        self._await_all(timeout)

    @property
    def patience(self) -> float:
        """Seconds without a sign after which a rank is gone."""
        return self.interval * MISSED

    @property
    def loss(self) -> RankLostError | None:
        """The ranks found to be gone, as an error to raise."""
        if self._lost is None:
            return None
        why = f"{self._why}; what it held is lost, start again without it"
        return RankLostError(
            sorted(self._lost), self.size, why, self._holder.name, certain=self._certain
        )

    def find_loss(self) -> RankLostError | None:
        """The ranks that are gone, after waiting as long as it takes to know; None if all are alive.

        The process with the store waits until the others know as well: who finds the store closed cannot tell
        whether its process is the cause, or has left because of another.
        """
        self._asked = True
        until = time.monotonic() + self.patience + 2 * self.interval
        while self._lost is None and time.monotonic() < until:
            time.sleep(self.interval / 4)
        self._asked = False
        if self._lost is not None and self._holder.rank == self.rank:
            self._told.wait(self.patience)
        return self.loss

    def stop(self) -> None:
        """No more signs of life."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=self.patience)

    def _await_all(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self._absent:
            loss = self.loss
            if loss is None and time.monotonic() > until:
                unanswered = not self._answers and self._holder.rank != self.rank
                missing = self._held_by() if unanswered else self._absent
                why = f"no sign of life in {timeout:g} s"
                loss = RankLostError(sorted(missing), self.size, why, self._holder.name)
            if loss is not None:
                self._stop.set()
                raise loss
            time.sleep(0.01)

    def _held_by(self) -> set[int]:
        """The ranks that go with the store: one or none."""
        return set() if self._holder.rank is None else {self._holder.rank}

    def _run(self) -> None:
        try:
            self._beat()
            while self._absent and not self._stop.wait(0.01):
                self._absent = [o for o in self._absent if not self._store.check([str(o)])]
                self._answers += 1
            while not self._stop.wait(self.interval):
                self._beat()
                self._look()
                self._answers += 1
        except RuntimeError:  # the connection to the store has broken
            self._note_break()

    def _watch(self) -> None:
        """Looks whether the first thread gets answers."""
        known, missed = -1, 0
        while not self._stop.wait(self.interval):
            missed = missed + 1 if self._answers == known else 0
            known = self._answers
            if missed >= MISSED and self._to_judge():
                self._note_store(self._why)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(str(self.rank), str(self._count))

    def _look(self) -> None:
        for other in self._missed:
            sign = self._store.get(str(other)).decode()
            self._missed[other] = self._missed[other] + 1 if sign == self._latest[other] else 0
            self._latest[other] = sign
        if self._store.check([VERDICT]):
            known = {int(rank) for rank in self._store.get(VERDICT).decode().split(",")}
            if known != {self.rank}:
                self._note(known - {self.rank})
                self._spread(known)
        silent = self._silent()
        if silent and self._lost is None and self._to_judge():
            self._store.set(VERDICT, ",".join(map(str, sorted(silent))))
            self._note(silent)
            self._spread(silent)

    def _spread(self, lost: set[int]) -> None:
        """Says that this rank knows, and looks whether the others do."""
        self._store.set(f"told {self.rank}", "1")
        living = [f"told {other}" for other in self._latest if other not in lost]
        if not living or self._store.check(living):
            self._told.set()

    def _to_judge(self) -> bool:
        return self._asked or self._on_loss is not None

    def _silent(self) -> set[int]:
        return {other for other, looks in self._missed.items() if looks >= MISSED}

    def _note_break(self) -> None:
        silent = self._silent()
        if silent and self._to_judge():  # the store's process has left because of them
            self._note(silent)
            return
        suspects = {other for other, looks in self._missed.items() if looks >= SUSPECT}
        suspects -= self._held_by()
        if suspects and self._holder.rank not in (None, self.rank) and not self._stop.is_set():
            self._note(suspects | self._held_by(), "the store is closed", certain=False)
        else:
            self._note_store("its store is closed")

    def _note_store(self, why: str) -> None:
        if self._holder.rank != self.rank and not self._stop.is_set():
            self._note(self._held_by(), why)

    def _note(self, ranks: set[int], why: str | None = None, *, certain: bool = True) -> None:
        """The first finding stands: ranks that leave because of it are not gone themselves."""
        with self._lock:
            if self._lost is not None:
                return
            self._why, self._certain = why or self._why, certain
            self._lost = ranks
        if self._on_loss is not None:
            self._on_loss()


def seconds(name: str, given: float | timedelta) -> float:
    """``given`` in seconds; raises ValueError unless it is positive."""
    value = given.total_seconds() if isinstance(given, timedelta) else float(given)
    if not value > 0:
        raise ValueError(f"{name} is {given}; a positive number of seconds is needed")
    return value


#: Seconds a rank may keep the others waiting.
TIMEOUT = 60.0
#: Its process holds the store, where torchrun does not.
STORE_RANK = 0
_made: dict[str, int] = {}


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
        timeout: seconds (or a timedelta) that a collective over gloo waits for a peer, also at the start; NCCL's go by
            the timeout of the process group.
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
        self._gloo = gloo_backends(self.process_group)
        self._heart: Heartbeat | None = None
        if self.size > 1:
            abort = getattr(self.process_group, "abort", None) if self.backend == "nccl" else None
            self._heart = Heartbeat(
                self._store(), self._holder(), self.rank, self.size, self.timeout, abort, beat
            )
            self._closing = weakref.finalize(self, self._heart.stop)

    def _store(self) -> Any:
        """Keys of this group, through a connection of their own."""
        ranks = ",".join(map(str, dist.get_process_group_ranks(self.process_group)))
        # Groups are made together: the number is the same on every rank.
        number = _made[ranks] = _made.get(ranks, 0) + 1
        default: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(f"caramba_fast/{ranks}/{number}", default.clone())

    def _holder(self) -> StoreHolder:
        """Who holds the store, which is not of this group but of all."""
        process = "the process that holds the store of torch.distributed"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return StoreHolder(None, f"{process} (torchrun)")
        members = dist.get_process_group_ranks(self.process_group)
        rank = members.index(STORE_RANK) if STORE_RANK in members else None
        return StoreHolder(rank, f"{process} (global rank {STORE_RANK}, not in this group)")

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
            all_gather(gathered.flatten(0, 1), x, self.process_group)
        self.traffic.add(x.nbytes, (self.size - 1) * x.nbytes)
        return gathered

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within it, a collective that fails because a rank is gone raises RankLostError.

        Collectives over gloo, also those inside a model, have ``timeout`` seconds; other errors pass at once.
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
        """Ends the signs of life; the process group stays."""
        if self._heart is not None:
            self._closing()
