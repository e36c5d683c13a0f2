"""Calls that the C++ extension keeps: a step that repeats one passes its number and the tensors that differ.

What Triton's launches are to a plan (`kernels.launch`), these are on a CPU: thirty arguments are unpacked and checked
once.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from caramba_fast.ops.registry import define, library

_CHANGING = "Tensor? block_table=None, Tensor? cache_leftpad=None, Tensor? query_lens=None"
#: Options whose tensors may be others in the next call, in the order of the schemas.
OPTIONS = ("block_table", "cache_leftpad", "query_lens")

# The streams they write to or read are no arguments: neither compiled graphs nor autograd get to see these ops.
_append = (
    define(  # names of their own: overloads of an op that has some crash torch 2.13 as it exits
        "append_planned",
        f"(int plan, Tensor first, Tensor second, Tensor? third, Tensor start, {_CHANGING}) -> ()",
    )
)
_attend = define(
    "attention_planned",
    f"(int plan, Tensor q, Tensor? q_geo, Tensor cache_seqlens, {_CHANGING}) -> (Tensor, Tensor)",
)


@functools.cache
def _extension() -> ctypes.CDLL:
    """The extension's functions that know numbers alone."""
    found = ctypes.CDLL(str(library()))
    found.caramba_fast_recorded.restype = ctypes.c_int64
    found.caramba_fast_forget.argtypes = [ctypes.c_int64]
    return found


class Call(NamedTuple):
    """Which tensors of a call the next one may have others for, in their order.

    Attributes:
        queries: how many are queries, which come first; 0 for an append.
        tensors: how many are no options: queries, or new tokens, then the rows' lengths.
        options: the names of the rest.
    """

    queries: int
    tensors: int
    options: tuple[str, ...]


class Recording:
    """The one call that is made while `recording`."""

    number = 0

    def replay(
        self, inputs: Sequence[Tensor], fixed: Sequence[Tensor | None], call: Call
    ) -> Replay | None:
        """The call for other ``inputs``; None where it is not kept.

        Args:
            inputs: tensors that will be others in the next call.
            fixed: those that stay.
            call: which of them is which.
        """
        if not self.number:
            return None
        found = Replay(self.number, call)
        stays = {id(x) for x in fixed}
        again = stays.isdisjoint(map(id, inputs)) and set(call.options) <= set(OPTIONS)
        return found if again else None


class Replay:
    """A kept call, for other tensors of the same shapes and dtypes; it is forgotten with this object.

    Args:
        number: the extension's.
        call: which of the tensors is which.
    """

    def __init__(self, number: int, call: Call) -> None:
        weakref.finalize(self, _extension().caramba_fast_forget, number)
        own = call.tensors
        if call.queries:
            self._op, places = _attend, [0, 1 if call.queries == 2 else -1, own - 1]
        else:
            self._op, places = _append, [0, 1, 2 if own == 4 else -1, own - 1]
        given = {name: own + i for i, name in enumerate(call.options)}
        places += [given.get(name, -1) for name in OPTIONS]
        while places[-1] < 0:
            places.pop()
        self._number, self._places = number, places

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs; none of an op that writes in place."""
        given = [None if i < 0 else inputs[i] for i in self._places]
        return self._op(self._number, *given) or ()


@contextmanager
def recording() -> Iterator[Recording]:
    """Keeps the call that this thread makes."""
    found, extension = Recording(), _extension()
    extension.caramba_fast_record()
    try:
        yield found
    finally:
        found.number = extension.caramba_fast_recorded()
