"""Interrupts at any bytecode: what Ctrl-C can do to code of this package, at one position after another.

`places_of` runs a call and lists the bytecodes it executes; `interrupted_at` runs it again and raises before one of
them. Return and yield are left out: no interpreter checks for signals between a value and its return. Tests with
random positions use `repeat`, which is bounded in time: ``CARAMBA_FAST_STRESS_SECONDS`` makes it longer,
``CARAMBA_FAST_STRESS_SEED`` repeats one round.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from opcode import opname
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import caramba_fast

PACKAGE = str(Path(caramba_fast.__file__).parent) + os.sep
#: A bytecode: its code object and offset.
Place = tuple[CodeType, int]


class Interrupter:
    """A context manager that counts bytecodes of some files, and raises before one of them, once.

    Args:
        position: index of the bytecode to raise at; None only counts.
        files: a prefix of the files' names.
        error: what is raised.
        threads: count in threads that start meanwhile, instead of this one.

    Attributes:
        places: the bytecodes executed, in order.
        where: file, line and bytecode of the interrupt; None if there was none.
    """

    def __init__(
        self,
        position: int | None,
        files: str = PACKAGE,
        error: type[BaseException] = KeyboardInterrupt,
        threads: bool = False,
    ) -> None:
        self.position, self.files, self.error, self.threads = position, files, error, threads
        self.places: list[Place] = []
        self.where: str | None = None

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.where is not None or not frame.f_code.co_filename.startswith(self.files):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._came_by

    def _came_by(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode" or self.where is not None:
            return self._came_by
        code, place = frame.f_code, frame.f_lasti
        name = opname[code.co_code[place]]
        if name.startswith(("RETURN_", "YIELD_")):
            return self._came_by
        self.places.append((code, place))
        if len(self.places) - 1 == self.position:
            self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name} {name}"
            raise self.error(f"interrupt {self.position} at {self.where}")
        return self._came_by

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        (threading.settrace if self.threads else sys.settrace)(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        if self.threads:
            threading.settrace(None)  # type: ignore[arg-type]
        else:
            sys.settrace(self._before)


def places_of(call: Callable[[], object], files: str = PACKAGE) -> list[Place]:
    """The bytecodes a call executes, in order."""
    with Interrupter(None, files) as seen:
        call()
    return seen.places


def count_positions(call: Callable[[], object], files: str = PACKAGE) -> int:
    return len(places_of(call, files))


def interrupted_at(position: int, call: Callable[[], object], files: str = PACKAGE) -> bool:
    """Raises KeyboardInterrupt at a position of a call; whether it got there; AssertionError if it swallowed it."""
    at = Interrupter(position, files)
    try:
        with at:
            call()
    except KeyboardInterrupt:
        return True
    assert at.where is None, f"the interrupt at {at.where} was swallowed"
    return False


def pick(dice: Random, places: Sequence[Place]) -> int:
    """A random position; rare bytecodes are as likely as those of inner loops."""
    found: dict[Place, list[int]] = defaultdict(list)
    for position, place in enumerate(places):
        found[place].append(position)
    return dice.choice(dice.choice(list(found.values())))


def repeat(check: Callable[[Random], object], seconds: float = 3.0) -> None:
    """Runs a check with one seed after another until time is over; prints the seed of a failure."""
    seconds = float(os.environ.get("CARAMBA_FAST_STRESS_SECONDS", seconds))
    only = os.environ.get("CARAMBA_FAST_STRESS_SEED")
    seed, end = int(only or 0), time.monotonic() + seconds
    while True:
        try:
            check(Random(seed))
        except BaseException:
            print(f"CARAMBA_FAST_STRESS_SEED={seed} does this again", file=sys.stderr)
            raise
        seed += 1
        if only is not None or time.monotonic() >= end:
            print(f"{seed if only is None else 1} rounds")
            return
