"""Runs a compiled kernel's PTX, one CTA after another, all threads of a CTA at once.

Threads furthest behind run first, so that branches rejoin where they can. Undefined behaviour and traps of a GPU raise
`FaultError`: see `ptx_memory`. An unknown instruction is an error before anything runs. Not modelled: time, concurrent
CTAs, and the rounding inside tensor cores and approximations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from support.ptx_instructions import (
    BITS,
    LANE,
    TYPES,
    Pure,
    distributed,
    multiplied,
    pure,
    unpacked,
)
from support.ptx_memory import SHARED_BASE, Bytes, Device, nobody
from support.ptx_program import FaultError, Instruction, Program
from support.ptx_registers import Registers

Array = np.ndarray[Any, Any]
ACCESS = re.compile(r"(ld|st)\.(global|shared)(?:\.v([24]))?\.([usb]\d+)")
MATRICES = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
ADDRESS = re.compile(r"\[([^+\]]+)(?:\+(-?\w+))?\]")
MOST_STEPS, END = 1_000_000, 1 << 30


def parts(text: str) -> list[str]:
    """{a, b} -> a and b."""
    return text.strip("{}").split(",")


class Cta:
    """One CTA: CTA ``number`` of a launch, at ``place`` in its grid; ``params`` are the raw bytes of each parameter."""

    def __init__(
        self, program: Program, device: Device, shared_bytes: int, params: Mapping[str, bytes],
        place: tuple[Sequence[int], Sequence[int]], number: int,
    ) -> None:  # fmt: skip
        self.count, self.device, self.params, self.number = program.threads, device, params, number
        data = np.zeros(shared_bytes, np.uint8)
        self.shared = Bytes("shared", data, data.astype(bool), nobody(shared_bytes))
        self.registers = Registers(program.threads, program.widths, place)
        self.copies: list[tuple[Array, Array, Array, Array]] = []
        self.groups = np.zeros(self.count, np.int64)

    def address(self, text: str, space: str, at: Array, size: int) -> Array:
        """Addresses of the threads ``at``; multiples of ``size``, the number of bytes accessed."""
        found = ADDRESS.fullmatch(text)
        if found is None:
            raise NotImplementedError(f"address {text}")
        start = self.registers.get(found[1], "u64" if space == "global" else "u32")[at]
        addresses = start + np.array(int(found[2] or "0", 0)).astype(start.dtype)
        if (addresses % start.dtype.type(size)).any():
            raise FaultError(f"misaligned: {size} bytes in {space} memory")
        return addresses

    def places(self, space: str, addresses: Array, at: Array) -> list[tuple[Array, ...] | Any]:
        """For each tensor, or for shared memory: which of ``at``, its bytes, offsets in them, and owners."""
        if space == "shared":
            here = addresses.astype(np.int64) - SHARED_BASE
            return [(np.arange(len(at)), self.shared, here, at)]
        return [(*x, np.full(len(x[0]), self.number)) for x in self.device.find(addresses)]

    def read(self, space: str, addresses: Array, size: int, at: Array, used: int | None) -> Array:
        """(len(at), size) bytes."""
        found = np.zeros((len(at), size), np.uint8)
        mask = np.array([used is None or used >> n & 1 for n in range(size)], bool)
        for which, held, where, who in self.places(space, addresses, at):
            found[which] = held.load(where, size, who, mask)
        return found

    def load(self, i: Instruction, at: Array, space: str, vector: int, kind: str) -> None:
        size = BITS[kind] // 8 * vector
        addresses = self.address(i.operands[1], space, at, size)
        found = self.read(space, addresses, size, at, i.used).view(TYPES[kind])
        for n, name in enumerate(parts(i.operands[0])):
            self.registers.put(name, found[:, n], at)

    def store(self, i: Instruction, at: Array, space: str, vector: int, kind: str) -> None:
        data = np.stack([self.registers.get(x, kind)[at] for x in parts(i.operands[1])], axis=1)
        data = data.view(np.uint8)
        addresses = self.address(i.operands[0], space, at, BITS[kind] // 8 * vector)
        for which, held, where, who in self.places(space, addresses, at):
            held.store(where, data[which], who)

    def load_param(self, i: Instruction, at: Array, kind: str) -> None:
        value = np.frombuffer(
            self.params[i.operands[1].strip("[]")][: BITS[kind] // 8], TYPES[kind]
        )
        self.registers.put(i.operands[0], np.repeat(value, len(at)), at)

    def copy(self, i: Instruction, at: Array) -> None:
        """cp.async: reads as many bytes as the last operand says, and sets the others to 0."""
        size = int(i.operands[2], 0)
        target = self.address(i.operands[0], "shared", at, size).astype(np.int64) - SHARED_BASE
        source = self.address(i.operands[1], "global", at, size)
        wanted = self.registers.get(i.operands[-1], "u32")[at].astype(np.int64)
        data = np.zeros((len(at), size), np.uint8)
        for some in set(wanted.tolist()) - {0}:
            which = np.flatnonzero(wanted == some)
            data[which, :some] = self.read("global", source[which], some, at[which], None)
        self.shared.expect(target, size, at)
        self.copies.append((at, self.groups[at], target, data))

    def commit(self, _: Instruction, at: Array) -> None:
        self.groups[at] += 1

    def wait(self, i: Instruction, at: Array) -> None:
        """cp.async.wait_group: at most so many of the latest groups remain in flight."""
        left, self.copies = self.copies, []
        for who, group, target, data in left:
            done = np.isin(who, at) & (group < self.groups[who] - int(i.operands[0]))
            self.shared.arrive(target[done], data[done], who[done])
            if not done.all():
                self.copies.append((who[~done], group[~done], target[~done], data[~done]))

    def warps(self, at: Array, mask: str = "-1") -> int:
        """Number of warps in ``at``: whole ones, of which ``mask`` names all lanes."""
        if (self.registers.get(mask, "u32")[at] != 0xFFFFFFFF).any():
            raise NotImplementedError("some lanes of a warp")
        if len(at) % 32 or (at.reshape(-1, 32) != at[::32, None] + LANE).any():
            raise FaultError("only a part of a warp takes part")
        return len(at) // 32

    def shuffle(self, i: Instruction, at: Array, mode: str) -> None:
        """shfl.sync of whole warps: from lane ^ b, from lane b, or from b lanes before (the first b keep their own)."""
        target, value, by, clamp, mask = i.operands
        if clamp != ("0" if mode == "up" else "31") or not self.warps(at, mask):
            raise NotImplementedError("a part of a warp")
        b = self.registers.get(by, "u32")[at].astype(at.dtype)
        if mode == "bfly":
            source = at ^ b
        elif mode == "idx":
            source = at - at % 32 + b % 32
        else:
            source = np.where(at % 32 >= b, at - b, at)
        self.registers.put(target, self.registers.get(value, "b32")[source], at)

    def reduce(self, i: Instruction, at: Array, of: Callable[..., Array]) -> None:
        """redux.sync: every lane gets the sum, the largest or the smallest of its warp."""
        lanes = self.registers.get(i.operands[1], "s32")[at]
        found = of(lanes.reshape(self.warps(at, i.operands[2]), 32), axis=1)
        self.registers.put(i.operands[0], np.repeat(found, 32), at)

    def matrices(self, i: Instruction, at: Array, count: int, transposed: bool) -> None:
        """ldmatrix: lane n has the address of row n % 8 of matrix n // 8."""
        warps = self.warps(at)
        used = at.reshape(warps, 32)[:, : 8 * count].ravel()
        addresses = self.address(i.operands[1], "shared", used, 16)
        rows = self.read("shared", addresses, 16, used, None).view(np.float16)
        found = distributed(rows.reshape(warps, count, 8, 8), transposed)
        for n, name in enumerate(parts(i.operands[0])):
            bits = np.ascontiguousarray(found[:, :, n]).view(np.uint32)
            self.registers.put(name, bits.ravel(), at)

    def multiply(self, i: Instruction, at: Array, kind: str) -> None:
        """mma.sync.m16n8."""
        warps = self.warps(at)
        target, a, b, c = map(parts, i.operands)

        def given(names: list[str], kind: str) -> Array:
            bits = np.stack([self.registers.get(x, "b32")[at] for x in names], axis=1)
            return unpacked(bits, kind).reshape(warps, 32, len(names), -1)

        found = multiplied(given(a, kind), given(b, kind), given(c, "f32")[..., 0])
        for n, name in enumerate(target):
            self.registers.put(name, found[:, :, n].ravel(), at)

    def warp_barrier(self, i: Instruction, at: Array) -> None:
        self.warps(at, i.operands[0])
        self.shared.warp_barrier(np.unique(at // 32))

    def compute(self, i: Instruction, at: Array, what: Pure) -> None:
        operands = zip(i.operands[1:], what[2], strict=True)
        self.registers.put(i.operands[0], what[0](*(self.registers.get(*x) for x in operands)), at)

    def pack(self, i: Instruction, at: Array) -> None:
        """mov between a register and its parts, lowest first."""
        target, source = map(parts, i.operands)
        kind = f"b{BITS[i.name[4:]] // len(source)}"
        bits = np.stack([self.registers.get(x, kind) for x in source], axis=1)
        found = bits.view(f"u{BITS[i.name[4:]] // len(target) // 8}")
        for n, name in enumerate(target):
            self.registers.put(name, found[:, n], at)


NAMED: dict[str, Callable[[Cta, Instruction, Array], None]] = {
    **dict.fromkeys(("cp.async.cg.shared.global", "cp.async.ca.shared.global"), Cta.copy),
    "cp.async.commit_group": Cta.commit, "cp.async.wait_group": Cta.wait, "bar.warp.sync": Cta.warp_barrier,
    **{f"shfl.sync.{mode}.b32": partial(Cta.shuffle, mode=mode) for mode in ("bfly", "idx", "up")},
    "redux.sync.add.s32": partial(Cta.reduce, of=np.sum), "redux.sync.max.s32": partial(Cta.reduce, of=np.max),
    "redux.sync.min.s32": partial(Cta.reduce, of=np.min),
    **{
        f"mma.sync.aligned.m16n8k{deep}.row.col.f32.{kind}.{kind}.f32": partial(Cta.multiply, kind=kind)
        for kind, deep in (("f16", 16), ("bf16", 16), ("tf32", 8))
    },
}  # fmt: skip


def step(i: Instruction) -> Callable[[Cta, Instruction, Array], None] | None:
    """The function of an instruction, an error if it is unknown; None for control flow."""
    if i.name in ("bra", "bra.uni", "ret") or (i.name, i.operands) == ("bar.sync", ["0"]):
        return None
    if found := ACCESS.fullmatch(i.name):
        run = Cta.load if found[1] == "ld" else Cta.store
        return partial(run, space=found[2], vector=int(found[3] or 1), kind=found[4])
    if found := MATRICES.fullmatch(i.name):
        return partial(Cta.matrices, count=int(found[1]), transposed=bool(found[2]))
    if i.name.startswith("ld.param.") and i.name[9:] in TYPES:
        return partial(Cta.load_param, kind=i.name[9:])
    if i.name in ("mov.b32", "mov.b64") and any(x.startswith("{") for x in i.operands):
        return Cta.pack
    if i.name in NAMED:
        return NAMED[i.name]
    what = pure(i.name)
    if what is None:
        raise NotImplementedError(f"unknown instruction: {i}")
    return partial(Cta.compute, what=what)


class Kernel:
    def __init__(self, program: Program) -> None:
        self.program, self.steps = program, [step(i) for i in program.instructions]

    def run(self, cta: Cta) -> None:
        """Runs every thread to its end; FaultError with the place if that goes wrong."""
        at, waits = np.zeros(cta.count, np.int64), np.zeros(cta.count, bool)
        for _ in range(MOST_STEPS):
            ready = np.where(waits, END, at)
            now = int(ready.min())
            if now < END:
                active = np.flatnonzero(ready == now)
                last = int(ready[ready != now].min(initial=END))
                with np.errstate(all="ignore"):
                    self._straight(cta, at, waits, now, active, last)
            elif waits.any():
                at[waits] += 1
                waits[:] = False
                cta.shared.barrier()
            else:
                return
        raise FaultError(f"still running after {MOST_STEPS} branches")

    def _straight(
        self, cta: Cta, at: Array, waits: Array, now: int, active: Array, last: int
    ) -> None:
        """Runs from ``now`` on as long as the next instruction follows for sure."""
        while now < last:
            i, run, chosen = self.program.instructions[now], self.steps[now], active
            now += 1
            try:
                if i.guard:
                    chosen = active[cta.registers.get(i.guard, "pred")[active] != i.unless]
                if run is not None and len(chosen):
                    run(cta, i, chosen)
            except (FaultError, NotImplementedError) as error:
                raise type(error)(f"{error} (CTA {cta.number}, {i})") from error
            if run is None:
                at[active] = now
                if i.name == "bar.sync":
                    at[chosen], waits[chosen] = now - 1, True
                else:
                    at[chosen] = END if i.name == "ret" else self.program.labels[i.operands[0]]
                return
        at[active] = now
