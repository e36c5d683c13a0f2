"""Environment of a figure: device, versions, commit. Every row of a CSV carries the short form."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import torch

#: Packages whose version matters to a figure.
PACKAGES = ("triton", "numpy", "transformers", "optimum-quanto", "flashinfer-python", "flash-attn")
#: Files a figure depends on, relative to the package's root.
SOURCES = {"caramba_fast": "*.py", "kernels": "*.py", "csrc": "*.[hc]*", "bench": "*.py"}


def environment(device: torch.device) -> dict[str, str]:
    """Columns that identify machine and code; "" where something is unknown."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
        "source": source_hash(),
    }


def details(device: torch.device) -> dict[str, object]:
    """All about the machine and the versions, for the file beside a CSV."""
    found: dict[str, object] = {
        **environment(device),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "caramba_fast": _version("caramba-fast"),
        "packages": {name: _version(name) or "not installed" for name in PACKAGES},
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda,
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "memory_bytes": about.total_memory,
            "l2_bytes": about.L2_cache_size,
        }
    else:
        found |= {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def source_hash(sources: Mapping[str, str] = MappingProxyType(SOURCES)) -> str:
    """Eight hex digits hashed from the files matching ``sources`` (pattern by folder): equal for comparable figures."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder, pattern in sources.items():
        for path in sorted((root / folder).rglob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the source tree this file is in, followed by "+" if the tree was changed."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
