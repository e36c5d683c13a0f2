"""The registers of a CTA: raw bits of every thread, read and written with an instruction's types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.ptx_instructions import BITS, TYPES
from support.ptx_memory import SHARED_BASE

Array = np.ndarray[Any, Any]
NUMBER = re.compile(r"(?:0[fF](\w{8})|(-?(?:0x[0-9A-Fa-f]+|\d+))U?)")

#: Contents of a register before it is written.
NOISE = 0xA5C39E7BD1F0A5C3


class Registers:
    """Registers of ``threads`` threads, ``widths`` bits each; ``place`` is (x, y, z) of the CTA, and of the grid."""

    def __init__(
        self, threads: int, widths: Mapping[str, int], place: tuple[Sequence[int], Sequence[int]]
    ) -> None:
        self._threads, self._widths = threads, widths
        self._bits: dict[str, Array] = {}
        thread = np.arange(threads, dtype=np.uint32)
        one = np.uint32(1) << thread % 32
        self._constant: dict[tuple[str, str] | str, Array] = {
            "%tid.x": thread, "%lanemask_eq": one, "%lanemask_lt": one - np.uint32(1),
            "global_smem": np.full(threads, SHARED_BASE, np.uint32),
        }  # fmt: skip
        for axis, here, whole in zip("xyz", *place, strict=True):
            self._constant[f"%ctaid.{axis}"] = np.full(threads, here, np.uint32)
            self._constant[f"%nctaid.{axis}"] = np.full(threads, whole, np.uint32)

    def get(self, text: str, kind: str) -> Array:
        """The value of an operand: a register, a special one, a number, or the start of shared memory."""
        if text not in self._widths:
            return self._constant[text] if text in self._constant else self._number(text, kind)
        if text not in self._bits:  # compilers may name one whose bits are not used
            self.put(text, np.full(self._threads, NOISE, np.uint64), np.arange(self._threads))
        bits = self._bits[text]
        if kind == "pred":
            return bits
        if self._widths[text] > BITS[kind]:
            bits = bits.astype(f"u{BITS[kind] // 8}")
        return bits.view(TYPES[kind])

    def _number(self, text: str, kind: str) -> Array:
        if (text, kind) not in self._constant:
            found = NUMBER.fullmatch(text)
            if found is None:
                raise NotImplementedError(f"operand {text}")
            value = int(found[1], 16) if found[1] else int(found[2], 0)
            raw = np.full(self._threads, value % 2 ** BITS[kind], f"u{max(BITS[kind] // 8, 1)}")
            self._constant[text, kind] = raw.view(TYPES[kind])
        return self._constant[text, kind]

    def put(self, name: str, values: Array, at: Array) -> None:
        """Writes a register of the threads ``at``; ``values`` has those threads, or all."""
        if name == "_":
            return
        width, kind = self._widths[name], values.dtype.kind
        bits = np.ascontiguousarray(values)
        if width == 1:
            bits = bits.astype(bool)
        elif kind == "f":
            bits = bits.view("u4" if width == 32 else f"u{bits.dtype.itemsize}")
        else:  # truncated to the register's width, with its sign if it has one
            bits = bits.astype(f"{kind}{width // 8}").view(f"u{width // 8}")
        if len(at) < self._threads:
            mine = bits if len(bits) == len(at) else bits[at]
            held = self._bits.get(name)
            bits = np.zeros(self._threads, bits.dtype) if held is None else held.copy()
            bits[at] = mine
        self._bits[name] = bits
