"""ModelKVCache: the caches of all layers of a model, changed together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from caramba_fast.cache.interface import AttentionLimits, QueryRms
from caramba_fast.cache.layer import DecoupledLayerKVCache, LayerCache, LayerKVCache
from caramba_fast.cache.lengths import Counts
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.ops import checks

PrefillMode = Literal["exact", "stored"]


class StreamConfigs(TypedDict, total=False):
    """Storage of each stream of a cache: K and V, or both key streams of decoupled attention and V."""

    k_sem_cfg: KVCacheTensorConfig | None
    k_geo_cfg: KVCacheTensorConfig | None
    k_cfg: KVCacheTensorConfig | None
    v_cfg: KVCacheTensorConfig | None


class SpreadCacheOptions(TypedDict, total=False):
    """Options of a `ModelKVCache` whose page size is determined by another argument."""

    device: torch.device | str
    prefill: PrefillMode
    k_sem_cfg: KVCacheTensorConfig | None
    k_geo_cfg: KVCacheTensorConfig | None
    num_pages: int | None


class ModelCacheOptions(StreamConfigs, total=False):
    """Options of `ModelKVCache`."""

    device: torch.device | str
    prefill: PrefillMode
    page_size: int | None
    num_pages: int | None


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches: widths of K and V over all kv heads.

    ``query_rms``, if known, returns for each key stream, by name, the root mean square of the queries per key channel,
    (H_kv, D) float32. Only caches that need it call it, when they are made.
    """

    k_dim: int
    v_dim: int
    n_kv_heads: int
    query_rms: QueryRms | None = field(default=None, compare=False, repr=False)

    def new_cache(self, **sizes: Any) -> LayerCache:
        """A cache of this shape; ``sizes`` are the other arguments of `LayerKVCache`."""
        return LayerKVCache(**vars(self), **sizes)


@dataclass(frozen=True)
class DecoupledLayerShape:
    """What one layer of decoupled attention caches: widths of its streams over all kv heads. See `LayerShape`."""

    k_sem_dim: int
    k_geo_dim: int
    v_dim: int
    n_kv_heads: int
    query_rms: QueryRms | None = field(default=None, compare=False, repr=False)

    def new_cache(self, **sizes: Any) -> LayerCache:
        """A cache of this shape; ``sizes`` are the other arguments of `DecoupledLayerKVCache`."""
        return DecoupledLayerKVCache(**vars(self), **sizes)


AnyLayerShape = LayerShape | DecoupledLayerShape
"""What a layer stores: of standard or of decoupled attention."""


class ModelKVCache:
    """One cache per layer, all of the same length.

    Args:
        layers: shapes of the model's layers (a model's ``cache_layout``).
        batch_size, max_seq_len, device: as in `LayerKVCache`.
        k_cfg, v_cfg: storage of K and V, the same in every layer.
        prefill: "exact": a prompt on an empty cache attends to its exact K and V while they are quantized; "stored": it
            attends to what the cache will return.
        k_sem_cfg, k_geo_cfg: storage of the keys of decoupled layers; by default ``k_cfg``.
        page_size: tokens per page (block size) of a paged cache; None for a contiguous one.
        num_pages: pages in each layer's pool.

    Raises:
        ValueError: as `LayerKVCache`.
    """

    def __init__(
        self,
        layers: Sequence[AnyLayerShape],
        batch_size: int,
        max_seq_len: int,
        k_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        prefill: PrefillMode = "exact",
        *,
        k_sem_cfg: KVCacheTensorConfig | None = None,
        k_geo_cfg: KVCacheTensorConfig | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> None:
        if not layers:
            raise ValueError("layers is empty; one LayerShape a layer is needed")
        if prefill not in ("exact", "stored"):
            raise ValueError(f"prefill is {prefill!r}; allowed are 'exact' and 'stored'")
        if not isinstance(layers[0], DecoupledLayerShape) and (k_sem_cfg or k_geo_cfg):
            raise ValueError(
                "k_sem_cfg and k_geo_cfg are for decoupled attention; this model has K and V"
            )
        self.prefill = prefill
        common: dict[str, Any] = dict(device=device, page_size=page_size, num_pages=num_pages)

        def layer(shape: AnyLayerShape) -> LayerCache:
            sizes: dict[str, Any] = {"batch_size": batch_size, "max_seq_len": max_seq_len, **common}
            if isinstance(shape, LayerShape):
                return shape.new_cache(k_cfg=k_cfg, v_cfg=v_cfg, **sizes)
            return shape.new_cache(
                k_sem_cfg=k_sem_cfg or k_cfg, k_geo_cfg=k_geo_cfg or k_cfg, v_cfg=v_cfg, **sizes
            )

        self.layers = [layer(shape) for shape in layers]

    def __getitem__(self, index: int) -> LayerCache:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.layers[0].batch_size

    @property
    def max_seq_len(self) -> int:
        """Capacity of a row in tokens."""
        return self.layers[0].max_seq_len

    @property
    def pos(self) -> int:
        """Tokens in the longest row."""
        return self.layers[0].pos

    @property
    def seq_lens(self) -> Tensor:
        """(B,) int32 on the device, tokens in each row."""
        return self.layers[0].seq_lens

    @property
    def row_lengths(self) -> list[int]:
        """Tokens in each row, on the host."""
        return list(self.layers[0].lengths.host)

    @property
    def nbytes(self) -> int:
        """Bytes allocated over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of codes and scales per cached token of one row, over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def restore(self, row_lengths: list[int]) -> None:
        """Rolls all layers back to `row_lengths` from before a forward pass that failed half way.

        If that fails, for example because memory runs out, all tokens are removed, so that layers never differ; later
        calls leave it empty.
        """
        try:
            for layer in self.layers:
                held = layer.lengths.host
                layer.set_lengths([min(n, own) for n, own in zip(row_lengths, held, strict=True)])
        except (RuntimeError, MemoryError):
            self.reset()
            raise

    @contextmanager
    def unchanged_by_errors(self, tokens: int) -> Iterator[None]:
        """Context that restores the cache, fp16 rings included, if its body raises.

        The body appends at most ``tokens`` to a row; rings with enough slack for them are not copied.
        """
        before = self.row_lengths
        kept = {layer: layer.tail_state() for layer in self if tokens > layer.tail_slack}
        try:
            yield
        except BaseException:
            self.restore(before)
            for layer, tail in kept.items():
                layer.restore_tail(tail)
            raise

    @property
    def reach(self) -> AttentionLimits:
        """Limits of every read of the cache, in all layers, set by a decode plan; ValueError when set to one below 1.

        A prompt on an empty cache with ``prefill="exact"`` does not read the cache, so they do not apply to it. Setting
        an equal value keeps the current object.
        """
        return self.layers[0].reach

    @reach.setter
    def reach(self, reach: AttentionLimits) -> None:
        if reach == self.reach:
            return
        checks.raise_all("reach", reach.problems())
        for layer in self.layers:
            layer.reach = reach

    @contextmanager
    def reading_all_slots(self) -> Iterator[None]:
        """Context in which attention is passed all slots, so that a CUDA graph captured there serves every length."""
        for layer in self.layers:
            layer.reads_all_slots = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer.reads_all_slots = False

    def replay(self, run: Callable[[], None]) -> None:
        """Replays a captured forward pass of one token per row; ``run`` launches its device work.

        Raises:
            ValueError, OutOfPagesError: there is no room; call `restore` afterwards.
        """
        for layer in self.layers:
            layer.before_replay()
        run()
        for layer in self.layers:
            layer.after_replay()

    def crop(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens (an int, or one count per row) in every layer."""
        for layer in self.layers:
            layer.crop(n)

    def truncate(self, new_pos: int) -> None:
        """Keeps the first ``new_pos`` tokens of every row in every layer."""
        for layer in self.layers:
            layer.truncate(new_pos)

    def reorder(self, beam_idx: Tensor) -> None:
        """Permutes the rows of every layer (beam search)."""
        for layer in self.layers:
            layer.reorder(beam_idx)

    def select_rows(self, rows: Sequence[int]) -> ModelKVCache:
        """A new cache whose row b is row ``rows[b]`` of this one (`LayerCache.select_rows`)."""
        other = copy.copy(self)
        other.layers = [layer.select_rows(rows) for layer in self.layers]
        return other

    def reset(self) -> None:
        """Removes all tokens; the memory stays allocated."""
        for layer in self.layers:
            layer.reset()
