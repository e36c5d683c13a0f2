"""Share of a decode step outside the model's forward pass: the Python layers, and choosing a token.

Clocks run around ``model.forward`` and around the drawing of tokens (arithmetic on logits, not bookkeeping) while
`Generator.generate_iter` takes steps. All settings take their steps in turn.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.kernels.timing import quantile
from caramba_fast.infer import Generator
from caramba_fast.infer import run as _run
from caramba_fast.models import Transformer

CACHES, BATCHES = ("fp16", "q4"), (1, 8)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}
PROMPT, STEPS, WARM_UP, ROUNDS, PROFILED = 256, 25, 10, 12, 100
COLUMNS = (
    "cache", "batch", "mode", "rounds", "steps", "step_us", "forward_us", "drawing_us", "rest_us", "share",
    "share_p20", "share_p80", "share_without_drawing", "threads", "device", "torch", "commit", "source",
)  # fmt: skip

#: The module in which the generator looks up the function that draws tokens.
run_module: Any = _run


class Clock:
    """Adds up the seconds spent in a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


@contextmanager
def clocks(model: Transformer) -> Iterator[tuple[Clock, Clock]]:
    """Clocks around the forward pass and around drawing tokens, within a block."""
    forward, drawing, sample = Clock(), Clock(), run_module.sample_marked
    model.forward = forward.around(model.forward)  # type: ignore[method-assign]
    run_module.sample_marked = drawing.around(sample)
    try:
        yield forward, drawing
    finally:
        del model.forward
        run_module.sample_marked = sample


def stepping(
    model: Transformer, text: Sequence[int], cache: str, batch: int, settings: dict[str, Any], steps: int
) -> Iterator[Any]:  # fmt: skip
    """An iterator over decode steps after a prompt."""
    generator = Generator(model, cache_kind=cache, max_new_tokens=steps + WARM_UP + 1, ignore_eos=True,
                          max_seq_len=PROMPT + steps + WARM_UP + 1, seed=0, **settings)  # fmt: skip
    prompts = [list(text[200 * row : 200 * row + PROMPT]) for row in range(batch)]
    iterator = generator.generate_iter(prompts)
    for _ in range(WARM_UP):
        next(iterator)
    return iterator


def measure(
    model: Transformer, text: Sequence[int], rounds: int
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """A row per setting, and for some a profile of the most expensive functions."""
    listed = list(product(CACHES, BATCHES, MODES))
    iterators = {
        (c, b, m): stepping(model, text, c, b, MODES[m], rounds * STEPS) for c, b, m in listed
    }
    found: dict[Any, list[tuple[float, float, float]]] = {key: [] for key in listed}
    with clocks(model) as (forward, drawing):
        for _ in range(rounds):
            for key in listed:
                forward.seconds = drawing.seconds = 0.0
                began = time.perf_counter()
                for _ in range(STEPS):
                    next(iterators[key])
                whole = time.perf_counter() - began
                found[key].append((whole, forward.seconds, drawing.seconds))
    profiles = {
        f"{cache}, batch {batch}, {mode}": profile(model, text, cache, batch, mode)
        for cache, batch, mode in (("q4", 1, "greedy"), ("q4", 1, "top_p"), ("q4", 8, "top_p"))
    }
    return [
        _row(cache, batch, mode, found[cache, batch, mode]) for cache, batch, mode in listed
    ], profiles


def _row(
    cache: str, batch: int, mode: str, samples: Sequence[tuple[float, float, float]]
) -> dict[str, Any]:
    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    shares = [1 - forward / whole for whole, forward, _ in samples]
    micro = 1e6 / STEPS
    return {
        "cache": cache, "batch": batch, "mode": mode, "rounds": len(samples), "steps": STEPS,
        "step_us": round(micro * median(w for w, _, _ in samples), 1),
        "forward_us": round(micro * median(f for _, f, _ in samples), 1),
        "drawing_us": round(micro * median(d for _, _, d in samples), 1),
        "rest_us": round(micro * median(w - f - d for w, f, d in samples), 1),
        "share": round(statistics.median(shares), 4), "share_p20": round(quantile(shares, 0.2), 4),
        "share_p80": round(quantile(shares, 0.8), 4),
        "share_without_drawing": round(median((w - f - d) / (w - d) for w, f, d in samples), 4),
    }  # fmt: skip


def profile(
    model: Transformer, text: Sequence[int], cache: str, batch: int, mode: str, most: int = 14
) -> list[dict[str, Any]]:
    """Functions outside the forward pass by their own time, in microseconds a step, cProfile's overhead included."""
    iterator = stepping(model, text, cache, batch, MODES[mode], PROFILED)
    profiler = cProfile.Profile()
    profiler.enable()
    with torch.no_grad():
        for _ in range(PROFILED):
            next(iterator)
    profiler.disable()
    # (file, line, name) -> primitive calls, calls, own seconds, total seconds, {caller: the same}
    found: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own: dict[Any, list[float]] = {}
    for function, (_, _, _, _, callers) in found.items():
        for caller, (calls, _, seconds, cumulative) in callers.items():
            name = function if _ours(function) else (caller if _ours(caller) else None)
            if name is not None:
                key = (*name[:2], name[2] if name is function else f"{name[2]}: {function[2]}")
                entry = own.setdefault(key, [0, 0.0, 0.0])
                entry[0] += calls
                entry[1] += seconds
                entry[2] += cumulative
    ordered = sorted(own.items(), key=lambda item: -item[1][1])[:most]
    return [
        {
            "where": f"{Path(file).parent.name}/{Path(file).name}:{line}", "function": name,
            "calls": round(calls / PROFILED, 2), "own_us": round(1e6 * seconds / PROFILED, 1),
            "all_us": round(1e6 * cumulative / PROFILED, 1),
        }
        for (file, line, name), (calls, seconds, cumulative) in ordered
    ]  # fmt: skip


def _ours(function: tuple[str, int, str]) -> bool:
    return Path(function[0]).parent.name == "infer"
