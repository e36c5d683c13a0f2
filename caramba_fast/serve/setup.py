"""What an engine is made of: a model that takes ragged batches, settings that go with pages, and the pool."""

from __future__ import annotations

from typing import Any

from caramba_fast.cache import Calibration, PagePool
from caramba_fast.infer.config import AUTO, GenerateConfig
from caramba_fast.infer.fields import OutputFields
from caramba_fast.models.registry import as_language_model
from caramba_fast.policy.settings import DecodePlanFields
from caramba_fast.serve.settings import EngineConfig


def servable(model: Any, max_seq_len: int) -> Any:
    """The model, if it can take tokens of many requests side by side.

    Raises:
        TypeError: it cannot, and why.
        ValueError: not for requests of that length.
    """
    found = as_language_model(model)
    reason = getattr(found, "why_not_ragged", None)
    if not callable(getattr(found, "forward_ragged", None)) or reason:
        raise TypeError(
            f"{type(model).__name__} cannot be served by an Engine: "
            f"{reason or 'it has no forward_ragged(ids, batch, rows)'}; the native Transformer and transformers "
            "models with the attention interface can, others go through Generator"
        )
    limit = getattr(found, "ragged_limit", None)
    if limit is not None and max_seq_len > limit:
        raise ValueError(
            f"max_seq_len is {max_seq_len}; this model's RoPE changes with the length beyond {limit}, and would change "
            f"for every request in a batch: {limit} or less is allowed"
        )
    return found


def shareable(config: GenerateConfig) -> GenerateConfig:
    """Settings whose cache can be cut into pages that requests share.

    Raises:
        ValueError: one that was asked for and cannot be had.
    """
    for name in ("cache_residual_len", "cache_sink_len"):
        if getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)}; an engine allows 0: pages are shared between requests, and fp16 "
                "tails and sinks belong to one"
            )
    if config.cache_kind == AUTO:
        raise ValueError(
            "cache_kind is 'auto'; an engine needs a kind: caramba_fast.choose_cache measures, and names one"
        )
    if "prefill" in config.model_fields_set and config.prefill != "stored":
        raise ValueError(
            f"prefill is {config.prefill!r}; an engine allows 'stored': prompts are cut into chunks"
        )
    for name in ("prefill_chunk", "cuda_graph"):
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)!r} is for a Generator")
    given = [n for n in DecodePlanFields.model_fields if n in config.model_fields_set]
    if given:
        raise ValueError(f"{given[0]} is for a Generator; an engine reads whole caches")
    outputs = [name for name in OutputFields.model_fields if getattr(config, name)]
    if outputs:
        raise ValueError(f"{outputs[0]} is for a Generator; an engine gives a RequestOutput")
    return config.updated(cache_residual_len=0, cache_sink_len=0, prefill="stored")


def pool_for(model: Any, config: GenerateConfig, settings: EngineConfig) -> PagePool:
    """The pool of pages that settings ask for.

    Raises:
        ValueError: fewer bytes than a page takes, or a storage that pages cannot have.
    """
    storage, layout = config.stream_configs(), model.cache_layout
    length = config.max_seq_len
    size, wanted = settings.page_size, settings.num_pages
    if settings.cache_bytes is not None:
        page = PagePool.bytes_per_page(layout, size, **storage)
        wanted = settings.cache_bytes // page
        if not wanted:
            raise ValueError(
                f"cache_bytes is {settings.cache_bytes}; a page of {size} tokens takes {page}, so much or more "
                "is allowed"
            )
    if wanted is None:
        wanted = settings.max_batch_size * -(-length // size)
    calibration = None
    if config.cache_calibration is not None:
        calibration = Calibration.load(config.cache_calibration)
    return PagePool(
        layout, size, wanted, length, model.device, calibration=calibration, **storage
    )  # fmt: skip
