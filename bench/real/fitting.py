"""Groups caches that are measured together, as many as fit into memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: Free memory a GPU keeps for steps: with a DynamicCache each copies keys and values of a layer, and repeats them for
#: all query heads.
STEPS_BYTES = 4 * 2**30


@dataclass
class Running:
    """One program with one cache, ready to take steps.

    Attributes:
        program, cache, weights: names in the table.
        take: seconds of each of so many steps.
        nbytes: current bytes of the cache; None if the program does not tell.
        graph: whether steps are replayed as a CUDA graph, in words; None if the program never does so.
        rounds: median seconds a step by round; ``steps`` has all.
    """

    program: str
    cache: str
    weights: str
    take: Callable[[int], list[float]]
    nbytes: Callable[[], int | None]
    version: str
    graph: Callable[[], str] | None = None
    rounds: dict[int, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Attempt:
    """A `Running` to be made if it runs and fits; ``name`` is used in messages."""

    name: str
    make: Callable[[], Running]


def in_groups(attempts: Sequence[Attempt], device: torch.device) -> Iterator[list[Running]]:
    """All that run, in groups that fit into the device's memory, each beginning with the very first one.

    A group has to be measured before the next is requested, which reuses its memory. Prints what does not run, and what
    does not fit beside the first.
    """
    group: list[Running] = []
    for attempt in attempts:
        made = _fitting(attempt, device)
        if made is None and len(group) > 1:
            first = group[0]
            yield group
            group.clear()
            group.append(_anew(first))
            made = _fitting(attempt, device)
        if made is None:
            print(f"{attempt.name}: left out: no memory", flush=True)
        elif isinstance(made, str):
            print(f"{attempt.name}: does not run here: {made}", flush=True)
        else:
            group.append(made)
    if group:
        yield group
        group.clear()  # the caller may still hold the list


def _anew(entry: Running) -> Running:
    """A copy without the measurements."""
    known: dict[str, Any] = {**vars(entry), "rounds": {}, "steps": []}
    return Running(**known)


def _fitting(attempt: Attempt, device: torch.device) -> Running | str | None:
    """The result, or why it does not run; None if it does not fit, with its memory freed."""
    made: Running | str | None
    try:
        made = attempt.make()
    except torch.OutOfMemoryError:
        made = None
    except (ImportError, ValueError, RuntimeError) as error:
        made = str(error)
    if device.type == "cuda":
        if isinstance(made, Running) and free_bytes(device) < STEPS_BYTES:
            made = None
        if made is None:
            free_bytes(device)
    return made


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, after releasing unused allocations."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
