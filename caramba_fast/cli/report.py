"""``caramba-fast doctor --report``: information for a bug report, as plain text without private paths."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

import caramba_fast
from caramba_fast.cli.doctor import cuda_lines, device_lines, installed_version
from caramba_fast.ops.registry import FOLDER, VARIABLE, backends, library, load_error
from caramba_fast.policy.plan import processor

#: Packages listed besides those of the package's extras.
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "pydantic", "filelock")
#: Environment variables that affect what runs; no others are shown.
PREFIXES = ("CARAMBA_FAST_", "OMP_", "KMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "TRITON_", "PYTORCH_")
#: Variables whose names match are listed without their value.
SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


def report() -> str:
    """The whole report; the home folder and the user's name are replaced by ~."""
    parts = {
        "Versions": versions(), "System": system(), "Devices": devices(), "Extension": extension(),
        "Backends": backend_lines(), "Environment": environment(), "Extras": extras(),
    }  # fmt: skip
    lines = [f"caramba-fast {caramba_fast.__version__}: report for a bug"]
    for title, found in parts.items():
        lines += ["", f"{title}:", *(f"  {line}" for line in found)]
    return without_home("\n".join(lines))


def without_home(text: str) -> str:
    """The text with ~ for all users' home folders."""
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    return re.sub(r"(/home|/Users)/[^/\s:]+", "~", text)


def versions() -> Iterator[str]:
    """Versions of the package and what it runs on."""
    yield f"caramba-fast {caramba_fast.__version__}"
    yield f"python {platform.python_version()} ({platform.python_implementation()})"
    for package in PACKAGES:
        yield f"{package} {installed_version(package)}"
    yield f"torch built with CUDA {torch.version.cuda}, HIP {torch.version.hip}"


def system() -> Iterator[str]:
    """The operating system, the processor and its threads."""
    yield f"{platform.platform()}, libc {' '.join(platform.libc_ver()).strip() or 'unknown'}"
    yield f"processor {processor()}, {os.cpu_count()} logical cores"
    yield f"instruction set of the kernels: {_instruction_set()}; torch: {torch.backends.cpu.get_cpu_capability()}"
    yield f"threads: {torch.get_num_threads()} within an op, {torch.get_num_interop_threads()} between ops"


def _instruction_set() -> str:
    file = library()
    if file is None or load_error() is not None:
        return "none, the extension is not loaded"
    name = ctypes.CDLL(str(file)).caramba_fast_cpu_isa
    name.restype = ctypes.c_char_p
    found = name()
    return found.decode() if found else "none that runs here (CARAMBA_FAST_CPU_ISA)"


def devices() -> Iterator[str]:
    """The devices torch finds, and their drivers."""
    for name, value in device_lines():
        yield f"{name}: {value}"
    if torch.cuda.is_available():
        yield f"driver: {_driver()}"
    yield from cuda_lines()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return ", ".join(dict.fromkeys(found.stdout.split()))


def extension() -> Iterator[str]:
    """The build of the C++ kernels, and whether it is loaded."""
    file = library()
    own = file is not None and file.parent == FOLDER
    yield f"file: {'not built' if file is None else f'{FOLDER.name}/{file.name}' if own else file}"
    if file is not None and file.exists():
        yield f"size: {file.stat().st_size} bytes"
    yield f"loaded: {load_error() or 'yes'}"
    yield f"{VARIABLE}: {'another build was asked for' if VARIABLE in os.environ else 'not set'}"


def backend_lines() -> Iterator[str]:
    """The backend of each op, and why the others are not used."""
    for status in backends():
        yield " ".join(str(status).split())


def environment() -> Iterator[str]:
    """Environment variables that affect what runs."""
    found = sorted(name for name in os.environ if name.startswith(PREFIXES))
    for name in found:
        yield f"{name}={'(not shown)' if SECRET.search(name) else os.environ[name]}"
    if not found:
        yield "none set"


def extras() -> Iterator[str]:
    """The package's extras, and what each is missing."""
    try:
        about = metadata.metadata("caramba-fast")
        needed = metadata.requires("caramba-fast") or []
    except metadata.PackageNotFoundError:
        yield f"not installed as a package (python {sys.version_info.major}.{sys.version_info.minor})"
        return
    for extra in about.get_all("Provides-Extra") or []:
        marked = [line for line in needed if re.search(rf"extra == ['\"]{extra}['\"]", line)]
        names = [re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0] for line in marked]
        missing = [n for n in names if installed_version(n) == "not installed"]
        yield f"{extra}: {'complete' if not missing else 'lacks ' + ', '.join(missing)}"


__all__ = ["report"]
