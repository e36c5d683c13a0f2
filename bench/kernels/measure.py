"""Measures one case: predicts, verifies against float64, then times it beside its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from caramba_fast.bench.kernels.comparators import Implementation
from caramba_fast.bench.kernels.parity import described
from caramba_fast.bench.kernels.predict import Machine, predict
from caramba_fast.bench.kernels.registry import Case
from caramba_fast.bench.kernels.table import Row
from caramba_fast.bench.kernels.timing import PROBE, interleaved, probe, quantile, ratio, threads
from caramba_fast.bench.kernels.workloads import Workload, workload
from caramba_fast.ops.registry import BackendError, backends

#: Names of torch's attention on the devices, and the unquantized peers that a quantized cache has to beat.
SDPA = ("sdpa fp32", "sdpa flash", "sdpa")
UNQUANTIZED = (*SDPA, "sdpa bf16", "sdpa fp16", "grouped matmul bf16", "grouped matmul fp32",
               "flash-attn", "FlashInfer")  # fmt: skip
Samples = dict[Implementation, dict[int, float]]


def serving(op: str, device: str) -> str:
    """The backend that serves an op now; "none" if the forced one does not."""
    return next(row.runs for row in backends() if (row.op, row.device) == (op, device))


def measure(case: Case, device: torch.device, machine: Machine, rounds: int) -> list[Row]:
    """The rows of one case; a wrong or absent implementation has a note instead of figures."""
    backend = serving(case.op, device.type)
    names = ("op", "batch", "heads", "kv_heads", "dim", "kv", "tokens", "dtype", "window")
    with threads(case.threads):
        count = torch.get_num_threads() if device.type == "cpu" else ""
        columns: Row = {"case": case.name, **{n: getattr(case, n) for n in names}, "threads": count}
        if backend == "none":
            return [
                {**columns, "implementation": "caramba", "note": f"no backend serves {case.op}"}
            ]
        fast = backend != "reference"
        expected = {kind: predict(case, kind, machine, device.type, fast) for kind in case.kinds}
        work = workload(case, device)
        checked = {kind: _verified(error) for kind, error in work.errors.items()}
        if device.type == "cuda":
            _keep_those_that_run(work)
        # The reference makes its tables on the host when called, which a graph cannot record.
        right = [replace(e, graph=fast) for e in work.ours if "note" not in checked[e.kind]]
        listed = [*right, *work.peers, probe(case.op, device)]
        found = figures(interleaved(listed, device, rounds), own=device.type == "cuda")
    rows = [
        {
            **columns, "kind": entry.kind, "implementation": entry.name, "backend": backend,
            **vars(expected[entry.kind]), **checked[entry.kind],
            **found.get((entry.name, entry.kind), {}),
        }
        for entry in work.ours
    ]  # fmt: skip
    rows += [
        {**columns, "kind": peer.kind, "implementation": peer.name, **found[peer.name, peer.kind]}
        for peer in work.peers
    ]
    rows += [{**columns, "implementation": name, "note": why} for name, why in work.absent.items()]
    return rows


def _keep_those_that_run(work: Workload) -> None:
    """Calls each peer once and drops those that do not run on this GPU."""
    kept = []
    for peer in work.peers:
        try:
            peer.calls[0]()
        except Exception as reason:  # peers may raise anything
            work.absent[peer.name] = f"does not run here: {described(reason)}"[:200]
        else:
            kept.append(peer)
    work.peers[:] = kept


def _verified(error: Callable[[], tuple[float, float]]) -> Row:
    """The error column, with a note if the error is too large or there is no result."""
    try:
        found, allowed = error()
    except (BackendError, NotImplementedError) as reason:
        return {"note": f"does not run: {reason}"}
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # noted; the other formats are measured all the same
        return {"note": f"failed: {described(reason)}"}
    row: Row = {"error": float(f"{found:.2g}")}
    wrong = not found <= allowed  # NaN is wrong
    return {**row, "note": f"wrong: error {found:.2g} > {allowed:.2g}"} if wrong else row


def figures(samples: Samples, own: bool) -> dict[tuple[str, str], Row]:
    """The measured columns by (implementation, kind); ``own``: our fp16 cache is among the unquantized ones to beat."""
    medians = {entry: quantile(list(taken.values()), 0.5) for entry, taken in samples.items()}
    reader = next(entry for entry in samples if entry.name == PROBE)
    bandwidth = reader.moved / medians[reader]
    sdpa = next((entry for entry in samples if entry.name in SDPA), None)
    rivals = [e for e in samples if e.name in UNQUANTIZED or (own and e.ours and e.kind == "fp16")]
    found: dict[tuple[str, str], Row] = {}
    for entry, taken in samples.items():
        row: Row = {"samples": len(taken), "probe_gb_per_s": round(bandwidth * 1e-9, 2)}
        for name, share in (("median", 0.5), ("p20", 0.2), ("p80", 0.8)):
            row[f"{name}_us"] = round(quantile(list(taken.values()), share) * 1e6, 2)
        speed = entry.moved / medians[entry]
        row |= {"gb_per_s": round(speed * 1e-9, 2), "share": round(speed / bandwidth, 3)}
        best = min((e for e in rivals if e is not entry), key=medians.__getitem__, default=None)
        if sdpa is not None and best is not None:
            row["vs_sdpa"] = round(ratio(samples[sdpa], taken), 3)
            row["vs_best"] = round(ratio(samples[best], taken), 3)
            row["best"] = f"{best.name} {best.kind}".strip()
        found[entry.name, entry.kind] = row
    return found
