"""Calls kept by the C++ extension: repeating one passes only its number and the tensors that differ.

The CPU counterpart of kept Triton launches (`kernels.launch`): about thirty arguments are unpacked only once.
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

#: Part of the error of a kept call whose streams have moved in memory (csrc/planned.h).
MOVED = "other memory"
#: Options whose tensors may change from call to call. An append also has those of ROTARY.
OPTIONS = ("block_table", "cache_leftpad", "query_lens")
_CHANGING = ", ".join(f"Tensor? {name}=None" for name in OPTIONS)
_TURNING = ", ".join(f"Tensor? {name}=None" for name in ROTARY[:3])

# The streams that these ops read or write are not arguments, so compiled graphs and autograd must never see them. They
# have their own names because, as overloads of the existing ops, they crash torch 2.13 at exit.
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
    """The extension's plain C functions, which take and return only numbers."""
    found = ctypes.CDLL(str(library()))
    if hasattr(found, "caramba_fast_record"):
        found.caramba_fast_recorded.restype = ctypes.c_int64
        found.caramba_fast_forget.argtypes = [ctypes.c_int64]
    return found


class Call(NamedTuple):
    """The tensors of a call that may differ in the next one, in order.

    Attributes:
        queries: how many are queries, which come first; 0 for an append.
        tensors: how many are positional: queries or new tokens, then the rows' lengths.
        options: the names of the rest, which are options.
    """

    queries: int
    tensors: int
    options: tuple[str, ...]


def is_there() -> bool:
    """Whether the extension supports keeping calls; older builds do not."""
    return hasattr(_extension(), "caramba_fast_record")


class Recording:
    """The single call made within `recording`."""

    number = 0

    def replay(
        self, inputs: Sequence[Tensor], fixed: Sequence[Tensor | None], call: Call
    ) -> Replay | None:
        """What repeats the call with other ``inputs`` (see ``call``) and the same ``fixed``; None if not kept."""
        if not self.number:
            return None
        found = Replay(self.number, call)
        stays = {id(x) for x in fixed}
        again = stays.isdisjoint(map(id, inputs)) and set(call.options) <= {*OPTIONS, *ROTARY}
        return found if again else None


class Replay:
    """A kept call, for other tensors of the same shapes and dtypes; the extension drops it with this object.

    Attributes:
        direct: takes the tensors in the op's order and options by name; None if the order is different.
    """

    def __init__(self, number: int, call: Call) -> None:
        weakref.finalize(self, _extension().caramba_fast_forget, number)
        self._call, self._op = call, functools.partial(_attend if call.queries else _append, number)
        #: Argument name of the tensor of a third stream, which comes before the lengths.
        self._third = None
        if call.tensors == (3 if call.queries else 4):
            self._third = "q_geo" if call.queries else "third"
        self.direct = None if self._third else self._op

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the call; returns its outputs, or () for an op that writes in place."""
        own = [*inputs[: self._call.tensors]]
        named = dict(zip(self._call.options, inputs[len(own) :], strict=True))
        if self._third:
            named[self._third] = own.pop(-2)
        return self._op(*own, **named) or ()


@contextmanager
def recording() -> Iterator[Recording]:
    """Context that keeps the op call made by this thread."""
    found, extension = Recording(), _extension()
    extension.caramba_fast_record()
    try:
        yield found
    except BaseException:
        extension.caramba_fast_forget(extension.caramba_fast_recorded())
        raise
    found.number = extension.caramba_fast_recorded()
