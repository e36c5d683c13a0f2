"""``caramba-fast doctor``: what is installed, which backend runs each op, and why others do not."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import caramba_fast
from caramba_fast.models.packed import why_not_packed
from caramba_fast.ops.registry import (
    ENVIRONMENT_VARIABLE,
    BackendStatus,
    backends,
    on_cuda,
    triton_missing,
)

PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "tokenizers", "pydantic")


def installed_version(package: str) -> str:
    """The installed version, or that it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def device_lines() -> list[tuple[str, str]]:
    """The devices that torch can use here."""
    lines = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    lines.append(("cpu capability", torch.backends.cpu.get_cpu_capability()))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            memory = f"{found.total_memory / 2**30:.0f} GiB"
            lines.append(
                (f"cuda:{index}", f"{found.name}, sm_{found.major}{found.minor}, {memory}")
            )
    else:
        why = (
            "this torch is built without CUDA" if torch.version.cuda is None else "no device found"
        )
        lines.append(("cuda", f"not available: {why}"))
    mps = torch.backends.mps
    why = (
        "not available: this torch is built without MPS"
        if not mps.is_built()
        else "no device found"
    )
    lines.append(("mps", "available" if mps.is_available() else why))
    return lines


def packed_line() -> str:
    """Which weights `pack_weights` takes on this machine, and why not others."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found[str(dtype).removeprefix("torch.")] = why_not_packed(dtype)
    able = ", ".join(name for name, reason in found.items() if reason is None)
    reasons = dict.fromkeys(reason for reason in found.values() if reason is not None)
    return "; ".join([able or "none", *reasons])


def run_doctor() -> None:
    """Prints the tables."""
    console = Console()
    facts = Table("what", "found", title="caramba-fast doctor", title_justify="left")
    facts.add_row("caramba-fast", caramba_fast.__version__)
    facts.add_row("python", f"{platform.python_version()} on {platform.system()}")
    for package in PACKAGES:
        facts.add_row(package, installed_version(package))
    for name, value in device_lines():
        facts.add_row(name, value)
    facts.add_row("packed weights on a CPU", packed_line())
    facts.add_row(ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "not set (auto)"))
    console.print(facts)
    _print_backends(console, "Backends", backends())
    if not torch.cuda.is_available():
        _print_backends(console, "With a CUDA device", on_cuda())
    for line in cuda_lines():
        console.print(escape(line), soft_wrap=False)


def _print_backends(console: Console, title: str, statuses: list[BackendStatus]) -> None:
    served = Table("op", "device", "runs", "why not the others", title=title, title_justify="left")
    for status in statuses:
        why = "\n".join(f"{name}: {reason}" for name, reason in status.reasons.items())
        name = status.op.replace(".", "\n.")  # long names, of per-channel kinds, on two lines
        served.add_row(name, status.device, status.runs, escape(why))
    console.print(served)


def cuda_lines() -> list[str]:
    """What the Triton kernels need, and whether the GPUs here provide it."""
    if triton_missing() is not None:
        return [f"On CUDA every op would run as plain torch: {triton_missing()}."]
    limits = importlib.import_module("caramba_fast.kernels.splits_launch")
    major, minor = limits.OLDEST_CAPABILITY
    needs = (
        f"The Triton kernels need sm_{major}{minor} or newer and head_dim up to {limits.WIDEST_HEAD}; they "
        "refuse anything else with the reason, and use_backend('reference') serves it."
    )
    lines = [needs, "Generator replays decode steps as one CUDA graph where these kernels run."]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_capability(index)
        if torch.version.hip is None and found < limits.OLDEST_CAPABILITY:
            lines.append(f"cuda:{index} is sm_{found[0]}{found[1]}: too old for them.")
    return lines
