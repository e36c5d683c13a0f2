"""Variant: one specialization of a kernel, as it is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from caramba_fast.bench.kernels.cards import SHARED_LIMITS
from caramba_fast.formats import FORMATS, Format
from caramba_fast.kernels import append
from caramba_fast.kernels.extend_settings import extend_within
from caramba_fast.kernels.tiles_layout import (
    Settings,
    Stream,
    on_amd,
    on_generation,
    on_hopper,
    settings,
    token_bytes,
    walking,
    within,
)

#: Slots of a cache without pages.
SLOTS = 8192
POINTERS = {
    "fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "q8_0": "*i8", "q4_0": "*u8", "nf4": "*u8",
    "q8_channel": "*u8", "q4_channel": "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel.

    Attributes:
        op, kind, dtype, block, fit: what it serves; dtype is that of the unquantized side, fit empty for
            an op that finds no scales.
        kernel: the ``@triton.jit`` function.
        arguments: types of the run-time arguments, in Triton's spelling, in tuples where the kernel takes
            tuples; None for one that is not given. ``!`` marks an integer divisible by 16.
        constants: the constexpr arguments. ``PTX`` or ``C.ptx``, if there, becomes true on NVIDIA only.
        num_warps, num_stages: launch settings.
        values: values a program quantizes or restores; instructions are counted per value.
        options: what else the specialization has.
        tile: tokens of one round of the main loop; 0 for a kernel without one.
        narrow: whether lanes are narrow (`Settings`).
        choose: launch settings by ``major``, for a kernel that has its own on each generation.
        fusion: whether a product and a sum may become one instruction.
        max_registers: of a thread; None for as many as there are.
    """

    op: str
    kind: str
    dtype: str
    block: int
    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    values: int
    fit: str = ""
    options: str = ""
    num_stages: int = 3
    tile: int = 0
    narrow: bool = False
    choose: Callable[..., Settings] | None = None
    fusion: bool = False
    max_registers: int | None = None

    @property
    def streams(self) -> list[tuple[Stream, Format]]:
        """The cached streams the main loop reads, and their formats."""
        rows = list(FORMATS.values())
        found = [self.constants[name] for name in ("K", "G", "V")] if self.tile else []
        return [(stream, rows[stream.form]) for stream in found if stream is not None]

    @property
    def passes(self) -> int:
        """How many programs read a token of a lane, each for its part of the query rows."""
        shape = self.constants["C"]
        if shape.extend:  # each takes other query rows, and as many as it can
            return 1
        return -(-shape.per_lane * shape.groups * shape.tokens // shape.rows)

    @property
    def code_bytes(self) -> int:
        """Bytes of codes, or of values, of a cached token."""
        return sum(stream.width * form.bits // 8 for stream, form in self.streams)

    @property
    def token_bytes(self) -> int:
        """Bytes of a cached token, scales included."""
        return sum(token_bytes(stream) for stream, _ in self.streams)

    def _without_rope(self) -> Variant:
        """An append whose keys come turned."""
        layouts = ("FIRST", "SECOND", "THIRD")
        constants = {**self.constants, "TURNED": None}
        arguments = {**self.arguments, "queries": None, "turners": None}
        for name in layouts:
            part, given = constants[name], arguments[name.lower()]
            if part is not None and part.ROTARY:
                constants[name] = part._replace(ROTARY=0)
                arguments[name.lower()] = tuple(
                    None if field in ("cos", "sin", "cos_row") else x
                    for field, x in zip(append.Stream._fields, given, strict=True)
                )
        return replace(self, constants=constants, arguments=arguments)

    def on(self, backend: str, arch: int | str) -> Variant:
        """The variant that is launched on a target."""
        constants = dict(self.constants)
        if "PTX" in constants:
            constants["PTX"] = backend == "cuda"
        if backend == "hip" and constants.get("TURNED") is not None:  # RoPE is a launch of its own
            return self._without_rope().on(backend, arch)
        if backend == "hip" and constants.get("THIRD") is not None:  # one stream a launch
            constants.update(SECOND=None, THIRD=None)
            alone = {**self.arguments, "second": None, "third": None}
            warps = append.num_warps([constants["FIRST"]])
            return replace(self, constants=constants, arguments=alone, num_warps=warps)
        if not self.tile:
            return replace(self, constants=constants)
        shape = constants["C"]
        streams = [stream for stream, _ in self.streams]
        chosen = Settings(shape.rows, self.tile, self.num_warps, self.num_stages, self.narrow)
        if backend != "cuda":
            shape = replace(shape, ptx=False, precision="ieee")
        limit = SHARED_LIMITS[str(arch) if backend != "cuda" else f"sm_{arch}"]
        if self.choose is not None:
            major = int(arch) // 10 if backend == "cuda" else 0
            chosen = extend_within(self.choose(major=major), streams, limit)
        elif backend != "cuda":
            rows = shape.per_lane * shape.groups * shape.tokens
            if chosen.num_warps == 1:
                chosen = settings(streams, rows, shape.page or SLOTS, warp=False)
            chosen = on_amd(chosen)
        else:
            major = int(arch) // 10
            if major == 9:
                chosen = on_hopper(chosen, streams, shape.per_lane * shape.groups * shape.tokens)
            chosen = within(on_generation(chosen, major), streams, limit)
            if shape.balanced:
                chosen = walking(chosen)
        constants["C"] = replace(shape, rows=chosen.rows, tile=chosen.tile, warps=chosen.num_warps)
        return replace(
            self,
            constants=constants,
            values=self.values // self.tile * chosen.tile,
            tile=chosen.tile,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            max_registers=chosen.max_registers,
        )
