"""Loads the C++ extension once and remembers why it could not be loaded.

The extension registers its CPU kernels with torch by itself; nothing else is taken from it.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

STEM = "_C"


@functools.cache
def load_error() -> str | None:
    """None once the extension is loaded, else the reason it is not (built, found, loadable)."""
    folder = Path(__file__).resolve().parent.parent
    found = [
        p for suffix in ("so", "pyd", "dylib") for p in sorted(folder.glob(f"{STEM}*.{suffix}"))
    ]
    if not found:
        return f"the C++ extension is not built: no {STEM}.*.so in {folder.name}/ of this install"
    try:
        torch.ops.load_library(str(found[0]))
    except (OSError, RuntimeError) as error:
        return f"the C++ extension {found[0].name} cannot be loaded: {error.__cause__ or error}"
    return None
