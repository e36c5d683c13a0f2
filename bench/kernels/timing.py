"""Timing: implementations interleaved in rounds, CUDA graphs, inputs larger than the L2 cache."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from caramba_fast.bench.kernels.comparators import Implementation

#: A CPU sample repeats the call until it lasts this long, so that the clock's resolution does not matter.
SHORTEST_SAMPLE_S = 2e-3
#: Samples of one implementation: ROUNDS if they fit into its time, but at least LEAST.
ROUNDS, LEAST = 21, 3
BUDGET_S = 1.0
#: A CPU call that takes longer gets one warm-up call, others two.
SLOW_S = 0.02
#: A sample that takes longer is taken once.
HOPELESS_S = 4.0
#: Least number of calls in a CUDA graph, to amortise its launch.
GRAPH_CALLS = 8
#: Cycles a GPU waits before a sample begins, so that the graph is queued by then (0.2 ms).
HEAD_START = 400_000
#: Bytes read by the probes: far more than any cache holds.
PROBE_BYTES = {"cpu": 2**28, "cuda": 2**31}
PROBE = "probe"
Entry = TypeVar("Entry", bound=Hashable)


def interleaved(
    listed: Sequence[Implementation],
    device: torch.device,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
) -> dict[Implementation, dict[int, float]]:
    """Seconds a call by round, of each implementation."""
    prepare = _cuda_sampler if device.type == "cuda" else cpu_sampler
    return in_turn({entry: prepare(entry) for entry in listed}, rounds, budget_s)


def in_turn(
    samplers: Mapping[Entry, Sampler], rounds: int = ROUNDS, budget_s: float = BUDGET_S
) -> dict[Entry, dict[int, float]]:
    """Seconds by round of each sampler; slow ones skip rounds, evenly, so that drift affects all alike."""
    wanted = {}
    for entry, sampler in samplers.items():
        least = 1 if sampler.seconds > HOPELESS_S else min(LEAST, rounds)
        wanted[entry] = max(least, min(rounds, int(budget_s / sampler.seconds)))
    samples: dict[Entry, dict[int, float]] = {entry: {} for entry in samplers}
    for turn in range(rounds):
        for entry, sampler in samplers.items():
            if turn * wanted[entry] // rounds != (turn - 1) * wanted[entry] // rounds:
                samples[entry][turn] = sampler.sample()
    return samples


def quantile(samples: Sequence[float], share: float) -> float:
    """The interpolated quantile at ``share`` (0.5: the median)."""
    return torch.tensor(samples, dtype=torch.float64).quantile(share).item()


def ratio(slow: dict[int, float], fast: dict[int, float]) -> float:
    """Speedup of ``fast``: the median over the rounds both have, so that drift cancels."""
    common = slow.keys() & fast.keys()
    if len(common) < LEAST:
        return statistics.median(slow.values()) / statistics.median(fast.values())
    return statistics.median(slow[turn] / fast[turn] for turn in common)


def probe(op: str, device: torch.device) -> Implementation:
    """Reads `PROBE_BYTES`, or reads half and writes half where the op does both.

    The sum of int64 reads fastest of torch's reductions on a CPU, with all of torch's threads, and on an H200. A copy
    in a CUDA graph is not a kernel and is slower than one, so sums are written instead.
    """
    size = PROBE_BYTES[device.type]
    if op in ("quantize", "dequantize"):
        source = torch.ones(size // 8, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        call = (
            partial(torch.add, source, 1, out=target)
            if source.is_cuda
            else partial(target.copy_, source)
        )
        return Implementation(PROBE, (call,), source.nbytes * 2)
    source = torch.ones(size // 8, dtype=torch.int64, device=device)
    return Implementation(PROBE, (source.sum,), source.nbytes)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets torch's CPU threads within a block; 0 leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Sampler:
    """Takes one sample, in seconds a call; a sample takes ``seconds``."""

    sample: Callable[[], float]
    seconds: float


def cpu_sampler(entry: Implementation) -> Sampler:
    """Repeats the call until a sample lasts `SHORTEST_SAMPLE_S`."""
    turns = itertools.cycle(entry.calls)
    started = time.perf_counter()
    next(turns)()
    once = time.perf_counter() - started
    if once < SLOW_S:  # the first call of a fast one is slower than the others
        started = time.perf_counter()
        next(turns)()
        once = time.perf_counter() - started
    repeats = max(1, math.ceil(SHORTEST_SAMPLE_S / once))

    def sample() -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            next(turns)()
        return (time.perf_counter() - begin) / repeats

    return Sampler(sample, once * repeats)


def _cuda_sampler(entry: Implementation) -> Sampler:
    calls = list(entry.calls) * math.ceil(GRAPH_CALLS / len(entry.calls))
    replay = recorded(calls) if entry.graph else _one_by_one(calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        torch.cuda._sleep(HEAD_START)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / len(calls)

    sample()
    return Sampler(sample, sample() * len(calls))


def _one_by_one(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    def replay() -> None:
        for call in calls:
            call()

    return replay


def recorded(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """The calls in turn as a CUDA graph's replay, without the launch overhead of Python."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and allocates outside the graph
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay
