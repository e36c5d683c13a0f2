"""What was measured on this GPU, in place of what is assumed: read from a table of ``bench/kernels/tune.py``.

``CARAMBA_FAST_TUNED`` names the table. Rows of other GPUs say nothing here; where no row is for this GPU, these
streams, head size and query rows, launches are what they are without a table. Set it before the first launch: the table
is read once.
"""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from .splits import Overheads
from .tiles_layout import Settings

VARIABLE = "CARAMBA_FAST_TUNED"
#: What a row of the table is about: launch settings, a number of splits, programs an SM.
PARTS = ("settings", "splits", "resident")


class Tuned(NamedTuple):
    """Choices for one kind of launch; None where nothing was measured."""

    settings: Settings | None = None
    overheads: Overheads | None = None
    resident: int | None = None


def tuned(streams: str, dim: int, query_rows: int, device: torch.device) -> Tuned:
    """What the table says.

    Args:
        streams: kinds of keys and values, as ``q4_channel/q4_0``.
        dim: values of a head.
        query_rows: of a lane, padded to a power of two from 8.

    Raises:
        ValueError: the table cannot be read; what is wrong with it.
    """
    path = os.environ.get(VARIABLE)
    if not path or device.type != "cuda":
        return Tuned()
    return _table(path, torch.cuda.get_device_name(device)).get((streams, dim, query_rows), Tuned())


@functools.cache
def _table(path: str, device: str) -> dict[tuple[str, int, int], Tuned]:
    """All choices for GPUs of this name."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["device"] == device]
        found: dict[tuple[str, int, int], Tuned] = {}
        for row in rows:
            if row["chosen"] == "True":
                key = (row["streams"], int(row["dim"]), int(row["query_rows"]))
                found[key] = _with(found.get(key, Tuned()), row)
    except KeyError as missing:
        raise ValueError(
            f"{VARIABLE} is {path!r}, which is no table of caramba_fast.bench.kernels.tune, or one of an earlier "
            f"version: it has no column {missing}; run tune again"
        ) from missing
    except (OSError, UnicodeDecodeError, csv.Error, TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE} is {path!r}, which is no table of caramba_fast.bench.kernels.tune: "
            f"{type(error).__name__}: {error}"
        ) from error
    return found


def _with(known: Tuned, row: Mapping[str, str]) -> Tuned:
    """Choices, and that of one row."""
    if row["part"] == "settings":
        sizes = (int(row[name]) for name in ("rows", "tile", "num_warps", "num_stages"))
        most = int(row["max_registers"]) if row["max_registers"] else None
        chosen = Settings(*sizes, narrow=row["narrow"] == "True", max_registers=most)
        return known._replace(settings=chosen)
    if row["part"] == "splits":
        costs = (row[f"{name}_overhead"] for name in Overheads._fields)
        costs = Overheads(*map(float, costs))
        return known._replace(overheads=costs)
    if row["part"] == "resident":
        return known._replace(resident=int(row["resident"]))
    raise ValueError(f"part is {row['part']!r}; one of {', '.join(PARTS)} is needed")
