"""Results that the layers of one step share: computed for the first of them, reused by the others.

A step's layers attend to rows of the same lengths, so what a kernel derives from lengths alone is the same for all.
FlashInfer plans once per step for the same reason (``plan`` and ``run`` of its wrappers).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

_local = threading.local()


@contextmanager
def shared(results: dict[Hashable, Any]) -> Iterator[None]:
    """Context in which calls of this thread read and store results in ``results``, empty at first.

    All calls under one ``results`` must have the same lengths, and nobody may write into the tensors that hold them.
    """
    before = getattr(_local, "results", None)
    _local.results = results
    try:
        yield
    finally:
        _local.results = before


def results() -> dict[Hashable, Any] | None:
    """The results that calls of this thread share now; None if they share none."""
    return getattr(_local, "results", None)
