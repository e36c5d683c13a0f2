"""What a mask of transformers says, read from the function that describes it.

Those made for decoders say: causal, within a window or a chunk. They are recognised by what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import masking_utils


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees, besides those of padding.

    Attributes:
        causal: none after its own.
        window: the newest so many, its own included; None for no limit.
        chunk: those of its own chunk of so many tokens, counted from the first of the row.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None

    def hides(self, keys: int) -> bool:
        """Whether window or chunk can hide any of ``keys`` tokens from the newest one."""
        reach = min(x for x in (self.window, self.chunk, keys + 1) if x is not None)
        return keys > reach


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function of transformers; None for one that is not known."""
    found = _read(function)
    return found if found is not None and found.causal else None


def _read(function: Any) -> Pattern | None:
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker = function.__qualname__.partition(".")[0]
    names = function.__code__.co_freevars
    held = dict(
        zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )
    if maker == "sliding_window_overlay":
        return Pattern(window=int(held["sliding_window"]))
    if maker == "chunked_overlay":
        return Pattern(chunk=int(held["chunk_size"]))
    if maker != "and_masks":
        return None
    found: Pattern | None = Pattern()
    for part in held["mask_functions"]:
        found = _both(found, _read(part))
    return found


def _both(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    if a is None or b is None:
        return None
    for name in ("window", "chunk"):
        if getattr(a, name) is not None and getattr(b, name) is not None:
            return None
    return replace(
        a, causal=a.causal or b.causal, window=a.window or b.window, chunk=a.chunk or b.chunk
    )
