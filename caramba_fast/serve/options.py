"""The settings of an engine and of its requests as TypedDicts, for editors and type checkers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from caramba_fast.infer.options import CallOptions, GenerateOptions

__all__ = ["CallOptions", "EngineOptions", "RequestOptions"]


class EngineOptions(GenerateOptions, total=False):
    """Fields of `GenerateConfig` and of `EngineConfig`, aliases included."""

    page_size: int
    num_pages: int | None
    cache_bytes: int | None
    max_batch_size: int
    max_batch_tokens: int
    max_waiting: int
    max_prompt_chars: int | None
    max_stop_chars: int
    max_edit_ids: int
    max_ngram: int
    max_logprobs: int
    max_structure_chars: int
    fair_tokens: int
    prefix_caching: bool
    cache_salt: str | None
    prefix_store: str | Path | None
    prefix_store_bytes: int
    preemption: Literal["recompute", "swap"]
    swap_bytes: int
    num_splits: int
    lookup_tokens: int


class RequestOptions(CallOptions, total=False):
    """Options of one request: settings of its generation, id, deadline and salt."""

    request_id: str | None
    deadline: float | None
    cache_salt: str | None
