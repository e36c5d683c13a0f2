"""From the flat arguments of the decode ops to three launches; no host sync, no copy of a cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import resolve

from .launch import EXACT, dense, has_ptx, made, on_device, returned, start
from .merge_splits import LOG2E, merge_kernel
from .occupancy import resident_of
from .splits import MOST_SPLITS, Overheads, Room, assumed_overheads, plan, processors
from .splits_stream import PARTS, Stored
from .tiles_kernel import partials_kernel
from .tiles_layout import (
    WARP_ROWS,
    Settings,
    Shape,
    Stream,
    on_amd,
    on_generation,
    settings,
    within,
)
from .tiles_query import prepare_kernel
from .tuned import Tuned, tuned

#: Widest head, and oldest NVIDIA generation, the kernels were laid out for.
WIDEST_HEAD = 256
OLDEST_CAPABILITY = (8, 0)
#: Room for the splits of any plan, the tail and the sinks; only a caller who asks for more compiles a merge for them.
MOST_PARTS = triton.next_power_of_2(MOST_SPLITS + 2)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The NVIDIA generation; OLDEST_CAPABILITY for anything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return OLDEST_CAPABILITY
    return torch.cuda.get_device_capability(device)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block of this GPU may have; those of sm_80 where there is none."""
    if device.type != "cuda":
        return 163 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@dataclass
class Call:
    """One call of a decode op: streams by name (keys, then v), and the options of the attention."""

    keys: list[Stored]
    value: Stored
    cache_seqlens: Tensor
    n_kv_heads: int
    block_table: Tensor | None = None
    cache_leftpad: Tensor | None = None
    query_lens: Tensor | None = None
    residual_len: int = 0
    s_aux: Tensor | None = None
    window_size: Sequence[int] = (-1, -1)
    num_sink_tokens: int = 0
    softcap: float = 0.0
    num_splits: int = 0
    q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        query = self.keys[0].query
        assert query is not None
        self.q = query
        self.batch, self.heads, self.tokens, self.dim = query.shape
        self.per_lane = self.keys[0].width // self.dim
        self.lanes = self.value.codes.shape[1]
        self.window = int(self.window_size[0])
        self.residual = self.residual_len if "tail" in self.value.options else 0
        self.group = math.lcm(*(stream.group for stream in (*self.keys, self.value)))
        self.sink_len = self.value.options["sink"].shape[2] if "sink" in self.value.options else 0

    @cached_property
    def records(self) -> list[Stream]:
        """The streams' constexpr records, keys first."""
        return [s.record(self.per_lane, self.q.dtype) for s in (*self.keys, self.value)]

    @cached_property
    def tuned(self) -> Tuned:
        """What was measured for such calls, of half-precision queries."""
        if any(record.dot == tl.float32 for record in self.records):
            return Tuned()
        kinds = "/".join(stream.form.name for stream in (*self.keys, self.value))
        rows = self.per_lane * self.heads // self.n_kv_heads * self.tokens
        return tuned(kinds, self.dim, max(WARP_ROWS, triton.next_power_of_2(rows)), self.q.device)

    @cached_property
    def settings(self) -> Settings:
        """Launch settings."""
        rows = self.per_lane * self.heads // self.n_kv_heads * self.tokens
        major = capability(self.q.device)[0]
        chosen = self.tuned.settings
        if chosen is None or self.value.codes.shape[2] % chosen.tile:
            warp = torch.version.hip is None
            chosen = settings(self.records, rows, self.value.codes.shape[2], major, warp)
        if torch.version.hip is not None:
            return on_amd(chosen)
        chosen = on_generation(chosen, major)
        return within(chosen, self.records, shared_memory(self.q.device))

    @cached_property
    def shape(self) -> Shape:
        """The other constexpr record."""
        size, paged = self.value.codes.shape[2], self.block_table is not None
        return Shape(
            groups=self.heads // self.n_kv_heads, tokens=self.tokens, heads=self.n_kv_heads,
            per_lane=self.per_lane, rows=self.settings.rows, tile=self.settings.tile,
            page=size if paged else 0, masked=not paged and size % self.settings.tile != 0,
            sink_len=self.sink_len, window=self.window >= 0,
            kept=self.window >= 0 and self.num_sink_tokens > 0, softcap=self.softcap > 0,
            tail=self.residual > 0 or self.group > 1, ptx=has_ptx(),
            precision="tf32x3" if has_ptx() else "ieee", group=self.group,
            warps=self.settings.num_warps,
        )  # fmt: skip

    @property
    def row_groups(self) -> int:
        """Programs that share a lane's queries."""
        return triton.cdiv(self.per_lane * self.shape.groups * self.tokens, self.shape.rows)

    @property
    def sides(self) -> int:
        """Parts a lane has besides its codes: the tail, the sinks."""
        return self.shape.tail + (self.shape.sink_len > 0)

    def plan(self) -> tuple[int, int]:
        """Most splits, and tiles each has at least."""
        slots = self.value.codes.shape[2]
        if self.block_table is not None:
            slots *= self.block_table.shape[1]
        if self.window >= 0:
            slots = min(slots, self.window + self.tokens + self.num_sink_tokens + self.shape.tile)
        programs = self.batch * self.lanes * self.row_groups
        resident = self.resident(partials_kernel, 1, 1) if self.num_splits <= 0 else 1
        room = Room(processors(self.q.device), resident, programs * self.sides)
        costs, warps = self.overheads, self.shape.warps
        return plan(slots, self.shape.tile, programs, room, self.num_splits, costs, warps)

    @property
    def overheads(self) -> Overheads:
        """What programs and merging cost, in tiles."""
        if self.tuned.overheads is not None:
            return self.tuned.overheads
        packed = all(stream.form.quantized for stream in (*self.keys, self.value))
        return assumed_overheads(self.shape.tile, packed, self.shape.warps)

    def resident(self, kernel: Any, *last: Any) -> int:
        """Programs of a kernel that an SM runs at once: as tuned, or by what the compiled kernel uses.

        Args:
            last: its last arguments (`_arguments`); a dtype stands for a tensor that is not made yet.
        """
        if self.tuned.resident is not None:
            return self.tuned.resident
        return resident_of(
            (*self.records, self.shape, self.settings), self.q.device, kernel,
            lambda: self._arguments(torch.float32, torch.float32, *last), **self._compile_options,
        )  # fmt: skip

    @cached_property
    def queries(self) -> list[tuple[Any, ...]]:
        """What `_prepared` makes of each."""
        return [self._prepared(stream) for stream in self.keys]

    def run(self) -> tuple[Tensor, Tensor]:
        """The launches."""
        return self._merged(*self._partials())

    def _prepared(self, stream: Stored) -> tuple[Any, ...]:
        """(query, strides, factor) of a key stream, rotated if it is."""
        factor = stream.factor if self.softcap > 0 else stream.factor * LOG2E.value
        given = stream.query
        assert given is not None
        if not stream.options.get("rotate", False):
            return (*stream.strided_query, factor)
        rows, dim = self.heads * self.tokens, given.shape[3]
        out = made(given, (self.batch, rows, dim), torch.float32)
        start(
            prepare_kernel, (rows, self.batch),
            *stream.strided_query, out, self.tokens, DIM=dim, PADDED=triton.next_power_of_2(dim)
        )  # fmt: skip
        return (out, rows * dim, self.tokens * dim, dim, factor)

    def _partials(self) -> tuple[Tensor, Tensor]:
        """Partial outputs (B, H_q * T, programs, D_v) and their base-2 lse."""
        splits, least = self.plan()
        in_all = splits + self.sides
        partial, sums = self._room(self.batch, self.heads * self.tokens, in_all)
        grid = (in_all, self.lanes * self.row_groups, self.batch)
        arguments = self._arguments(partial, sums, splits, least)
        start(partials_kernel, grid, *arguments, **self._compile_options)
        return partial, sums

    def _arguments(self, partial: Any, sums: Any, splits: Any, least: Any) -> tuple[Any, ...]:
        """Those of the kernel that leaves partial results."""
        return (
            *self._read, *self._table, partial, sums, *self._limits, splits, least, self.tokens, self.softcap,
            *self._constants,
        )  # fmt: skip

    @property
    def _compile_options(self) -> dict[str, int]:
        options = {"num_warps": self.settings.num_warps, "num_stages": self.settings.num_stages}
        if self.settings.max_registers:
            options["maxnreg"] = self.settings.max_registers
        return options

    def _room(self, *places: int) -> tuple[Tensor, Tensor]:
        """Partial outputs (*places, D_v) and their lse, not yet written."""
        partial = made(self.q, (*places, self.records[-1].dim), torch.float32)
        return partial, made(partial, places)

    @property
    def _read(self) -> tuple[Any, ...]:
        """What a kernel reads but block tables: queries, streams, tails, sinks, lengths."""
        streams = [self.keys[0], self.keys[1] if len(self.keys) > 1 else None, self.value]
        sides = [
            tuple(None if s is None or part not in s.options else s.options[part] for s in streams)
            for part in ("tail", "sink")
        ]
        return (
            sum(self.queries, ()) + (() if streams[1] else (None,)),
            tuple(None if s is None else s.pointers for s in streams), *sides, self._lengths,
        )  # fmt: skip

    @property
    def _lengths(self) -> tuple[Tensor | None, ...]:
        return self.cache_seqlens, self.cache_leftpad, self.query_lens

    @property
    def _table(self) -> tuple[Any, ...]:
        table = self.block_table
        return table, 0 if table is None else table.stride(0)

    @property
    def _limits(self) -> tuple[int, ...]:
        """The window, tokens kept in front of it, residual_len; slots of the cache, and of the tail."""
        ring = self.value.options["tail"].shape[2] if self.shape.tail else 0
        slots = self.value.codes.shape[2]
        return self.window, self.num_sink_tokens, self.residual, slots, ring

    @property
    def _constants(self) -> tuple[Any, ...]:
        k, *g, v = self.records
        geo = g[0] if g else None
        return k, geo, v, k.side, None if geo is None else geo.side, v.side, self.shape

    def _merged(
        self, partial: Tensor, sums: Tensor, schedule: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """out and lse; with a ``schedule`` partial results lie as it says."""
        dim, in_all = partial.shape[-1], sums.shape[-1] if schedule is None else 0
        out = made(self.q, (self.batch, self.heads, self.tokens, dim))
        lse = made(sums, (self.batch, self.heads, self.tokens))
        key = self.keys[0]
        geo = self.keys[1] if len(self.keys) > 1 else Stored(key.codes, None, key.form, {})
        widest = max(self.dim, 0 if geo.query is None else geo.query.shape[3])
        start(
            merge_kernel, (self.heads * self.tokens, self.batch),
            partial, sums, out, lse, self.cache_seqlens, self.query_lens, *key.strided_query,
            *geo.strided_query, key.null, geo.null, self.value.null, self.s_aux, key.factor,
            geo.factor, self.softcap, in_all, self.tokens, schedule, GROUPS=self.shape.groups,
            K_DIM=self.dim, G_DIM=0 if geo.query is None else geo.query.shape[3], DIM=dim,
            PADDED=triton.next_power_of_2(dim), K_PADDED=triton.next_power_of_2(widest),
            MOST=max(MOST_PARTS, triton.next_power_of_2(in_all)), SOFTCAP=self.softcap > 0,
            ROTATE=self.value.options.get("rotate", False), C=None if schedule is None else self.shape,
            **EXACT,  # threads that hold the same sum must have rounded it alike: several store it
        )  # fmt: skip
        returned(out, lse)
        return out, lse


#: `launch`, or what takes the same arguments.
Launch = Callable[..., tuple[Tensor, Tensor]]


def launch(
    queries: Mapping[str, Tensor],
    stored: Mapping[str, tuple[Tensor, Tensor | None, str]],
    cache_seqlens: Tensor,
    factors: Mapping[str, float | None],
    kind_of_call: type[Call] = Call,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Runs one attention op.

    Args:
        queries, factors: by key stream.
        stored: codes, scales and kind of each stream, keys first, then v.
        kind_of_call: how the launches are made.
        options: the op's keyword arguments; those of streams by their names.

    Raises:
        NotImplementedError: what these kernels cannot serve, and what can.
    """
    streams = {}
    for name, (codes, scales, kind) in stored.items():
        own = {part: options.pop(f"{name}_{part}", None) for part in PARTS}
        own = {part: dense(x) for part, x in own.items() if x is not None}
        own["rotate"] = options.pop(f"rotate_{name}", False)
        null = dense(options.pop(f"null_{name}", None))
        streams[name] = Stored(codes, scales, resolve(kind), own, null=null)
    for name, q in queries.items():
        given = factors[name]
        streams[name].query = q if q.stride(3) == 1 else q.contiguous()
        streams[name].factor = q.shape[3] ** -0.5 if given is None else given
    _refuse(queries, streams)
    options = {n: dense(x) if isinstance(x, Tensor) else x for n, x in options.items()}
    cache_seqlens = cache_seqlens.contiguous()
    call = kind_of_call([streams[name] for name in queries], streams["v"], cache_seqlens, **options)
    with on_device(call.q):
        return call.run()


def _refuse(queries: Mapping[str, Tensor], streams: Mapping[str, Stored]) -> None:
    found = [problem for name, stream in streams.items() for problem in stream.problems(name)]
    for name, q in queries.items():
        if q.shape[3] > WIDEST_HEAD:
            found.append(f"head_dim of {name} is {q.shape[3]}; up to {WIDEST_HEAD} is supported")
    major, minor = capability(next(iter(queries.values())).device)
    if (major, minor) < OLDEST_CAPABILITY:
        found.append(f"the GPU is sm_{major}{minor}; sm_80 and newer are supported")
    if found:
        raise NotImplementedError(
            f"the Triton kernels cannot run this: {'; '.join(found)} (use_backend('reference') can)"
        )
