"""Measures every case of `registry` on one device: verified first, then timed.

``python -m caramba_fast.bench.run [--device cpu|cuda] [--out CSV] [--quick]`` prints a table and
writes one CSV row for each case and implementation. GB/s count every byte read and written, scales
included; the share is of a torch copy of as many bytes, timed in the same rounds. Ends with status
1 if an implementation does not agree with the reference; such a one is not timed.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from caramba_fast.ops.registry import why_not

from .environment import environment
from .parity import backend_error
from .registry import COPY, WORKLOADS, Case, cases, differences, implementations
from .timing import interleaved, quantile


@dataclass(frozen=True)
class Figure:
    """One case and implementation."""

    op: str
    kind: str
    dtype: str
    shape: str
    block: int
    implementation: str
    median_us: float
    p20_us: float
    p80_us: float
    bytes: int
    gb_per_s: float
    share_of_copy: float


def measure(
    case: Case, backends: list[str], device: torch.device, rounds: int
) -> tuple[list[Figure], list[str]]:
    """The figures of one case, and the backends left out because they are wrong."""
    work = WORKLOADS[case.op](case, device)
    backends = [name for name in backends if why_not(case.op, name, device.type) is None]
    wrong = differences(work, backends)
    right = [name for name in backends if name not in wrong]
    samples = interleaved(implementations(work, right, device), device, rounds)
    copy_s = quantile(samples[COPY], 0.5)
    figures = []
    for name, seconds in samples.items():
        p20, median, p80 = (quantile(seconds, share) for share in (0.2, 0.5, 0.8))
        figures.append(
            Figure(
                **(asdict(case) | {"shape": "x".join(map(str, case.shape))}),
                implementation=name,
                median_us=round(median * 1e6, 2),
                p20_us=round(p20 * 1e6, 2),
                p80_us=round(p80 * 1e6, 2),
                bytes=work.moved_bytes,
                gb_per_s=round(work.moved_bytes / median * 1e-9, 2),
                share_of_copy=round(copy_s / median, 3),
            )
        )
    return figures, wrong


def usable_backends(device: torch.device) -> Iterator[str]:
    """The backends worth timing on a device; prints why another is left out."""
    for name in ("reference", "cpp", "triton"):
        reason = backend_error(name, device)
        if name == "triton" and device.type == "cpu":
            reason = "interpreted kernels are for tests, not for timing"
        if reason is None:
            yield name
        else:
            print(f"{name} is not timed: {reason}")


def print_figures(figures: list[Figure]) -> None:
    """One line each, columns aligned."""
    for row in figures:
        print(
            f"{row.op:<17}{row.kind:<6}{row.dtype:<6}{row.shape:<16}{row.implementation:<16}"
            f"{row.median_us:>12.1f} us  [{row.p20_us:.1f}, {row.p80_us:.1f}]"
            f"{row.gb_per_s:>10.1f} GB/s{row.share_of_copy:>8.1%} of copy",
            flush=True,
        )


def write_csv(path: Path, figures: list[Figure], extra: dict[str, str]) -> None:
    """All figures, each with the environment's columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(row) | extra for row in figures]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="caramba_fast.bench.run", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    chosen = _arguments(argv)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("run: torch finds no CUDA device", file=sys.stderr)
        return 2
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    extra = environment(device)
    print(", ".join(f"{name} {value}" for name, value in extra.items() if value))
    backends = list(usable_backends(device))
    figures: list[Figure] = []
    status = 0
    for case in cases(device, chosen.quick):
        measured, wrong = measure(case, backends, device, rounds=7 if chosen.quick else 21)
        print_figures(measured)
        figures += measured
        for name in wrong:
            print(f"run: {name} disagrees with the reference on {case}", file=sys.stderr)
            status = 1
    if chosen.out is not None:
        write_csv(chosen.out, figures, extra)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
