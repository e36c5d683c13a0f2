"""Predicts the time of each case before it is measured.

``python -m caramba_fast.bench.kernels.predict [--check]`` writes bench/kernels/predictions.csv: the CUDA core grid on
an H200. Decode attention reads every stored byte once (the floor) and issues a counted number of instructions per
cached token (bench/results/aot.csv); the slower of the two decides, plus the launches. The first predictions assumed a
copy's bandwidth and half of the issue slots; an H200 reached more of the one and less of the other, as used here.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from caramba_fast.bench.kernels.registry import LAYOUTS, Case, cuda_core, cuda_ops

HERE = Path(__file__).resolve().parent
AOT, PREDICTIONS = HERE.parent / "results" / "aot.csv", HERE / "predictions.csv"


@dataclass(frozen=True)
class Machine:
    """The limits of a machine.

    Attributes:
        bandwidth: bytes read per second.
        issue: warp instructions per second: SMs x 4 schedulers x clock; 0 where instructions are not counted.
        target: its name in aot.csv.
    """

    bandwidth: float
    issue: float = 0.0
    target: str = ""


#: The read bandwidth that a sum reached in bench/results/cuda.csv; 132 SMs at 1.98 GHz.
H200 = Machine(4.58e12, 132 * 4 * 1.98e9, "sm_90")
#: From decode attention of 8 and 32 rows on that H200: share of the bandwidth reached in the middle of a row; share of
#: issue slots filled (dependent steps leave the others empty); seconds of two graph launches, first loads and merge.
EFFICIENCY, ISSUE_SHARE, LATENCY_S = 0.95, 0.38, 7e-6
#: Share of issue slots filled by programs of one warp, which wait for loads alone; they have few rows.
WARP_ISSUE_SHARE, WARP_ROWS, WARP_WIDTH = 0.54, 8, 128
#: Targets of the C++ kernels, as shares of the read bandwidth: 4 bits are bound by instructions.
CPU_SHARE = {
    "fp16": 0.7, "bf16": 0.7, "fp32": 0.7, "q8": 0.75, "q4": 0.7, "q8_0": 0.75, "q4_0": 0.8, "nf4": 0.6,
}  # fmt: skip
CONVERSION_SHARE = {"cuda": 0.75, "cpu": 0.6}
#: The suffix after the head size in aot.csv, by number of query rows.
ROWS = {8: "", 16: ", T 4", 32: ", 32 rows", 64: ", T 16"}


@dataclass(frozen=True)
class Prediction:
    """The predicted columns of a row; None where nothing is predicted."""

    predicted_bytes: int
    predicted_floor_us: float
    predicted_instructions: float | None
    predicted_from: str
    predicted_us: float | None
    predicted_share: float | None


def predict(case: Case, kind: str, machine: Machine, device: str, fast: bool = True) -> Prediction:
    """Predicts ``kind``; ``fast``: a kernel serves it, not the reference."""
    moved = case.moved_bytes(kind)
    floor = moved / machine.bandwidth
    found: tuple[float, str] | None = None
    if (
        not fast
        or case.op in ("append_", "extend_attention")
        or (case.short and not case.num_splits)
    ):
        seconds = None  # bound by launches, by arithmetic, or by the few programs that read the longest row
    elif case.op in ("quantize", "dequantize"):
        seconds = floor / CONVERSION_SHARE[device]
    elif device == "cpu":
        seconds = floor / CPU_SHARE[kind]
    else:
        found = instructions(case, kind, machine.target)
        issued = tiles_tokens(case) * found[0] / machine.issue if found else 0.0
        share = WARP_ISSUE_SHARE if of_a_warp(case, kind) else ISSUE_SHARE
        seconds = max(floor / EFFICIENCY, issued / share) + LATENCY_S
    return Prediction(
        moved, _rounded(floor * 1e6), found[0] if found else None, found[1] if found else "",
        None if seconds is None else _rounded(seconds * 1e6),
        None if seconds is None else round(floor / seconds, 3),
    )  # fmt: skip


def tiles_tokens(case: Case) -> int:
    """Cached tokens times the programs that read each: one per lane and 64 query rows."""
    return case.lanes.count * case.read * -(-query_rows(case) // 64)


def query_rows(case: Case) -> int:
    """Query rows of a lane, padded for the matrix units."""
    rows = case.lanes.heads_per_lane * case.heads // case.kv_heads * case.tokens
    return max(8, 1 << (rows - 1).bit_length())


def of_a_warp(case: Case, kind: str) -> bool:
    """Whether programs are one warp each (`tiles_layout.fits_warp`)."""
    packed = kind not in ("fp16", "bf16", "fp32")
    narrow = case.lanes.heads_per_lane * case.dim <= WARP_WIDTH
    return packed and narrow and query_rows(case) <= WARP_ROWS


def instructions(case: Case, kind: str, target: str) -> tuple[float, str] | None:
    """(warp instructions per cached token and lane, "counted" or "scaled").

    Formats and shapes that were not compiled ahead are scaled: the count of their format at D 128, 16 rows, times what
    the other shape costs q4_0.
    """
    if case.op != "decode_attention":
        return None
    counts, kind = _counts(target), "/".join(LAYOUTS.get(kind, (kind,)))
    base, q4 = counts.get((kind, "D 128")), counts.get(("q4_0", "D 128"))
    if base is None or q4 is None:
        return None
    rows = min(query_rows(case), 64)
    named = f"D {case.dim}{ROWS[rows]}"
    if (kind, named) in counts:
        return counts[kind, named], "counted"
    if ("q4_0", named) in counts:
        return round(base * counts["q4_0", named] / q4, 1), "scaled"
    narrow = counts.get(("q4_0", f"D {case.dim}"), q4) / q4
    more = counts.get(("q4_0", "D 128, 32 rows"), q4) / q4 - 1
    by_rows = counts.get(("q4_0", f"D 128{ROWS[rows]}"), q4 * (1 + more * (rows - 16) / 16)) / q4
    return round(base * narrow * by_rows, 1), "scaled"


@functools.cache
def _counts(target: str) -> dict[tuple[str, str], float]:
    """(kind, options) -> instructions of the main loop per token, with the newest Triton."""
    with AOT.open(newline="", encoding="utf-8") as file:
        rows = [
            row for row in csv.DictReader(file)
            if row["target"] == target and row["op"] == "decode_attention"
            and row["dtype"] == "fp16" and float(row["loop_per_token"] or 0)
        ]  # fmt: skip
    rows.sort(key=lambda row: [int(part) for part in row["triton"].split(".")[:2]])
    return {(row["kind"], row["options"]): float(row["loop_per_token"]) for row in rows}


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


def page() -> str:
    """The contents of bench/kernels/predictions.csv."""
    file = io.StringIO()
    names = ["case", "kind", *Prediction.__dataclass_fields__, "against_fp16", "goal"]
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for case in (*cuda_core(), *cuda_ops()):
        known = {kind: predict(case, kind, H200, "cuda") for kind in case.kinds}
        fp16 = known["fp16"].predicted_us if "fp16" in known else None
        for kind, expected in known.items():
            faster = (
                round(fp16 / expected.predicted_us, 2) if fp16 and expected.predicted_us else None
            )
            row = {"case": case.name, "kind": kind, **expected.__dict__}
            writer.writerow({**row, "against_fp16": faster, "goal": case.goal})
    return file.getvalue()


def main(argv: list[str] | None = None) -> int:
    """Returns 1 with ``--check`` if the file is out of date."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.kernels.predict", description=__doc__
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    if parser.parse_args(argv).check:
        same = PREDICTIONS.exists() and PREDICTIONS.read_text() == page()
        print("predictions.csv is " + ("up to date" if same else "not what this would write"))
        return int(not same)
    PREDICTIONS.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
