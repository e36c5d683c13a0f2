"""Calls that were checked and found right: a decode step repeats them, and a check takes as long as a short op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from caramba_fast.ops.view import KVView

MOST = 4096
_known: set[Any] = set()


def description(
    op: str,
    tensors: Iterable[Tensor],
    views: Iterable[KVView],
    options: Mapping[str, Any],
    *more: Any,
) -> Any:
    """Everything the checks of an op look at, hashable; None where that cannot be told, or while tracing.

    Args:
        op: its name.
        tensors: positional ones, outside of views.
        views, options: as given; of tensors shape, dtype and device are taken.
        more: anything else the checks look at.
    """
    if torch.compiler.is_compiling():
        return None
    parts: list[Any] = [op, more]
    for x in tensors:
        if type(x) is not Tensor:
            return None
        parts.append((x.shape, x.dtype, x.device))
    parts += [view.description for view in views]
    for name, value in options.items():
        if isinstance(value, Tensor):
            parts.append((name, value.shape, value.dtype, value.device))
        elif isinstance(value, (list, tuple)):
            parts.append((name, tuple(value)))
        else:
            parts.append((name, type(value), value))
    found = tuple(parts)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def check(described: Any, run: Callable[[], None]) -> None:
    """Runs a check, unless what it would look at has passed it before."""
    if described is not None and described in _known:
        return
    run()
    if described is not None:
        if len(_known) >= MOST:
            _known.clear()
        _known.add(described)
