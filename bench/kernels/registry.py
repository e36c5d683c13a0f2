"""The measured cases: an op at one shape in several formats, timed in the same rounds.

Grids list their cases by priority, for when time is short. `workloads` makes a case's inputs and calls, `comparators`
what it is compared with, `predict` what is expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from caramba_fast.formats import QUANTIZED_KINDS, resolve
from caramba_fast.ops.attention_call import BALANCED
from caramba_fast.ops.view import Lanes

#: Values that share a scale.
BLOCK = 32
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ATTENTION = ("decode_attention", "decoupled_decode_attention", "extend_attention")
#: Formats of keys and values of caches of these names; every other kind stores both in itself.
LAYOUTS = {"q8": ("q8_channel", "q8_0"), "q4": ("q4_channel", "q4_0")}


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        kinds: formats, each measured; a cache stores K and V in the same, or as in `LAYOUTS`.
        batch, heads, kv_heads, dim: rows, query heads, kv heads, and values of a head.
        kv: tokens cached, the new ones included.
        tokens: new tokens: queries of attention, tokens to append.
        dtype: of the queries, or of the unquantized side.
        key_dims: values of a head of each key stream where they differ from ``dim``.
        window: tokens a query sees, itself included; 0 for all.
        short: tokens cached in every row but the first, for rows of different lengths; 0 for ``kv``.
        num_splits: of decode attention, as the op takes it.
        threads: CPU threads; 0 for as many as torch has.
        goal: what the case is there to show.
    """

    op: str
    kinds: tuple[str, ...]
    batch: int
    heads: int
    kv_heads: int
    dim: int
    kv: int
    tokens: int = 1
    dtype: str = "fp16"
    key_dims: tuple[int, ...] = ()
    window: int = 0
    threads: int = 0
    goal: str = ""
    short: int = 0
    num_splits: int = 0

    @property
    def name(self) -> str:
        """Name of the case in files; independent of its formats and its goal."""
        keys = "".join(f"{dim}+" for dim in self.key_dims)
        parts = [
            self.op, f"B{self.batch}", f"H{self.heads}/{self.kv_heads}", f"D{keys}{self.dim}",
            f"KV{self.kv}", f"T{self.tokens}", self.dtype,
        ]  # fmt: skip
        parts += [f"window{self.window}"] if self.window else []
        parts += [f"threads{self.threads}"] if self.threads else []
        parts += [f"others{self.short}"] if self.short else []
        parts += [f"splits{self.num_splits}"] if self.num_splits else []
        return " ".join(parts)

    @property
    def dims(self) -> tuple[int, ...]:
        """Values of a head in every stream, keys first."""
        return (*(self.key_dims or (self.dim,)), self.dim)

    @property
    def lanes(self) -> Lanes:
        """How the kv heads are arranged in lanes."""
        return Lanes.of(self.kv_heads, *self.dims)

    @property
    def seen(self) -> int:
        """Cached tokens visible to the new ones."""
        return min(self.kv, self.window + self.tokens - 1) if self.window else self.kv

    @property
    def read(self) -> int:
        """Cached tokens read, over all rows."""
        return self.seen + (self.batch - 1) * (self.short or self.seen)

    def token_bytes(self, kind: str) -> int:
        """Bytes of one token in all streams, scales included."""
        lanes = self.lanes
        widths = [lanes.heads_per_lane * dim for dim in self.dims]
        formats = [resolve(name) for name in formats_of(kind, len(widths))]
        return lanes.count * sum(
            form.bytes_per_vector(width, BLOCK) for form, width in zip(formats, widths, strict=True)
        )

    def moved_bytes(self, kind: str) -> int:
        """The fewest bytes the op can move: attention reads what it sees, scales included."""
        if self.op in ATTENTION:
            return self.read * self.token_bytes(kind)
        width = DTYPES[self.dtype].itemsize * self.kv_heads
        if self.op == "append_":
            given = sum(self.dims) * width + self.token_bytes(kind)
            return self.batch * self.tokens * given
        stored = self.kv_heads * resolve(kind).bytes_per_vector(self.dim, BLOCK)
        return self.batch * self.kv * (self.dim * width + stored)


def formats_of(kind: str, streams: int) -> tuple[str, ...]:
    """The storage format of each stream, keys first."""
    keys, values = LAYOUTS.get(kind, (kind, kind))
    return (*[keys] * (streams - 1), values)


def _conversions(sizes: tuple[tuple[int, int], ...], dtypes: tuple[str, ...]) -> Iterator[Case]:
    """quantize and dequantize of (batch, tokens) of 8 heads of 128."""
    for (batch, kv), dtype, op in product(sizes, dtypes, ("quantize", "dequantize")):
        yield Case(op, QUANTIZED_KINDS, batch, 8, 8, 128, kv, dtype=dtype)


CUDA_KINDS = ("fp16", "q8", "q4", "q8_0", "q4_0", "nf4")
CUDA_HEADS = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (16, 2, 64))
CUDA_BATCHES, CUDA_LENGTHS, CUDA_TOKENS = (1, 8, 32), (1024, 4096, 16384, 32768, 131072), (1, 4, 8)
#: (batch, KV, T, heads, goal): each goal is tested by a case of its own, the most telling first.
_CORE = (
    (8, 32768, 1, 0, "fp16 >= 85% of the bandwidth, q8 >= 1.7x and q4 >= 2.8x the best fp16, at 256K tokens"),
    (1, 32768, 1, 0, "q4 >= 1.5x at batch 1"),
    (8, 32768, 8, 0, "T = 8 costs at most 1.3x T = 1"),
    (1, 1024, 1, 0, "never slower than fp16: the smallest point, mostly launches"),
    (32, 32768, 1, 0, "q4 >= 2.8x where others reach 1.5x"),
    (1, 16384, 1, 0, "q8 >= 1.7x from KV 16K on"),
    (1, 131072, 1, 0, "one long row: splits fill the GPU"),
    (1, 32768, 8, 0, "T = 8 at batch 1"),
    (8, 32768, 1, 1, "eight query heads a kv head"),
    (8, 32768, 8, 1, "64 query rows: arithmetic, not bytes"),
    (8, 32768, 1, 2, "one query head a kv head: 15 of 16 rows are padding"),
    (8, 32768, 1, 3, "D 64"),
    (1, 4096, 1, 0, "never slower than fp16"),
    (8, 4096, 1, 0, "never slower than fp16"),
    (32, 1024, 1, 0, "many short rows"),
    (1, 1024, 8, 0, "the smallest point, T = 8"),
    (8, 32768, 4, 0, "T = 4"),
    (32, 4096, 4, 0, "T = 4, short rows"),
    (8, 131072, 1, 0, "the longest at a batch"),
    (32, 16384, 1, 0, "q8 >= 1.7x, q4 >= 2.8x at 512K tokens"),
    (1, 32768, 1, 1, "eight query heads a kv head, batch 1"),
    (1, 16384, 1, 2, "one query head a kv head, batch 1"),
    (1, 4096, 1, 3, "two kv heads of 64: the fewest bytes a token"),
    (32, 16384, 8, 3, "D 64, 64 query rows"),
)  # fmt: skip
#: Bytes of KV in fp16 above which the formats of a case do not fit into memory together.
_TOGETHER = 40e9


def cuda_core() -> tuple[Case, ...]:
    """24 cases of decode attention, each there for a goal."""
    return tuple(
        Case("decode_attention", CUDA_KINDS, batch, *CUDA_HEADS[heads], kv, tokens, goal=goal)
        for batch, kv, tokens, heads, goal in _CORE
    )


def cuda_ops() -> tuple[Case, ...]:
    """The other ops, windows and decoupled attention."""
    decode = Case("decode_attention", CUDA_KINDS, 8, *CUDA_HEADS[0], 32768, dtype="fp16")
    both = tuple(kind for kind in CUDA_KINDS if kind != "fp16")
    return (
        *_conversions(((8, 32768), (1, 4096)), ("fp16",)),
        *(replace(decode, op="append_", batch=batch, kv=4096, goal="one launch") for batch in (1, 8)),
        replace(decode, op="extend_attention", kinds=both, batch=1, kv=33280, tokens=512,
                goal="at most 1.3x flash SDPA over fp16"),
        *(replace(decode, kv=kv, window=4096, goal="cost follows the window") for kv in (32768, 131072)),
        *(replace(decode, batch=32, kv=65536, short=1024, num_splits=splits, goal="a long row among short ones")
          for splits in (BALANCED, 0)),
        replace(decode, op="decoupled_decode_attention", heads=16, kv_heads=16, key_dims=(8, 32), dim=64),
    )  # fmt: skip


def cuda_rest() -> Iterator[Case]:
    """The grid without its core."""
    core = {case.name for case in cuda_core()}
    for heads, kv, batch, tokens in product(CUDA_HEADS, CUDA_LENGTHS, CUDA_BATCHES, CUDA_TOKENS):
        case = Case("decode_attention", CUDA_KINDS, batch, *heads, kv, tokens)
        if case.name not in core:
            yield case


CPU_KINDS = ("fp16", "bf16", "q8", "q4", "q8_0", "q4_0", "nf4")
SOME_KINDS = ("fp16", "q8", "q4", "q8_0", "q4_0", "nf4")


def cpu() -> tuple[Case, ...]:
    """The CPU grid: lengths and batches, then head sizes, query tokens, a window, DBA, one thread."""
    base = Case("decode_attention", CPU_KINDS, 1, 32, 8, 128, 32768, dtype="fp32")
    some = replace(base, kinds=SOME_KINDS)
    return (
        base,
        replace(base, kv=4096),
        replace(base, kv=128, goal="a call costs no more than SDPA's"),
        replace(base, op="append_", kinds=SOME_KINDS, kv=4096, goal="at most 10 us"),
        *_conversions(((1, 32768),), ("fp32", "fp16")),
        *(replace(some, tokens=tokens) for tokens in (4, 8, 16)),
        replace(some, threads=1),
        replace(some, window=1024),
        *(replace(some, kv=4096, dim=dim) for dim in (64, 80, 96, 256)),
        *(replace(some, op="decoupled_decode_attention", heads=16, kv_heads=16, key_dims=(8, 32), dim=64, kv=kv)
          for kv in (4096, 32768)),
        replace(some, batch=8, kv=128),
        replace(some, batch=8, kv=4096),
        replace(some, batch=8),
        replace(base, op="extend_attention", kinds=("q4_0",), kv=33280, tokens=512,
                goal="at most 1.2x SDPA over fp32"),
        *(replace(base, op="extend_attention", kinds=(dtype,), kv=tokens, tokens=tokens, dtype=dtype,
                  goal="a prompt: faster than SDPA") for tokens in (512, 4096) for dtype in ("fp32", "bf16")),
    )  # fmt: skip


def quick(device: str) -> tuple[Case, ...]:
    """A grid that takes about a minute on a CPU."""
    if device == "cuda":
        return cuda_core()[:2]
    base = Case("decode_attention", CPU_KINDS, 1, 32, 8, 128, 4096, dtype="fp32")
    return (
        base,
        replace(base, kv=128),
        replace(base, kv=16384, kinds=SOME_KINDS),
        replace(base, op="append_", kinds=SOME_KINDS),
        *_conversions(((1, 8192),), ("fp32", "fp16")),
    )


def tiny() -> tuple[Case, ...]:
    """One small case per op: checks the benchmark itself, interpreted kernels included."""
    base = Case("decode_attention", ("fp16", "q4_0"), 1, 4, 2, 32, 128, dtype="fp32")
    return (
        base,
        replace(base, batch=3, kv=160, short=32, num_splits=BALANCED, kinds=("q4", "q8_0")),
        replace(base, tokens=2, window=40, kinds=("q8_0", "q8", "q4")),
        replace(base, op="decoupled_decode_attention", kinds=("nf4",), heads=4, kv_heads=4, key_dims=(8, 16)),
        replace(base, op="append_", kinds=("fp16", "q4_0", "q4")),
        replace(base, op="extend_attention", kinds=("q4_0",), heads=2, kv_heads=1, kv=96, tokens=33),
        replace(base, op="extend_attention", kinds=("bf16",), heads=2, kv_heads=1, kv=96, tokens=96, dtype="bf16"),
        Case("quantize", ("q4_0",), 1, 2, 2, 32, 64, dtype="fp32"),
        Case("dequantize", ("q4_0",), 1, 2, 2, 32, 64, dtype="fp32"),
    )  # fmt: skip


def _split(case: Case) -> Iterator[Case]:
    """The case, or one per quantized format beside fp16 where they do not fit into memory together."""
    if case.batch * case.kv * case.token_bytes("fp16") < _TOGETHER:
        yield case
        return
    for kind in case.kinds[1:]:
        yield replace(case, kinds=(case.kinds[0], kind))


GRIDS = ("quick", "tiny", "core", "full", "cpu")


def cases(grid: str, device: str) -> list[Case]:
    """The cases of a grid by priority; ValueError for a grid of the other device."""
    if grid in ("core", "full") and device != "cuda":
        raise ValueError(f"grid {grid!r} is for cuda; cpu, quick and tiny run on a {device}")
    if grid == "cpu" and device != "cpu":
        raise ValueError(f"grid 'cpu' is for the CPU; core, full, quick and tiny run on {device}")
    found: dict[str, tuple[Case, ...]] = {
        "quick": quick(device) if grid == "quick" else (),
        "tiny": tiny(),
        "core": (*cuda_core(), *cuda_ops()),
        "full": (*cuda_core(), *cuda_ops(), *cuda_rest()),
        "cpu": cpu(),
    }
    return [part for case in found[grid] for part in _split(case)]
