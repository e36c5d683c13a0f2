"""PagePool: the storage of the pages of all layers of a model, which a scheduler assigns to sequences.

A page has the same number in every layer. Which sequence owns a page is tracked by the caller (`caramba_fast.serve`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.cache.layer import LayerCache
from caramba_fast.cache.model import AnyLayerShape, ModelKVCache, StreamConfigs
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.ops.attention_call import BALANCED

if TYPE_CHECKING:
    from typing_extensions import Unpack

PageBytes = list[Tensor]
"""Contents of pages copied out of the pool: one tensor per buffer (codes, scales) of every stream and layer."""


class PagePool:
    """Storage for ``num_pages`` pages of ``page_size`` tokens in every layer.

    Args:
        layers: the model's ``cache_layout``.
        page_size: tokens per page, a multiple of 32.
        num_pages: number of pages.
        max_seq_len: most tokens of a sequence.
        device: device of the buffers.
        rings: most sequences that run at once. For per-channel kinds each needs a ring for its incomplete group, and
            its own sinks if the storage has them.
        num_splits: for reads over several sequences, as in `ops.decode_attention`.
        configs: `KVCacheTensorConfig` of the streams, keyword arguments of `ModelKVCache`.

    Raises:
        ValueError: storage with a tail (``residual_len``), which belongs to one sequence; more sinks than a page has
            tokens; or as `ModelKVCache`.
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
        num_splits: int = BALANCED,
        **configs: Unpack[StreamConfigs],
    ) -> None:
        storage: dict[str, Any] = {**configs}
        check_shareable(storage, page_size)
        self.page_size, self.num_pages, self.max_seq_len = page_size, num_pages, max_seq_len
        self.device, self.num_splits = torch.device(device), num_splits
        stored = ModelKVCache(
            layers, rings, max_seq_len, device=device, prefill="stored", page_size=page_size, num_pages=num_pages,
            **without_slack(storage),
        )  # fmt: skip
        self.layers: list[LayerCache] = stored.layers
        self.group, self.rings = self.layers[0].group, rings
        self.sink_len = max(config.sink_len for config in storage.values()) if storage else 0
        #: Whether sequences have rings or sinks of their own in addition to their pages.
        self.has_rings = bool(self._sides)
        with torch.inference_mode(False):  # else buffers are read-only outside of it
            for stream in (stream for layer in self.layers for stream in layer.streams.values()):
                # One group is enough: tokens are not rolled back across groups.
                tail, sink = stream.tail, stream.sink
                stream.replace_sides(
                    None if tail is None else tail[:, :, : self.group].clone(),
                    None if sink is None else sink.new_empty(self.sink_rows, *sink.shape[1:]),
                )

    def places(self, most: int) -> int:
        """Sequences that may run at once: the smaller of ``most`` and the number of rings, or ``most`` without any."""
        return min(most, self.rings) if self.has_rings else most

    @property
    def nbytes(self) -> int:
        """Bytes allocated for pages, rings and sinks."""
        return sum(buffer.nbytes for buffer in (*self.page_buffers, *self._sides))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(buffer.nbytes for buffer in self.page_buffers) // self.num_pages

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring and the sinks of one sequence over all layers; 0 if the storage has none."""
        tails = sum(side.nbytes for side in self._sides) - self.sink_rows * self.sink_bytes
        return tails // self.rings + self.sink_bytes

    @property
    def sink_bytes(self) -> int:
        """Bytes of the sinks of one sequence over all layers; 0 if the storage has none."""
        return sum(sink.nbytes for sink in self.sinks) // self.sink_rows

    @property
    def sink_rows(self) -> int:
        """Rows of sinks: first one per ring, then rows for cached first pages that later sequences may reuse."""
        return 2 * self.rings + self.num_pages // 16

    @property
    def pages_per_row(self) -> int:
        """Most pages of a sequence."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def page_buffers(self) -> list[Tensor]:
        """Codes and scales of every stream of every layer, (pages, ...) each."""
        streams = (stream for layer in self.layers for stream in layer.streams.values())
        return [x for stream in streams for x in (stream.codes, stream.scales) if x is not None]

    @property
    def sinks(self) -> list[Tensor]:
        """Sinks of every stream that has them, (sink_rows, ...) each."""
        streams = (stream for layer in self.layers for stream in layer.streams.values())
        return [stream.sink for stream in streams if stream.sink is not None]

    @property
    def _sides(self) -> list[Tensor]:
        streams = (stream for layer in self.layers for stream in layer.streams.values())
        return [*(stream.tail for stream in streams if stream.tail is not None), *self.sinks]

    @torch.no_grad()
    def copy_ring(self, source: int, target: int) -> None:
        """Copies the ring and the sinks of one sequence to another's."""
        for side in self._sides:
            side[target] = side[source]

    @torch.no_grad()
    def read_ring(self, ring: int) -> PageBytes:
        """The contents of a ring and its sinks, copied to the CPU."""
        return [side[ring].to("cpu", copy=True) for side in self._sides]

    @torch.no_grad()
    def write_ring(self, ring: int, content: PageBytes) -> None:
        """Writes the result of `read_ring` into a ring."""
        for side, part in zip(self._sides, content, strict=True):
            side[ring] = part.to(self.device)

    @torch.no_grad()
    def copy_sinks(self, source: int, target: int) -> None:
        """Copies a row of sinks to another; rows are 0 to ``sink_rows`` - 1, those of the rings first."""
        for sink in self.sinks:
            sink[target] = sink[source]

    @torch.no_grad()
    def read_sinks(self, place: int) -> PageBytes:
        """The contents of a row of sinks, copied to the CPU; empty if the storage has none."""
        return [sink[place].to("cpu", copy=True) for sink in self.sinks]

    @torch.no_grad()
    def write_sinks(self, place: int, content: PageBytes) -> None:
        """Writes the result of `read_sinks` into a row of sinks."""
        for sink, part in zip(self.sinks, content, strict=True):
            sink[place] = part.to(self.device)

    @torch.no_grad()
    def copy(self, moved: Sequence[tuple[int, int]]) -> None:
        """Copies pages, given as (from, to)."""
        for layer in self.layers:
            layer.copy_pages(moved)

    @torch.no_grad()
    def read(self, pages: Sequence[int]) -> PageBytes:
        """The contents of ``pages``, packed, copied to the CPU."""
        index = torch.tensor(list(pages), device=self.device)
        return [buffer.index_select(0, index).cpu() for buffer in self.page_buffers]

    @torch.no_grad()
    def write(self, pages: Sequence[int], content: PageBytes) -> None:
        """Writes the result of `read` into ``pages``."""
        index = torch.tensor(list(pages), device=self.device)
        for buffer, part in zip(self.page_buffers, content, strict=True):
            buffer.index_copy_(0, index, part.to(self.device))

    @staticmethod
    def sizes(
        layers: Sequence[AnyLayerShape], page_size: int, **configs: Unpack[StreamConfigs]
    ) -> tuple[int, int, int]:
        """`page_bytes`, `ring_bytes` and `sink_bytes`, computed without allocating anything."""
        one = PagePool(layers, page_size, 1, page_size, "meta", **configs)
        return one.page_bytes, one.ring_bytes, one.sink_bytes


def without_slack(configs: Mapping[str, KVCacheTensorConfig]) -> dict[str, Any]:
    """The storage with the shortest possible rings (``tail_slack=1``)."""
    return {name: config.model_copy(update={"tail_slack": 1}) for name, config in configs.items()}


def check_shareable(configs: Mapping[str, KVCacheTensorConfig], page_size: int) -> None:
    """Raises ValueError if pages, with the sinks of the first one, would not hold everything stored of a token."""
    for name, config in configs.items():
        if config.residual_len:
            raise ValueError(
                f"{name} has residual_len={config.residual_len}; pages that sequences share allow 0 (an fp16 tail "
                "belongs to one sequence)"
            )
        if config.sink_len > page_size:
            raise ValueError(
                f"{name} has sink_len={config.sink_len}; up to page_size={page_size} is allowed: sinks are kept with "
                "the first page"
            )
