"""Heartbeat: detects which rank was lost.

A failed collective does not report which rank caused it. A background thread of each rank therefore increments its own
key in the `torch.distributed` store and reads those of the others; a rank whose count has stopped is lost. The store
itself is in a process, usually that of global rank 0. If that process is killed, the connection breaks; if it only
hangs, store calls never return, whatever their timeout, so a second thread watches the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: Seconds between heartbeats, and how many a rank must miss to be lost.
INTERVAL, MISSED = 0.5, 6
VERDICT = "verdict"
#: Missed heartbeats in a row after which a rank is suspected, if the store is gone and no more can be read.
SUSPECT = 2


class RankLostError(RuntimeError):
    """A rank is lost, and with it the pages or heads it held.

    Attributes:
        ranks: the lost ranks, numbered within the group; empty if the process that hosts the store is lost and no rank
            of the group runs in it.
        certain: whether all of ``ranks`` are lost; False if one of them is, but it is unknown which.
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
    """The process that hosts the store: its rank in the group or, if it has none (None), its name in messages."""

    rank: int | None
    name: str


class Heartbeat:
    """Heartbeats of one rank, and what it knows of the others.

    A rank is declared lost only when `find_loss` is called, the store breaks, or ``on_loss`` is given, so that a slow
    rank does no harm.

    Args:
        store: a `torch.distributed.Store` with keys of this group alone and its own connection, for use by a thread.
        holder: the process that hosts the store.
        rank, size: this rank in the group, and the number of ranks.
        timeout: seconds to wait for the other ranks at the start.
        on_loss: called once, from a thread, as soon as a rank or the store is lost.
        interval: seconds between heartbeats.

    Raises:
        RankLostError: a rank did not start in time, or the store does not answer.
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
        self._lost: set[int] | None = None  # empty: the store's process is lost
        self._why = f"no sign of life for {self.patience:g} s"
        self._certain = True
        self._all_know = threading.Event()  # all other live ranks know of the loss
        self._absent, self._answers = others, 0
        self._latest = dict.fromkeys(others, "")
        self._missed = dict.fromkeys(others, 0)  # reads in a row with an unchanged count
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
        """Seconds without a heartbeat after which a rank is lost."""
        return self.interval * MISSED

    @property
    def loss(self) -> RankLostError | None:
        """The ranks already found to be lost, as an error to raise; None if there are none."""
        if self._lost is None:
            return None
        why = f"{self._why}; what it held is lost, start again without it"
        return RankLostError(
            sorted(self._lost), self.size, why, self._holder.name, certain=self._certain
        )

    def find_loss(self) -> RankLostError | None:
        """The lost ranks, after waiting as long as it takes to know; None if all are alive.

        The process that hosts the store also waits until the other ranks know: a rank that finds the store closed
        cannot tell whether that process was lost first or exited because of another loss.
        """
        self._asked = True
        until = time.monotonic() + self.patience + 2 * self.interval
        while self._lost is None and time.monotonic() < until:
            time.sleep(self.interval / 4)
        self._asked = False
        if self._lost is not None and self._holder.rank == self.rank:
            self._all_know.wait(self.patience)
        return self.loss

    def stop(self) -> None:
        """Stops the heartbeat."""
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
        """The ranks lost with the store: one or none."""
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
        """Watches whether the first thread gets answers from the store."""
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
        """Announces that this rank knows of the loss, and checks whether the others do."""
        self._store.set(f"knows {self.rank}", "1")
        living = [f"knows {other}" for other in self._latest if other not in lost]
        if not living or self._store.check(living):
            self._all_know.set()

    def _to_judge(self) -> bool:
        return self._asked or self._on_loss is not None

    def _silent(self) -> set[int]:
        return {other for other, looks in self._missed.items() if looks >= MISSED}

    def _note_break(self) -> None:
        silent = self._silent()
        if silent and self._to_judge():  # the store's process exited because of them
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
        """Records a loss. Only the first counts: ranks that exit because of it are not lost themselves."""
        with self._lock:
            if self._lost is not None:
                return
            self._why, self._certain = why or self._why, certain
            self._lost = ranks
        if self._on_loss is not None:
            self._on_loss()
