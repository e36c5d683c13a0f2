"""PagePool: the pages of all layers of a model, which whoever schedules hands out to sequences.

A page has the same number in every layer. Which sequence holds which page, and what stands in it, is known to the
caller alone (`caramba_fast.serve`); here are the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.layer import LayerCache
from caramba_fast.cache.model import AnyLayerShape, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig

#: What pages hold when they have been taken out of the pool: the buffers of every stream of every layer.
PageBytes = list[Tensor]


class PagePool:
    """Storage for ``num_pages`` pages of ``page_size`` tokens in every layer.

    Args:
        layers: the model's ``cache_layout``.
        page_size: tokens of a page, a multiple of 32.
        num_pages: pages.
        max_seq_len: most tokens of a sequence.
        device: where.
        rings: sequences that are worked on at once: by channel each has a ring for its group that is not full.
        configs: `KVCacheTensorConfig` of the streams, keyword arguments of `ModelKVCache`.

    Raises:
        ValueError: a storage with tails or sinks, which belong to one sequence; or what `ModelKVCache` raises.
    """

    def __init__(
        self,
        layers: Sequence[AnyLayerShape],
        page_size: int,
        num_pages: int,
        max_seq_len: int,
        device: torch.device | str = "cpu",
        *,
        rings: int = 1,
        **configs: Any,
    ) -> None:
        check_shareable(configs)
        self.page_size, self.num_pages, self.max_seq_len = page_size, num_pages, max_seq_len
        self.device = torch.device(device)
        stored = ModelKVCache(
            layers, rings, max_seq_len, device=device, prefill="stored", page_size=page_size, num_pages=num_pages,
            **without_slack(configs),
        )  # fmt: skip
        self.layers: list[LayerCache] = stored.layers
        self.group, self.rings = self.layers[0].group, rings
        for stream in (stream for layer in self.layers for stream in layer.streams.values()):
            if (
                stream.tail is not None
            ):  # a group and no more: tokens are not taken back across groups
                stream.tail = stream.tail[:, :, : self.group].clone()

    @property
    def nbytes(self) -> int:
        """Bytes allocated for pages and rings."""
        return sum(buffer.nbytes for buffer in (*self._buffers, *self._tails))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(buffer.nbytes for buffer in self._buffers) // self.num_pages

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of one sequence over all layers; 0 where the storage has none."""
        return sum(tail.nbytes for tail in self._tails) // self.rings

    @property
    def pages_per_row(self) -> int:
        """Most pages of a sequence."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def _buffers(self) -> list[Tensor]:
        streams = (stream for layer in self.layers for stream in layer.streams.values())
        return [x for stream in streams for x in (stream.codes, stream.scales) if x is not None]

    @property
    def _tails(self) -> list[Tensor]:
        streams = (stream for layer in self.layers for stream in layer.streams.values())
        return [stream.tail for stream in streams if stream.tail is not None]

    @torch.no_grad()
    def copy_ring(self, source: int, target: int) -> None:
        """Copies the ring of one sequence to another's."""
        for tail in self._tails:
            tail[target] = tail[source]

    @torch.no_grad()
    def read_ring(self, ring: int) -> PageBytes:
        """What a ring holds, on the CPU."""
        return [tail[ring].to("cpu", copy=True) for tail in self._tails]

    @torch.no_grad()
    def write_ring(self, ring: int, content: PageBytes) -> None:
        """Puts what `read_ring` gave into another ring."""
        for tail, part in zip(self._tails, content, strict=True):
            tail[ring] = part.to(self.device)

    @torch.no_grad()
    def copy(self, moved: Sequence[tuple[int, int]]) -> None:
        """Copies pages to others: (from, to)."""
        for layer in self.layers:
            layer.copy_pages(moved)

    @torch.no_grad()
    def read(self, pages: Sequence[int]) -> PageBytes:
        """What stands in ``pages``, as packed bytes on the CPU."""
        index = torch.tensor(list(pages), device=self.device)
        return [buffer.index_select(0, index).cpu() for buffer in self._buffers]

    @torch.no_grad()
    def write(self, pages: Sequence[int], content: PageBytes) -> None:
        """Puts what `read` gave into other ``pages``."""
        index = torch.tensor(list(pages), device=self.device)
        for buffer, part in zip(self._buffers, content, strict=True):
            buffer.index_copy_(0, index, part.to(self.device))

    @staticmethod
    def sizes(layers: Sequence[AnyLayerShape], page_size: int, **configs: Any) -> tuple[int, int]:
        """Bytes of one page, and of the ring of one sequence, over all layers, before any is allocated."""
        one = PagePool(layers, page_size, 1, page_size, "meta", **configs)
        return one.page_bytes, one.ring_bytes


def without_slack(configs: Mapping[str, KVCacheTensorConfig]) -> dict[str, Any]:
    """The storage with rings as short as they can be."""
    return {name: config.model_copy(update={"tail_slack": 1}) for name, config in configs.items()}


def check_shareable(configs: Mapping[str, KVCacheTensorConfig]) -> None:
    """Raises ValueError where pages would not hold all there is of a token."""
    for name, config in configs.items():
        for field in ("residual_len", "sink_len"):
            if getattr(config, field):
                raise ValueError(
                    f"{name} has {field}={getattr(config, field)}; pages that sequences share allow 0 "
                    "(fp16 tails and sinks belong to one sequence)"
                )
