"""pydantic's reports as one line: which field, what it was, what is allowed."""

from __future__ import annotations

from pydantic import ValidationError


def explain(error: ValidationError) -> str:
    """``field=value: reason`` for every field that is wrong, separated by semicolons."""
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        reason = item["msg"].removeprefix("Value error, ")
        parts.append(f"{name}={item['input']!r}: {reason}" if name else reason)
    return "; ".join(parts)
