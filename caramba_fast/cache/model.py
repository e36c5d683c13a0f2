"""ModelKVCache: the caches of all layers of a model, moved together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from caramba_fast.cache.layer import LayerKVCache
from caramba_fast.cache.lengths import Counts
from caramba_fast.config import KVCacheTensorConfig

PrefillMode = Literal["exact", "stored"]


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches: widths of K and V over all kv heads."""

    k_dim: int
    v_dim: int
    n_kv_heads: int


class ModelKVCache:
    """One `LayerKVCache` a layer.

    Args:
        layers: shapes of the model's layers (a model's ``cache_layout``).
        batch_size, max_seq_len, device: as in `LayerKVCache`.
        k_cfg, v_cfg: storage of K and V, the same in every layer.
        prefill: "exact": a prompt on an empty cache attends to its exact K and V while they are
            quantized; "stored": it attends to what the cache will return.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        batch_size: int,
        max_seq_len: int,
        k_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        prefill: PrefillMode = "exact",
    ) -> None:
        if not layers:
            raise ValueError("layers is empty; one LayerShape a layer is needed")
        if prefill not in ("exact", "stored"):
            raise ValueError(f"prefill is {prefill!r}; allowed are 'exact' and 'stored'")
        self.prefill = prefill
        self.layers = [
            LayerKVCache(
                batch_size, max_seq_len, shape.k_dim, shape.v_dim, k_cfg, v_cfg, device,
                shape.n_kv_heads,
            )
            for shape in layers
        ]  # fmt: skip

    def __getitem__(self, index: int) -> LayerKVCache:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerKVCache]:
        return iter(self.layers)

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    @property
    def max_seq_len(self) -> int:
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
        """Bytes one cached token of one row takes, over all layers."""
        slots = self.layers[0].k.codes.shape[2]
        return self.nbytes / (self.batch_size * slots)

    def restore(self, row_lengths: list[int]) -> None:
        """Goes back to lengths that held before, in layers that have moved on and those that have not.

        For a forward pass that failed half way; ``row_lengths`` is what the property said before.
        """
        for layer in self.layers:
            layer.lengths.set(list(row_lengths))

    def crop(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens (int, or one count a row) in every layer."""
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

    def reset(self) -> None:
        """Forgets everything; the memory stays allocated."""
        for layer in self.layers:
            layer.reset()
