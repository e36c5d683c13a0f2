"""Checks of what a layer cache is made with."""

from __future__ import annotations

from typing import Any

from caramba_fast.config import KVCacheTensorConfig


def check_sizes(
    batch_size: int,
    max_seq_len: int,
    n_kv_heads: int,
    dims: dict[str, int],
    page_size: int | None,
    num_pages: int | None,
) -> None:
    """Raises ValueError naming the size that is not positive or does not divide."""
    sizes: dict[str, Any] = {
        "batch_size": batch_size,
        "max_seq_len": max_seq_len,
        "n_kv_heads": n_kv_heads,
    }
    sizes.update({f"{name}_dim": dim for name, dim in dims.items()})
    sizes.update(
        {n: x for n, x in (("page_size", page_size), ("num_pages", num_pages)) if x is not None}
    )
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; a positive int is needed")
    for name, dim in dims.items():
        if dim % n_kv_heads:
            raise ValueError(f"{name}_dim={dim} is not a multiple of n_kv_heads={n_kv_heads}")
    if page_size is not None and page_size % 32:
        raise ValueError(f"page_size is {page_size}; a multiple of 32 is needed")
    if num_pages is not None and page_size is None:
        raise ValueError("num_pages was given without page_size; only a paged cache has pages")


def check_agreement(configs: dict[str, KVCacheTensorConfig]) -> None:
    """Raises ValueError when tail or sinks differ between the tensors of a layer, or values are centered."""
    if configs["v"].center:
        raise ValueError("v is to be centered; center is for keys")
    for field in ("residual_len", "tail_slack", "sink_len"):
        values = {name: getattr(config, field) for name, config in configs.items()}
        if len(set(values.values())) > 1:
            raise ValueError(f"{field} must be the same for all tensors of a layer, got {values}")
