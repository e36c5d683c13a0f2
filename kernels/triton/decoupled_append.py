"""decoupled_append_ in Triton: `append_` for semantic keys, geometric keys and values, in one launch."""

from __future__ import annotations

from typing import Any

from .append import launch

STREAMS = ("k_sem", "k_geo", "v")


def decoupled_append_(*args: Any, **options: Any) -> None:
    """The op's flat arguments: see `caramba_fast.ops.append` and its schema."""
    launch(STREAMS, args, options)
