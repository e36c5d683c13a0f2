"""Timing that can be trusted: implementations interleaved, each from a cold L2 on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from caramba_fast.ops.registry import use_backend

from .registry import Implementation

#: A CPU sample repeats the call until it lasts this long, so that the clock does not matter.
SHORTEST_SAMPLE_S = 2e-3
#: Written before each CUDA sample; four times the largest L2 (H200: 60 MB).
FLUSH_BYTES = 256 * 1024 * 1024


def interleaved(
    listed: Sequence[Implementation], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Seconds a call, ``rounds`` samples each; round by round, so drift hits all alike."""
    prepare = _cuda_sampler if device.type == "cuda" else _cpu_sampler
    samplers = {entry.name: prepare(entry, device) for entry in listed}
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return samples


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample at ``share`` (0.5: the median), interpolated."""
    return torch.tensor(samples, dtype=torch.float64).quantile(share).item()


def _cpu_sampler(entry: Implementation, _device: torch.device) -> Callable[[], float]:
    with use_backend(entry.backend):
        entry.call()
        started = time.perf_counter()
        entry.call()
        repeats = max(1, round(SHORTEST_SAMPLE_S / (time.perf_counter() - started)))

    def sample() -> float:
        with use_backend(entry.backend):
            begin = time.perf_counter()
            for _ in range(repeats):
                entry.call()
            return (time.perf_counter() - begin) / repeats

    return sample


def _cuda_sampler(entry: Implementation, device: torch.device) -> Callable[[], float]:
    with use_backend(entry.backend):
        call = _recorded(entry.call) if entry.graph else entry.call
        call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        with use_backend(entry.backend):
            flush.zero_()
            begin.record()
            call()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    return sample


def _recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph's replay, so that launching from Python costs nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and allocates outside the graph
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
