"""pydantic's reports as one line: which field, what it was, what is allowed."""

from __future__ import annotations

from pydantic import ValidationError

from caramba_fast.config.files import shown


def explain(error: ValidationError) -> str:
    """``field=value: reason`` for every field that is wrong, separated by semicolons."""
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        reason = item["msg"].removeprefix("Value error, ")
        parts.append(f"{name}={shown(item['input'])}: {reason}" if name else reason)
    return "; ".join(parts)
