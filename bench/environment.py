"""Where a figure comes from: device, versions, commit. Every row of a CSV carries it."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def environment(device: torch.device) -> dict[str, str]:
    """Columns that name the machine and the code; "" where something is unknown."""
    return {
        "device": device_name(device),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "caramba_fast": _version("caramba-fast"),
        "commit": _commit(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the source tree this file lies in, "+" after it if the tree was changed."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
