"""The load of `serve`: fixed requests, the clients that send them, and the resulting figures.

Prompts are stretches of held-out text of 16 to 512 tokens, uniformly distributed; answers have 64 tokens on average,
geometrically distributed, 512 at most. In a closed loop a fixed number of clients send their next request when the
last one is answered; in an open loop requests arrive at random (Poisson).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from caramba_fast.bench.kernels.timing import quantile

SHORTEST, LONGEST = 16, 512
MEAN_NEW, MOST_NEW = 64, 512
CONCURRENCY = 16
SEED = 0
#: Tokens of the longest possible request.
FULL = LONGEST + MOST_NEW


@dataclass(frozen=True)
class Item:
    """A request: its prompt, and the number of tokens to generate."""

    prompt: list[int]
    new_tokens: int


def supply(text: Sequence[int], seed: int = SEED) -> Iterator[Item]:
    """Endless requests, the same ones for the same seed; ValueError if the text is shorter than the longest prompt."""
    if len(text) < LONGEST:
        raise ValueError(f"the text has {len(text)} tokens; {LONGEST} or more are needed")
    rng = np.random.default_rng(seed)
    while True:
        length = int(rng.integers(SHORTEST, LONGEST + 1))
        start = int(rng.integers(0, len(text) - length + 1))
        new = min(int(rng.geometric(1 / MEAN_NEW)), MOST_NEW)
        yield Item(list(text[start : start + length]), new)


def load(text: Sequence[int], count: int, seed: int = SEED) -> list[Item]:
    """The first ``count`` requests of `supply`."""
    return list(islice(supply(text, seed), count))


def arrivals(count: int, rate: float, seed: int = SEED) -> list[float]:
    """Arrival times of requests of an open loop in seconds: Poisson, ``rate`` a second."""
    return np.random.default_rng(seed + 1).exponential(1 / rate, count).cumsum().tolist()


@dataclass
class Record:
    """The outcome of one request, in times of ``time.perf_counter``.

    Attributes:
        arrived: when its client sent it.
        started: when the system began with it.
        tokens: when each of its tokens was there.
    """

    arrived: float
    started: float | None = None
    tokens: list[float] = field(default_factory=list)


@dataclass
class Run:
    """One run of one system with one load.

    ``began`` is when the first request could be sent; ``preemptions`` is None if the system does not tell.
    """

    records: list[Record]
    began: float
    preemptions: int | None = None

    @property
    def seconds(self) -> float:
        """From the beginning to the very last token."""
        return max(record.tokens[-1] for record in self.records) - self.began

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(len(record.tokens) for record in self.records)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Requests answered a second."""
        return len(self.records) / self.seconds

    @property
    def full_requests_per_s(self) -> float:
        """Requests answered a second until the last one was sent, while all clients of a closed loop wait."""
        last = max(record.arrived for record in self.records)
        early = sum(record.tokens[-1] <= last for record in self.records)
        return early / (last - self.began) if early else self.requests_per_s

    @property
    def running(self) -> float:
        """Average number of concurrent requests."""
        held = sum(r.tokens[-1] - (r.started or r.arrived) for r in self.records)
        return held / self.seconds

    def ttft(self) -> list[float]:
        """Seconds from each request to its first token."""
        return [r.tokens[0] - r.arrived for r in self.records]

    def queue(self) -> list[float]:
        """Seconds each request waited before the system began with it."""
        return [r.started - r.arrived for r in self.records if r.started is not None]

    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens of a request."""
        return [
            b - a
            for r in self.records
            for a, b in zip(r.tokens, r.tokens[1:], strict=False)
        ]  # fmt: skip


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return quantile(values, 0.5), quantile(values, 0.99)


class Clients:
    """Sends the requests and receives the tokens.

    ``times`` are the seconds at which ``items`` arrive in an open loop; None for a closed one with ``places`` clients.
    """

    def __init__(
        self,
        items: Sequence[Item],
        times: Sequence[float] | None = None,
        places: int = CONCURRENCY,
    ) -> None:
        self.items, self._times = items, times
        self.records: list[Record] = []
        self.done = 0
        self.began = time.perf_counter()
        self._free = [self.began] * places

    @property
    def is_over(self) -> bool:
        """Whether every request is answered."""
        return self.done == len(self.items)

    @property
    def next_s(self) -> float | None:
        """Seconds until the next request of an open loop; None if no more arrive by themselves."""
        if self._times is None or len(self.records) == len(self.items):
            return None
        due = self.began + self._times[len(self.records)]
        return max(0.0, due - time.perf_counter())

    def due(self) -> list[int]:
        """Indices of the requests that have arrived since the last call."""
        first = len(self.records)
        while len(self.records) < len(self.items):
            if self._times is None:
                if not self._free:
                    break
                arrived = self._free.pop(0)
            else:
                arrived = self.began + self._times[len(self.records)]
                if arrived > time.perf_counter():
                    break
            self.records.append(Record(arrived))
        return list(range(first, len(self.records)))

    def got(self, number: int, times: Sequence[float]) -> None:
        """Notes tokens of a request, each with its time; RuntimeError for more than were asked for."""
        record, wanted = self.records[number], self.items[number].new_tokens
        record.tokens += times
        if len(record.tokens) > wanted:
            raise RuntimeError(
                f"request {number} got {len(record.tokens)} tokens, {wanted} were wanted"
            )
        if len(record.tokens) == wanted:
            self.done += 1
            self._free.append(record.tokens[-1])

    def run(self, preemptions: int | None = None) -> Run:
        """The figures, after the run."""
        return Run(self.records, self.began, preemptions)
