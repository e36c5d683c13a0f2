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

from caramba_fast.ops.apply_rotary_emb import ROTARY
from caramba_fast.ops.registry import define, library

#: What a kept call says whose streams lie elsewhere than they did (csrc/planned.h).
MOVED = "other memory"
#: Options whose tensors may change from call to call. An append has those of ROTARY as well.
OPTIONS = ("block_table", "cache_leftpad", "query_lens")
_CHANGING = ", ".join(f"Tensor? {name}=None" for name in OPTIONS)
_TURNING = ", ".join(f"Tensor? {name}=None" for name in ROTARY[:3])

# The streams they write to or read are no arguments: neither compiled graphs nor autograd get to see these ops. They
# have names of their own: overloads of an op that has some crash torch 2.13 as it exits.
_append = define(
    "append_planned",
    f"(int plan, Tensor first, Tensor second, Tensor start, {_CHANGING}, {_TURNING}, "
    "Tensor(a!)? rotary_out=None, Tensor? third=None) -> ()",
)
_attend = define(
    "attention_planned",
    f"(int plan, Tensor q, Tensor cache_seqlens, {_CHANGING}, Tensor? q_geo=None) -> (Tensor, Tensor)",
)


@functools.cache
def _extension() -> ctypes.CDLL:
    """The extension's functions that know numbers alone."""
    found = ctypes.CDLL(str(library()))
    if hasattr(found, "caramba_fast_record"):
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


def is_there() -> bool:
    """Whether the extension keeps calls; one that was built before it did does not."""
    return hasattr(_extension(), "caramba_fast_record")


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
        again = stays.isdisjoint(map(id, inputs)) and set(call.options) <= {*OPTIONS, *ROTARY}
        return found if again else None


class Replay:
    """A kept call, for other tensors of the same shapes and dtypes; it is forgotten with this object.

    Args:
        number: the extension's.
        call: which of the tensors is which.

    Attributes:
        direct: takes the tensors in the op's order and options by name; None where they have another order.
    """

    def __init__(self, number: int, call: Call) -> None:
        weakref.finalize(self, _extension().caramba_fast_forget, number)
        self._call, self._op = call, functools.partial(_attend if call.queries else _append, number)
        #: The name of a third stream's, which stands before the lengths.
        self._third = None
        if call.tensors == (3 if call.queries else 4):
            self._third = "q_geo" if call.queries else "third"
        self.direct = None if self._third else self._op

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs; none of an op that writes in place."""
        own = [*inputs[: self._call.tensors]]
        named = dict(zip(self._call.options, inputs[len(own) :], strict=True))
        if self._third:
            named[self._third] = own.pop(-2)
        return self._op(*own, **named) or ()


@contextmanager
def recording() -> Iterator[Recording]:
    """Keeps the call that this thread makes."""
    found, extension = Recording(), _extension()
    extension.caramba_fast_record()
    try:
        yield found
    except BaseException:
        extension.caramba_fast_forget(extension.caramba_fast_recorded())
        raise
    found.number = extension.caramba_fast_recorded()
