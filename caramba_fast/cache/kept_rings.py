"""KeptRings: a snapshot of the fp16 rings of some rows, for tokens that are appended and rolled back later.

A ring by itself can undo only up to `tail_slack` tokens; values overwritten by more exist only in a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache.model import ModelKVCache
from caramba_fast.cache.rows import LayerRows


class _LayerRings(NamedTuple):
    rings: list[Tensor]
    lowest: list[int]


class KeptRings:
    """Copies of the rings of some rows.

    ``lengths`` maps a row to the number of its tokens to keep; the row may already hold one more.
    """

    def __init__(self, cache: ModelKVCache, lengths: Mapping[int, int]) -> None:
        self.lengths = dict(lengths)
        self._index = torch.tensor(list(lengths), device="cpu").to(cache[0].device)
        self._layers = [self._copied(layer) for layer in cache]

    def _copied(self, layer: LayerRows) -> _LayerRings | None:
        if not layer.ring_len:
            return None
        layer.narrow_tails()
        held = layer.tail.held_from(layer.lengths.host)
        rings = [ring.index_select(0, self._index) for ring in _rings(layer)]
        return _LayerRings(rings, [held[row] for row in self.lengths])

    def put_back(self, cache: ModelKVCache) -> None:
        """Restores these rows, except those that have become shorter. May be called again if interrupted."""
        for layer, kept in zip(cache, self._layers, strict=True):
            host = layer.lengths.host
            wanted = {row: n for row, n in self.lengths.items() if host[row] >= n}
            layer.set_lengths([wanted.get(row, length) for row, length in enumerate(host)])
            if kept is not None:
                _put_back(layer, kept, [*self.lengths], wanted)


def _put_back(
    layer: LayerRows, kept: _LayerRings, rows: list[int], wanted: Mapping[int, int]
) -> None:
    places = [place for place, row in enumerate(rows) if row in wanted]
    source = torch.tensor(places, dtype=torch.int64, device="cpu").to(layer.device)
    target = torch.tensor([rows[place] for place in places], dtype=torch.int64, device="cpu").to(
        layer.device
    )
    for ring, copy in zip(_rings(layer), kept.rings, strict=True):
        ring.index_copy_(0, target, copy.index_select(0, source))
    for place in places:
        layer.tail.lowest[rows[place]] = kept.lowest[place]


def _rings(layer: LayerRows) -> list[Tensor]:
    return [stream.tail for stream in layer.streams.values() if stream.tail is not None]
