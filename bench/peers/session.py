"""The interface of a measured system: a cache filled with a prompt, and one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor

from caramba_fast.bench.peers.problem import Problem, Shape


class Session(ABC):
    """The cache of one system: it holds a problem's past tokens; `step` appends the new ones.

    Attributes:
        grows: whether every step lengthens the cache; if not, it overwrites the same slots.
        note: a remark for the reader of the figures.
    """

    grows = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.note = ""

    @abstractmethod
    def step(self) -> None:
        """Appends the new tokens and attends from them; this is timed."""

    @abstractmethod
    def output(self) -> Tensor:
        """(B, H, T, D) fp32 of the latest step."""

    @property
    @abstractmethod
    def stored(self) -> int:
        """Bytes of the problem's tokens as stored, scales included."""

    def rewind(self) -> None:  # noqa: B027 - many have nothing to do here
        """Removes the tokens that steps have appended."""

    def rest(self) -> None:  # noqa: B027 - as above
        """Stops threads that wait for work, before other systems are timed."""

    def close(self) -> None:  # noqa: B027 - as above
        """Frees memory that Python does not manage."""


def any_shape(_shape: Shape) -> str:
    """Refuses no shape."""
    return ""


@dataclass(frozen=True)
class System:
    """A row of the comparison.

    Attributes:
        name: of the program.
        kind: its name for how it stores keys and values.
        bits: of a stored value, without scales: 32, 16, 8 or 4.
        allowed: error that its precision explains; a result with a larger one is wrong and not timed.
        build: makes the session of a problem.
        modules: Python packages it needs.
        ours: whether it is this package.
        trial: whether it may crash and so is first tried on a small problem in its own process.
        copies: its peak memory, in multiples of the stored bytes.
        missing: why it cannot run on this machine, or "".
        refuses: why it cannot serve a shape, or "".
    """

    name: str
    kind: str
    bits: int
    allowed: float
    build: Callable[[Problem], Session]
    modules: tuple[str, ...] = ()
    ours: bool = False
    trial: bool = False
    copies: float = 1.0
    missing: Callable[[], str] = str
    refuses: Callable[[Shape], str] = any_shape

    @property
    def title(self) -> str:
        """Program and kind."""
        return f"{self.name} {self.kind}"

    def reason(self, shape: Shape) -> str:
        """Why it cannot be measured, as far as that is known before trying, or ""."""
        absent = [module for module in self.modules if find_spec(module) is None]
        if absent:
            return f"not installed: {', '.join(absent)} (make bench-peers installs it)"
        return self.missing() or self.refuses(shape)

    def bytes_needed(self, shape: Shape) -> float:
        """Most bytes its cache takes, scales estimated."""
        return self.copies * shape.values * (self.bits + (0 if self.bits >= 16 else 1)) / 8
