"""Reads of untrusted files, and messages about what is wrong with them."""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

#: Most bytes of a JSON file that is read; an index of a million tensors has fewer.
LARGEST_JSON = 64 * 2**20


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Parses JSON; ``finite`` refuses NaN and Infinity, which are not valid JSON.

    Raises ValueError for invalid JSON, invalid UTF-8, or JSON nested too deeply.
    """
    try:
        if not finite:
            return json.loads(text)
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it holds {text[:20]}, which is no finite number")
    return number


def read_json(path: str | Path) -> Any:
    """Reads and parses a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: as `parse_json`, or more than `LARGEST_JSON` bytes.
    """
    return parse_json(read_at_most(path, LARGEST_JSON))


def read_at_most(path: str | Path, most: int) -> bytes:
    """The bytes of a file, which may be a pipe or a device; ValueError if there are more than ``most``."""
    with Path(path).open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return found


class _Short(reprlib.Repr):
    """`repr` of any value, bounded in depth, width and length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = length
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 3, 6, 8, 8


def shown(value: Any, length: int = 80) -> str:
    """A value for messages: its `repr`, truncated if it is long, wide or deep."""
    text = _Short(length).repr(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def explain(error: ValidationError) -> str:
    """``field=value: reason`` for every field that is wrong, separated by semicolons."""
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        reason = item["msg"].removeprefix("Value error, ")
        parts.append(f"{name}={shown(item['input'])}: {reason}" if name else reason)
    return "; ".join(parts)
