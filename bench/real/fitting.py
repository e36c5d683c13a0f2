"""Caches that are measured together, as many as there is memory for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: Free memory of a GPU that steps are left: with a DynamicCache keys and values of a layer are copied at each of them,
#: and repeated for all query heads.
STEPS_BYTES = 4 * 2**30


@dataclass
class Running:
    """One program with one cache, ready to take steps.

    Attributes:
        program, cache, weights: in the table.
        take: seconds of each of so many steps.
        nbytes: what the cache takes now; None where the program does not say.
        graph: whether steps are replayed as a CUDA graph, in words; None of programs that never do so.
        rounds: seconds a step, by round; ``steps`` has all of them.
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
    """What may become a `Running`, where it runs and fits; ``name`` says what it is where it does not."""

    name: str
    make: Callable[[], Running]


def in_groups(attempts: Sequence[Attempt], device: torch.device) -> Iterator[list[Running]]:
    """All that run, in groups that fit into the device's memory; the first of all begins each group.

    Each group is to be measured before the next is asked for, which takes its memory. What does not fit beside the
    first is left out with a line; of what does not run here there is a line with the reason.
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
        group.clear()  # whoever measured it may still hold the list


def _anew(entry: Running) -> Running:
    """The same without what was measured."""
    known: dict[str, Any] = {**vars(entry), "rounds": {}, "steps": []}
    return Running(**known)


def _fitting(attempt: Attempt, device: torch.device) -> Running | str | None:
    """What is made, or why it does not run; None where it does not fit, and then it takes no memory."""
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
    """Memory of a GPU that nothing holds."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
