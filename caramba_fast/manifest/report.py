"""What came of a run, and its JSON file."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caramba_fast import __version__
from caramba_fast.config.files import read_json, replacing


@dataclass(frozen=True)
class RunReport:
    """What one run gave.

    Attributes:
        target, run, mode: which.
        model: as the manifest names it.
        prompts: what was continued.
        texts: what was written, a row of the batch each; empty in mode benchmark.
        metrics: figures of the run; in mode benchmark for each cache kind, and of each figure its median, p20
            and p80.
        settings: of the run, as given.
        report: what was in force; in mode benchmark for each cache kind.
        output: the JSON file that was written, or None.
    """

    target: str
    run: str
    mode: str
    model: str
    prompts: list[str]
    texts: list[str]
    metrics: dict[str, Any]
    settings: dict[str, Any]
    report: dict[str, Any]
    output: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target": self.target, "run": self.run, "mode": self.mode, "model": self.model,
            "prompts": self.prompts, "texts": self.texts, "metrics": self.metrics,
            "settings": self.settings, "report": self.report, "environment": environment(),
        }  # fmt: skip


def environment() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "caramba_fast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a whole file or nothing; figures that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as stream:
        stream.write(f"{text}\n".encode())


def is_report(path: Path) -> bool:
    """Whether a file is what `write_json` made of a `RunReport`."""
    try:
        found = read_json(path)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() >= {"target", "run", "mode", "environment"}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
