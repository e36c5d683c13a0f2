"""Memory that tracks every byte: whether it was written, is in bounds, and who accessed it since the last barrier.

Tensors have invented addresses far apart, so that a wrong one hits nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from support.ptx_program import FaultError
from torch import Tensor

Array = np.ndarray[Any, Any]
#: Owners of a byte beside threads: none, several of several warps, all of warp w (+ w), several of w (twice that + w).
NONE, MANY, WARP = -1, -2, 1 << 20
#: Start of shared memory: not 0, so that an address without a base shows.
SHARED_BASE = 1024
WINDOW = 1 << 32


class Bytes:
    """Bytes of one ``space``: data (n,) uint8, written (n,) bool, and who wrote and read each, (n,) int32."""

    def __init__(self, space: str, data: Array, written: Array, owners: Array) -> None:
        self.space, self.data, self.written = space, data, written
        self.writer, self.reader = owners
        self.awaited = np.zeros(len(data), bool)  # an asynchronous copy is in flight

    def load(self, at: Array, size: int, who: Array, used: Array) -> Array:
        """(len(at), size) uint8; of each ``size`` bytes only those ``used`` are checked."""
        places = self._places(at, size)
        seen, who = places[:, used].ravel(), np.repeat(who, used.sum())
        if self.awaited[seen].any():
            raise FaultError(f"{self.space} memory is read before a copy to it was waited for")
        if not self.written[seen].all():
            raise FaultError(f"uninitialized {self.space} memory is read")
        if self._others(self.writer[seen], who).any():
            raise FaultError(f"race: {self.space} memory is read that another thread writes")
        before, warp = self.reader[seen], who >> 5
        alone = ~self._others(before, who)
        near = ((before >> 5 == warp) & (before < WARP)) | (before == 2 * WARP + warp)
        now = np.where(alone, who, np.where(near, 2 * WARP + warp, MANY))
        self.reader[seen] = now
        self.reader[seen[self.reader[seen] != now]] = MANY
        return self.data[places]

    def store(self, at: Array, values: Array, who: Array) -> None:
        """Writes values (len(at), size) uint8; threads may write equal bytes to the same place."""
        places, values = self._claim(at, values.shape[1], who), values.ravel()
        self.data[places], self.written[places] = values, True
        if (self.data[places] != values).any():
            raise FaultError(f"race: threads write different values to one place, {self.space}")

    def expect(self, at: Array, size: int, who: Array) -> None:
        """An asynchronous copy begins: its bytes may not be accessed until `arrive`."""
        self.awaited[self._claim(at, size, who)] = True

    def arrive(self, at: Array, values: Array, who: Array) -> None:
        """The copy was waited for by the thread that began it."""
        self.awaited[self._places(at, values.shape[1])] = False
        self.store(at, values, who)

    def barrier(self) -> None:
        """Makes all accesses known to all threads."""
        self.writer[:] = self.reader[:] = NONE

    def warp_barrier(self, warps: Array) -> None:
        """Makes accesses of each of ``warps`` known to its own threads."""
        for owner in (self.writer, self.reader):
            warp = np.where(owner >= 2 * WARP, owner - 2 * WARP, owner >> 5)
            mine = (owner >= 0) & (owner // WARP != 1) & np.isin(warp, warps)
            owner[mine] = WARP + warp[mine]

    @staticmethod
    def _others(owner: Array, who: Array) -> Array:
        return (owner != NONE) & (owner != who) & (owner != WARP + (who >> 5))

    def _claim(self, at: Array, size: int, who: Array) -> Array:
        places, who = self._places(at, size).ravel(), np.repeat(who, size)
        if self.awaited[places].any():
            raise FaultError(f"{self.space} memory is written while a copy is on its way to it")
        if (self._others(self.writer[places], who) | self._others(self.reader[places], who)).any():
            raise FaultError(f"race: {self.space} memory is written that another thread touches")
        self.writer[places] = who
        return places

    def _places(self, at: Array, size: int) -> Array:
        wrong, whole = (at < 0) | (at + size > len(self.data)), len(self.data)
        if wrong.any():
            where = f"{size} bytes at {at[wrong][0]} of {whole} in {self.space} memory"
            raise FaultError(f"out of bounds: {where}")
        return at[:, None] + np.arange(size)


def nobody(size: int) -> Array:
    return np.full((2, size), NONE, np.int32)


class Device:
    """Global memory: the tensors a kernel was given."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Any, Bytes]] = {}  # by address of the storage, which is kept
        self._given: dict[tuple[int, int], int] = {}
        self._windows: list[tuple[Bytes, int]] = []

    def part(self, x: Tensor) -> Bytes:
        """The bytes from the first of x to its last, gaps included."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._stored:
            size = storage.nbytes()
            raw = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
            data = np.ctypeslib.as_array(raw)
            held = Bytes("global", data, np.ones(size, bool), nobody(size))
            self._stored[storage.data_ptr()] = (storage, held)
        whole, size = self._stored[storage.data_ptr()][1], x.element_size()
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        here = slice(x.storage_offset() * size, (x.storage_offset() + last + 1) * size)
        owners = (whole.writer[here], whole.reader[here])
        return Bytes("global", whole.data[here], whole.written[here], owners)

    def address(self, x: Tensor) -> int:
        """A tensor's address for kernels; nothing else is within gigabytes."""
        part = self.part(x)
        key = (x.data_ptr(), len(part.data))
        if key not in self._given:
            self._windows.append((part, WINDOW // 2 + x.data_ptr() % 256))
            self._given[key] = len(self._windows)
        return self._given[key] * WINDOW + self._windows[self._given[key] - 1][1]

    def begin(self) -> None:
        """A kernel begins, after all CTAs of the previous one."""
        for _, held in self._stored.values():
            held.barrier()

    def find(self, addresses: Array) -> list[tuple[Array, Bytes, Array]]:
        """For each tensor addressed: which of the addresses, its bytes, and offsets in them."""
        number, found = (addresses // np.uint64(WINDOW)).astype(np.int64), []
        for one in np.unique(number):
            if not 1 <= one <= len(self._windows):
                raise FaultError(f"out of bounds: {int(addresses[number == one][0]):#x} is nowhere")
            which, (held, start) = np.flatnonzero(number == one), self._windows[one - 1]
            low = (addresses[which] % np.uint64(WINDOW)).astype(np.int64)
            found.append((which, held, low - start))
        return found
