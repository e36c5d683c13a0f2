"""Compiles every kernel variant without a GPU and checks what comes out.

``python -m caramba_fast.bench.aot [--out FILE] [--targets sm_90 gfx942] [--check]`` writes one CSV
row for each variant and target, beside those FILE holds of other Triton versions; with ``--check``
it ends with status 1 if a variant spills registers or wants more shared memory than the target has.
Must not run under TRITON_INTERPRET=1: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from .binary import loop_instructions, resources
from .variants import VARIANTS, Variant


@dataclass(frozen=True)
class Target:
    """A GPU to compile for; shared_limit: bytes of shared memory (LDS) a block may have."""

    gpu: GPUTarget
    shared_limit: int


#: Limits: CUDA C++ Programming Guide, table of technical specifications; AMD CDNA3 ISA (64 KiB).
TARGETS: dict[str, Target] = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True)
class Row:
    """One variant on one target; the columns of the CSV."""

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
    #: Warp instructions of the main loop for each cached token: instructions * warps / tokens of a tile; 0
    #: for kernels without one, and on AMD.
    loop_per_token: float


def _flattened(
    place: tuple[int, ...], kind: Any, constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    """A run-time argument's type for the signature; notes what is None and what is aligned."""
    if isinstance(kind, tuple):
        return tuple(
            _flattened((*place, i), part, constants, attributes) for i, part in enumerate(kind)
        )
    if kind is None:
        constants[place] = None
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
    return triton.compile(source, target=target, options=options)


def inspect(variant: Variant, target_name: str) -> Row:
    """Compiles one variant and measures the result."""
    target = TARGETS[target_name].gpu
    variant = variant.on(target.backend, target.arch)
    compiled = compile_variant(variant, target)
    used = resources(compiled)
    loop = loop_instructions(compiled) if variant.tile else 0
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
        instructions_per_value=round(used.instructions * threads / variant.values, 2),
        loop_per_token=round(loop * variant.num_warps / max(variant.tile, 1), 1),
        **asdict(used),
    )


def rows(targets: Iterable[str], variants: Iterable[Variant] = VARIANTS) -> Iterator[Row]:
    """Every variant on every target, as they are compiled."""
    listed = tuple(variants)
    for target in targets:
        for variant in listed:
            yield inspect(variant, target)


def problems(row: Row) -> list[str]:
    """What is wrong with a row; empty if nothing is."""
    found = []
    what = ", ".join(
        filter(None, (row.kind, row.dtype, f"block {row.block}", row.fit, row.options))
    )
    where = f"{row.op}[{what}] on {row.target}"
    if row.spills:
        found.append(f"{where} spills registers ({row.spills})")
    limit = TARGETS[row.target].shared_limit
    if row.shared_bytes > limit:
        found.append(f"{where} needs {row.shared_bytes} bytes of shared memory of {limit}")
    return found


def others(path: Path, targets: Iterable[str]) -> list[dict[str, str]]:
    """Rows of an earlier CSV that this run does not measure again: other Tritons or targets."""
    if not path.exists():
        return []
    measured = {(triton.__version__, target) for target in targets}
    with path.open(newline="") as file:
        earlier = list(csv.DictReader(file))
    return [row for row in earlier if (row["triton"], row["target"]) not in measured]


def write_csv(file: TextIO, table: Iterable[dict[str, object]]) -> None:
    """One line a row, with a header."""
    writer = csv.DictWriter(file, [column.name for column in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="caramba_fast.bench.aot", description=__doc__)
    parser.add_argument("--out", type=Path, help="CSV file; standard output without")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--check", action="store_true", help="status 1 on spills or over limits")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    chosen = _arguments(argv)
    if triton.knobs.runtime.interpret:
        print("aot: unset TRITON_INTERPRET to compile kernels", file=sys.stderr)
        return 2
    table = list(rows(chosen.targets))
    measured: list[dict[str, object]] = [asdict(row) for row in table]
    if chosen.out is None:
        write_csv(sys.stdout, measured)
    else:
        kept = others(chosen.out, chosen.targets)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        with chosen.out.open("w", newline="") as file:
            write_csv(file, [*kept, *measured])
    found = [problem for row in table for problem in problems(row)]
    for problem in found:
        print(f"aot: {problem}", file=sys.stderr)
    print(f"aot: {len(table)} kernels compiled, {len(found)} problems", file=sys.stderr)
    return 1 if found and chosen.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
