"""Heartbeat: every rank shows that it lives, so that one that died can be named.

A collective that fails says that a connection is closed or that time is up, not whose fault it is. Beside the work, a
thread of each rank counts up a key of its own in the store of `torch.distributed` and looks at those of the others; a
count that has stopped is a rank that is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

#: Seconds between two signs of life, and how many may be missing.
INTERVAL, MISSED = 0.5, 6
VERDICT = "verdict"
#: Holds the store where torchrun does not.
STORE_RANK = 0


class RankLostError(RuntimeError):
    """A rank is gone, and with it the pages or heads it held.

    Attributes:
        ranks: those that are gone, as ranks of the group.
    """

    def __init__(self, ranks: Sequence[int], size: int, why: str) -> None:
        self.ranks = list(ranks)
        named = ", ".join(map(str, ranks))
        many = "ranks" if len(ranks) > 1 else "rank"
        super().__init__(f"{many} {named} of {size} gone: {why}")


class Heartbeat:
    """Signs of life of one rank, and what is known of the others'.

    Nobody is found to be gone unless somebody asks (`find_lost`), or ``on_loss`` is given: a rank that is only slow
    may take its time.

    Args:
        store: a `torch.distributed.Store` with keys of this group alone, and a connection of its own: a thread uses it.
        rank, size: of the group.
        timeout: seconds to wait for the others to come.
        on_loss: called once, from the thread, as soon as a rank is gone.
        interval: seconds between two signs.

    Raises:
        RankLostError: a rank has not come in time.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        on_loss: Callable[[], None] | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self.rank, self.size, self.interval = rank, size, interval
        self._store, self._on_loss = store, on_loss
        self._others = [other for other in range(size) if other != rank]
        self._count, self._lost, self._asked = 0, set[int](), False
        self._stop = threading.Event()
        self._await_all(timeout)
        self._latest = dict.fromkeys(self._others, "")
        self._missed = dict.fromkeys(self._others, 0)  # looks in a row that found nothing new
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> list[int]:
        """Ranks found to be gone."""
        return sorted(self._lost)

    @property
    def patience(self) -> float:
        """Seconds without a sign after which a rank is gone."""
        return self.interval * MISSED

    def find_lost(self) -> list[int]:
        """Ranks that are gone, after waiting as long as it takes to know; empty if all are alive."""
        self._asked = True
        until = time.monotonic() + self.patience + 2 * self.interval
        while not self._lost and time.monotonic() < until:
            time.sleep(self.interval / 4)
        self._asked = False
        return self.lost

    def stop(self) -> None:
        """No more signs of life."""
        self._stop.set()
        self._thread.join(timeout=self.patience)

    def _await_all(self, timeout: float) -> None:
        self._beat()
        until, missing = time.monotonic() + timeout, list(self._others)
        while missing:
            missing = [other for other in missing if not self._store.check([str(other)])]
            if missing and time.monotonic() > until:
                raise RankLostError(missing, self.size, f"no sign of life in {timeout:g} s")
            time.sleep(0.01 if missing else 0)

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._beat()
                self._look()
            except RuntimeError:  # the store is gone, and with it the rank that holds it
                self._note({STORE_RANK} - {self.rank})
                return

    def _beat(self) -> None:
        self._count += 1
        self._store.set(str(self.rank), str(self._count))

    def _look(self) -> None:
        for other in self._others:
            sign = self._store.get(str(other)).decode()
            self._missed[other] = self._missed[other] + 1 if sign == self._latest[other] else 0
            self._latest[other] = sign
        if self._store.check([VERDICT]):
            known = self._store.get(VERDICT).decode()
            self._note({int(rank) for rank in known.split(",")} - {self.rank})
        silent = {other for other, looks in self._missed.items() if looks >= MISSED}
        if silent and not self._lost and (self._asked or self._on_loss is not None):
            self._store.set(VERDICT, ",".join(map(str, sorted(silent))))
            self._note(silent)

    def _note(self, ranks: set[int]) -> None:
        """The first finding stands: ranks that leave because of it are not gone themselves."""
        if self._lost or not ranks:
            return
        self._lost = ranks
        if self._on_loss is not None:
            self._on_loss()


def seconds(name: str, given: float | timedelta) -> float:
    """``given`` in seconds; raises ValueError unless it is positive."""
    value = given.total_seconds() if isinstance(given, timedelta) else float(given)
    if not value > 0:
        raise ValueError(f"{name} is {given}; a positive number of seconds is needed")
    return value
