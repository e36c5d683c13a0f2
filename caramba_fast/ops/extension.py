"""Loads the C++ extension once and remembers why it could not be loaded.

The extension registers its CPU kernels with torch by itself; nothing else is taken from it.
``CARAMBA_FAST_EXTENSION`` names another build of it to load, as ``make sanitize`` does. Whatever library it names is
loaded, and its code runs: set it only to a file you would run, and let no user of a service set it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

STEM = "_C"
VARIABLE = "CARAMBA_FAST_EXTENSION"
FOLDER = Path(__file__).resolve().parent.parent


def library() -> Path | None:
    """The file to load: the one the variable names, else the one this install was built with."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    endings = ("so", "pyd", "dylib")
    return next((p for end in endings for p in sorted(FOLDER.glob(f"{STEM}*.{end}"))), None)


@functools.cache
def load_error() -> str | None:
    """None once the extension is loaded, else the reason it is not (built, found, loadable)."""
    file = library()
    if file is None:
        return f"the C++ extension is not built: no {STEM}.*.so in {FOLDER.name}/ of this install"
    try:
        torch.ops.load_library(str(file))
    except (OSError, RuntimeError) as error:
        return f"the C++ extension {file.name} cannot be loaded: {error.__cause__ or error}"
    return None
