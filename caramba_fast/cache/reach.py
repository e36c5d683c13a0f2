"""Reach: how far back reads of a cache go, and how many query tokens they take at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Reach(NamedTuple):
    """Limits of every read of a cache, on top of the model's own.

    Attributes:
        q_chunk: query tokens `ops.extend_attention` takes at a time, which bounds its scratch and changes no
            result; None for the op's default.
        local_window: tokens a query reaches back, itself included, where the model reaches no less far;
            None for no limit. **It changes results.**
        bucket: which part of a decode plan it came from, for reports.
    """

    q_chunk: int | None = None
    local_window: int | None = None
    bucket: str = "none"

    def problems(self) -> list[str]:
        """What is out of range."""
        given = {"q_chunk": self.q_chunk, "local_window": self.local_window}
        return [
            f"{name} is {value!r}; 1 or more, or None, is allowed"
            for name, value in given.items()
            if value is not None and (type(value) is not int or value < 1)
        ]

    def window(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """``window_size`` of a read: the narrower of the call's own and ``local_window``."""
        left, right = options.get("window_size") or (-1, -1)
        if self.local_window is None:
            return left, right
        most = self.local_window - 1
        return (most if left < 0 else min(left, most)), right
