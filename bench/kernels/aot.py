"""Compiles every kernel variant without a GPU and checks what comes out.

``python -m caramba_fast.bench.kernels.aot [--out FILE] [--targets sm_90 gfx942] [--against FILE]`` writes one CSV
row for each variant and target. ``--against`` is the gate: it ends with status 1 if a row has a problem
(`caramba_fast.bench.kernels.aot`), or is worse than FILE's. ``--shard I/N`` takes every N-th variant and target. Must
not run under TRITON_INTERPRET=1: interpreted kernels cannot be compiled.

What may not happen to a compiled kernel: the conditions of the ahead-of-time gate.
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from caramba_fast.bench.kernels import binary
from caramba_fast.bench.kernels.cards import PROCESSORS, SHARED_LIMITS, shares
from caramba_fast.bench.kernels.loop import NARROWEST_LOAD, allocations, main_loop, typical
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.variant import Variant
from caramba_fast.bench.kernels.variants import variants
from caramba_fast.bench.out import table_text, write_table
from caramba_fast.formats import CHANNEL_KINDS, QUANTIZED_KINDS
from caramba_fast.kernels.occupancy import Multiprocessor, resident

Key = tuple[str, ...]

#: Columns that tell rows apart.
KEY = ("triton", "target", "op", "kind", "dtype", "block", "fit", "options")
QUANTIZED = {*QUANTIZED_KINDS, *CHANNEL_KINDS}


#: What rows depend on, from the root.
SOURCES = ("kernels/triton/*.py", "caramba_fast/formats.py", "bench/kernels/variant*.py", "bench/kernels/binary.py",
           "bench/kernels/loop.py", "bench/kernels/cards.py")  # fmt: skip


@functools.cache
def sources(patterns: tuple[str, ...] | None = None) -> str:
    """Eight digits over files, by default what rows depend on: a row that has them is up to date.

    Comments and docstrings are left out.
    """
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in (path for pattern in patterns or SOURCES for path in sorted(root.glob(pattern))):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
                node
            ):
                node.body = node.body[1:]
        digest.update(f"{path.name} {ast.dump(tree)}".encode())
    return digest.hexdigest()[:8]


def identity(columns: Mapping[str, object]) -> Key:
    """What tells a row apart from others."""
    return tuple(str(columns[name]) for name in KEY)


def key(row: Row) -> Key:
    """What a row is found by."""
    return identity(vars(row))


def by_key(table: Iterable[Mapping[str, str]]) -> dict[Key, Mapping[str, str]]:
    """Rows of a CSV by what tells them apart."""
    return {identity(row): row for row in table}


#: Bytes of a thread that may spill in decode with keys by channel on sm_90: what they are spilled for brings more there
#: (`tiles_layout.on_hopper`).
FEW_SPILLS = 16


def _spills(row: Row) -> str:
    few = row.target == "sm_90" and row.op == "decode_attention" and "channel" in row.kind
    return f"spills registers ({row.spills})" if row.spills > (FEW_SPILLS if few else 0) else ""


def _shared_memory(row: Row) -> str:
    limit = SHARED_LIMITS[row.target]
    if row.shared_bytes <= limit:
        return ""
    return f"needs {row.shared_bytes} bytes of shared memory of {limit}"


def _matrix(row: Row) -> str:
    return "has no matrix instruction in its main loop" if row.matrix == 0 else ""


def _narrow(row: Row) -> str:
    if row.op.endswith("extend_attention"):  # a load serves a block of queries
        return ""
    if row.narrowest_load is None or QUANTIZED.isdisjoint(row.kind.split("/")):
        return ""
    if row.narrowest_load >= NARROWEST_LOAD:
        return ""
    return f"loads K or V {row.narrowest_load} bytes a thread at a time, not {NARROWEST_LOAD}"


CONDITIONS: tuple[Callable[[Row], str], ...] = (_spills, _shared_memory, _matrix, _narrow)


def problems(row: Row, recorded: Mapping[Key, Mapping[str, str]] | None = None) -> list[str]:
    """What is wrong with a row; empty if nothing is.

    Args:
        row: the row.
        recorded: `by_key` of rows it may not be worse than; a row they lack is wrong as well.
    """
    found = [text for condition in CONDITIONS if (text := condition(row))]
    if recorded is not None:
        found += _worse(row, recorded.get(key(row)))
    what = ", ".join(
        filter(None, (row.kind, row.dtype, f"block {row.block}", row.fit, row.options))
    )
    return [f"{row.op}[{what}] on {row.target}, Triton {row.triton} {text}" for text in found]


#: What may not be more than was recorded.
COUNTED = {
    "loop_per_token": "takes {} instructions a token in its main loop",
    "barriers": "has {} barriers in its main loop",
    "fences": "has {} fences in its main loop",
    "shuffles": "has {} shuffles in its main loop",
    "narrow_shared": "touches shared memory by one or two bytes a thread {} times in its main loop",
    "allocations": "takes shared memory {} times within loops",
}


def _worse(row: Row, earlier: Mapping[str, str] | None) -> list[str]:
    if earlier is None:
        return ["is not recorded (make aot)"]
    found = []
    for name, text in COUNTED.items():
        now, before = getattr(row, name), float(earlier[name] or 0)
        if now is not None and now > before:
            found.append(f"{text.format(now)}, {before:g} recorded")
    if row.programs is not None and row.programs < float(earlier["programs"] or 0):
        found.append(f"runs {row.programs} programs an SM at once, {earlier['programs']} recorded")
    return found


TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
}
#: Targets with less shared memory, and those whose code stands for them where the launch settings are the same: only
#: what is launched otherwise is compiled again.
LIKE = {"sm_89": "sm_80", "sm_120": "sm_100"}


@dataclass(frozen=True)
class Row:
    """One variant on one target; the columns of the CSV. Without a main loop its columns are empty."""

    triton: str
    target: str
    op: str
    kind: str
    dtype: str
    block: int
    fit: str
    options: str
    num_warps: int
    registers: int
    spills: int
    shared_bytes: int
    instructions: int
    #: Thread instructions for each value: instructions * threads / values of a program.
    instructions_per_value: float
    #: Warp (or wave) instructions of the main loop for each cached token of a lane: instructions * warps /
    #: tokens of a tile, times the programs that read the token for different query rows. Of extend attention for the
    #: query rows of one program.
    loop_per_token: float | None = None
    #: Instructions of the main loop that multiply matrices.
    matrix: int | None = None
    #: Bytes a thread loads at once of K and V in the main loop: at least, and for most of the bytes.
    narrowest_load: int | None = None
    typical_load: int | None = None
    #: Programs an SM runs at once, by registers, shared memory and threads (`occupancy.resident`); empty on AMD.
    programs: int | None = None
    #: Instructions of the main loop that cost more than a slot (`loop.COSTLY`).
    barriers: int | None = None
    fences: int | None = None
    shuffles: int | None = None
    narrow_shared: int | None = None
    #: Times that loops take shared memory for a tile.
    allocations: int | None = None
    #: Share of the bandwidth that loop_per_token allows on cards of this target (`cards.CARDS`).
    a100: float | None = None
    h100: float | None = None
    h200: float | None = None
    rtx4090: float | None = None
    l4: float | None = None
    #: `sources` when it was made.
    source: str = ""

    @classmethod
    def read(cls, columns: Mapping[str, str]) -> Row:
        """One from a CSV."""
        kinds = {"int": int, "float": float, "str": str}
        given: dict[str, Any] = {
            column.name: kinds[str(column.type).split()[0]](columns[column.name])
            for column in fields(cls)
            if columns[column.name] or column.type == "str"
        }
        return cls(**given)


def _flattened(
    place: tuple[int, ...], kind: Any, constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    """A run-time argument's type for the signature; notes what is None or a number, and what is aligned."""
    if isinstance(kind, tuple):
        parts = [_flattened((*place, i), x, constants, attributes) for i, x in enumerate(kind)]
        return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)
    if kind is None or isinstance(kind, int):
        constants[place] = kind
        return "constexpr"
    if kind.startswith("*") or kind.endswith("!"):
        attributes[place] = [["tt.divisibility", 16]]
    return kind.removesuffix("!")


def compile_variant(variant: Variant, target: GPUTarget) -> CompiledKernel:
    """Compiles for a target as a launch with 16-byte aligned pointers and strides would."""
    given = variant.constants
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for i, name in enumerate(variant.kernel.arg_names):
        if name in given:
            signature[name], constants[(i,)] = "constexpr", given[name]
        else:
            kind = variant.arguments[name]
            signature[name] = _flattened((i,), kind, constants, attributes)
    source = ASTSource(variant.kernel, signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fusion,
    }
    if variant.max_registers and target.backend == "cuda":
        options["maxnreg"] = variant.max_registers
    return triton.compile(source, target=target, options=options)


def inspect(variant: Variant, target_name: str) -> Row:
    """Compiles one variant and measures the result."""
    target = TARGETS[target_name]
    variant = variant.on(target.backend, target.arch)
    compiled = compile_variant(variant, target)
    found = binary.inspect(compiled)
    threads = variant.num_warps * target.warp_size
    return Row(
        triton=triton.__version__,
        target=target_name,
        op=variant.op,
        kind=variant.kind,
        dtype=variant.dtype,
        block=variant.block,
        fit=variant.fit,
        options=variant.options,
        num_warps=variant.num_warps,
        registers=found.registers,
        spills=found.spills,
        shared_bytes=found.shared_bytes,
        instructions=len(found.lines),
        instructions_per_value=round(len(found.lines) * threads / variant.values, 2),
        programs=_programs(target_name, found.registers, found.shared_bytes, variant.num_warps),
        **(_loop_columns(variant, target_name, found, compiled) if variant.tile else {}),
    )


def _programs(target: str, registers: int, shared: int, warps: int) -> int | None:
    if target not in PROCESSORS:
        return None
    return resident(registers, shared, warps, Multiprocessor(*PROCESSORS[target]))


def _loop_columns(
    variant: Variant, target: str, found: binary.Binary, compiled: CompiledKernel
) -> dict[str, Any]:
    loop = main_loop(found)
    threads = variant.num_warps * TARGETS[target].warp_size
    widths = loop.cover(variant.code_bytes * variant.tile / threads)
    per_token = loop.instructions * variant.num_warps / variant.tile * variant.passes
    return {
        "loop_per_token": round(per_token, 1),
        "matrix": loop.matrix,
        "narrowest_load": min(widths, default=0),
        "typical_load": typical(widths),
        **loop.costly,
        "allocations": allocations(compiled.asm["ttgir"]),
        # A prompt is limited by products: no share of the bandwidth is its own.
        **({} if variant.choose else shares(target, variant.token_bytes, per_token)),
    }


def rows(targets: Iterable[str], shard: Shard = Shard()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Every variant on every target, as they are compiled."""
    done: dict[tuple[str, int], Row] = {}
    chosen = {
        (target, i)
        for target, i in shard.of([(t, i) for t in targets for i in range(len(variants()))])
    }
    for target in targets:
        for i, variant in enumerate(variants()):
            if (target, i) not in chosen:
                continue
            like = _stands_for(target, variant)
            if like is None:
                row = inspect(variant, target)
            else:
                row = done[like, i] if (like, i) in done else inspect(variant, like)
                own = (
                    {}
                    if variant.choose
                    else shares(target, variant.token_bytes, row.loop_per_token)
                )
                used = (row.registers, row.shared_bytes, row.num_warps)
                row = replace(row, target=target, programs=_programs(target, *used), **own)
            done[target, i] = row
            yield replace(row, source=sources())


def _stands_for(target: str, variant: Variant) -> str | None:
    """The target whose code for ``variant`` is this one's as well, if another's is."""
    like = LIKE.get(target)
    if like is None:
        return None
    mine, other = (variant.on(TARGETS[t].backend, TARGETS[t].arch) for t in (target, like))
    return like if mine == other else None


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV this module wrote; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.kernels.aot", description=__doc__
    )
    parser.add_argument("--out", type=Path, help="CSV file; standard output without")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument(
        "--against", type=Path, help="CSV of recorded rows; status 1 if one is worse"
    )
    parser.add_argument("--shard", type=Shard.parse, default=Shard(), metavar="I/N")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    chosen = _arguments(argv)
    if triton.knobs.runtime.interpret:
        print("aot: unset TRITON_INTERPRET to compile kernels", file=sys.stderr)
        return 2
    recorded = None if chosen.against is None else by_key(read_csv(chosen.against))
    table = list(rows(chosen.targets, chosen.shard))
    measured: list[dict[str, object]] = [asdict(row) for row in table]
    columns = [column.name for column in fields(Row)]
    if chosen.out is None:
        sys.stdout.write(table_text(columns, measured))
    else:
        write_table(chosen.out, columns, measured)
    found = [problem for row in table for problem in problems(row, recorded)]
    for problem in found:
        print(f"aot: {problem}", file=sys.stderr)
    print(f"aot: {len(table)} kernels compiled, {len(found)} problems", file=sys.stderr)
    return 1 if found and recorded is not None else 0


if __name__ == "__main__":
    raise SystemExit(main())
