"""Records which code made the parts of a folder, since parts outlive the code."""

from __future__ import annotations

import sys
from pathlib import Path

from caramba_fast.bench.environment import source_hash

FILE = "code.txt"
#: Sources that affect a model's answers through a cache.
COMPUTES = {
    **{
        f"caramba_fast/{name}": "*.py"
        for name in ("cache", "config", "hf", "infer", "models", "ops", "quality")
    },
    "kernels": "*.py",
    "csrc": "*.[hc]*",
}


def note_code(folder: Path) -> list[str]:
    """Adds this code to those that made parts in a folder, and warns if there are others; returns their digests."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    known = file.read_text(encoding="utf-8").split() if file.is_file() else []
    own = source_hash(COMPUTES)
    if own not in known:
        known.append(own)
        file.write_text("\n".join(known) + "\n", encoding="utf-8")
    if len(known) > 1:
        print(
            f"{folder} has parts that other code made ({', '.join(known[:8])}; this is {own}), which are taken as they "
            "are: remove the folder to have all of them made again",
            file=sys.stderr,
        )
    return known
