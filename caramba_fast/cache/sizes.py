"""Argument checks of layer caches: sizes, storage settings, and new tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from caramba_fast.cache.stream import CacheTensor
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.ops import checks

#: The largest length: int32, rounded down to a multiple of 128.
MOST_TOKENS = 2**31 - 128


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
    if max_seq_len > MOST_TOKENS:
        raise ValueError(f"max_seq_len is {max_seq_len}; 1 to {MOST_TOKENS} is allowed")
    for name, dim in dims.items():
        if dim % n_kv_heads:
            raise ValueError(f"{name}_dim={dim} is not a multiple of n_kv_heads={n_kv_heads}")
    if page_size is not None and page_size % 32:
        raise ValueError(f"page_size is {page_size}; a multiple of 32 is needed")
    if num_pages is not None and page_size is None:
        raise ValueError("num_pages was given without page_size; only a paged cache has pages")


def check_agreement(configs: dict[str, KVCacheTensorConfig]) -> None:
    """Raises ValueError when tail or sinks differ between the tensors of a layer."""
    for field in ("residual_len", "tail_slack", "sink_len"):
        values = {name: getattr(config, field) for name, config in configs.items()}
        if len(set(values.values())) > 1:
            raise ValueError(f"{field} must be the same for all tensors of a layer, got {values}")


def by_heads(
    new: Mapping[str, Tensor], streams: Mapping[str, CacheTensor], batch_size: int, n_kv_heads: int
) -> dict[str, Tensor]:
    """New tokens of every stream, (B, H_kv, T, D) or flat (B, T, dim), as (B, H_kv, T, D).

    Raises TypeError or ValueError for a dtype, shape or device that does not fit, or streams that differ in T.
    """
    found = {}
    for name, x in new.items():
        checks.float_tensor(name, x)
        device, wanted = streams[name].codes.device, (n_kv_heads, streams[name].head_dim)
        flat = wanted[0] * wanted[1]
        heads = x.unflatten(2, wanted).transpose(1, 2) if x.ndim == 3 and x.shape[2] == flat else x
        fits = heads.ndim == 4 and heads.shape[0] == batch_size
        if not fits or (heads.shape[1], heads.shape[3]) != wanted or heads.shape[2] == 0:
            raise ValueError(
                f"{name} has shape {tuple(heads.shape)}; ({batch_size}, {wanted[0]}, T, {wanted[1]}) "
                f"or ({batch_size}, T, {flat}) with T >= 1 is needed"
            )
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}; the cache is on {device}")
        found[name] = heads
    counts = {name: x.shape[2] for name, x in found.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ValueError(f"{listed} tokens; they must agree")
    return found
