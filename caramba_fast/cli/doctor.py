"""``caramba-fast doctor``: what is installed, what runs where, and why not more."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import caramba_fast
from caramba_fast.ops.registry import ENVIRONMENT_VARIABLE, backends

PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "tokenizers", "pydantic")


def installed_version(package: str) -> str:
    """The version, or that it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def device_lines() -> list[tuple[str, str]]:
    """What torch can compute on here."""
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


def run_doctor(console: Console | None = None) -> None:
    """Prints the tables."""
    console = console or Console()
    facts = Table("what", "found", title="caramba-fast doctor", title_justify="left")
    facts.add_row("caramba-fast", caramba_fast.__version__)
    facts.add_row("python", f"{platform.python_version()} on {platform.system()}")
    for package in PACKAGES:
        facts.add_row(package, installed_version(package))
    for name, value in device_lines():
        facts.add_row(name, value)
    facts.add_row(ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "not set (auto)"))
    console.print(facts)
    served = Table(
        "op", "device", "runs", "why not the others", title="Backends", title_justify="left"
    )
    for status in backends():
        why = "\n".join(f"{name}: {reason}" for name, reason in status.reasons.items())
        served.add_row(status.op, status.device, status.runs, escape(why))
    console.print(served)
