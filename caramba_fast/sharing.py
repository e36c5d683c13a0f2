"""What the layers of one step can have in common: made for the first of them, found by the others.

A step's layers attend to rows of the same lengths, so what a kernel derives from lengths alone is the same for all.
FlashInfer plans once a step for the same reason (``plan`` and ``run`` of its wrappers).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

_local = threading.local()


@contextmanager
def shared(results: dict[Hashable, Any]) -> Iterator[None]:
    """Calls of this thread find in ``results`` what earlier calls left there, and leave theirs.

    Args:
        results: kept by whoever knows that all calls under it have the same lengths, and that nobody writes into the
            tensors which hold them; empty at first.
    """
    before = getattr(_local, "results", None)
    _local.results = results
    try:
        yield
    finally:
        _local.results = before


def results() -> dict[Hashable, Any] | None:
    """What calls of this thread share now; None where they share nothing."""
    return getattr(_local, "results", None)
