"""CacheTensor: the buffers of one cached stream (K or V of a layer)."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.formats import SCALE_DTYPE, check_block
from caramba_fast.ops.view import KVView, Lanes, load

#: Capacity is rounded up to this many slots, so that kernels load codes without masks.
SLOT_MULTIPLE = 128


def capacity(max_seq_len: int) -> int:
    """Slots allocated for ``max_seq_len`` tokens."""
    return -(-max_seq_len // SLOT_MULTIPLE) * SLOT_MULTIPLE


class CacheTensor:
    """Codes (B, lanes, S, width) and scales (B, lanes, S, lane_dim / qblock) of one stream.

    The buffers are uninitialised: slots at or past a row's length hold anything.
    """

    def __init__(
        self,
        batch_size: int,
        slots: int,
        lanes: Lanes,
        head_dim: int,
        config: KVCacheTensorConfig,
        device: torch.device,
    ) -> None:
        self.config, self.lanes, self.head_dim = config, lanes, head_dim
        form = config.kind.format
        dim = lanes.heads_per_lane * head_dim
        lead = (batch_size, lanes.count, slots)
        self.scales: Tensor | None = None
        if form.quantized:
            check_block(dim, config.qblock, "qblock")
            self.scales = torch.empty((*lead, dim // config.qblock), dtype=SCALE_DTYPE, device=device)
        self.codes = torch.empty((*lead, form.code_width(dim)), dtype=form.dtype, device=device)

    @property
    def buffers(self) -> list[Tensor]:
        return [self.codes] if self.scales is None else [self.codes, self.scales]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales and unused slots included."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def view(self, length: int | None = None) -> KVView:
        """What the ops read: all slots, or the first ``length`` rounded up to whole tiles."""
        whole = KVView(self.codes, self.scales, self.config.kind.value)
        return whole if length is None else whole.slice(capacity(length))

    def values(self, length: int, dtype: torch.dtype) -> Tensor:
        """Dequantized (B, H_kv, length, D); slots past a row's length hold anything."""
        part = self.view().slice(length)
        return self.lanes.unpack(load(part.codes, part.scales, part.kind, dtype))

    def reorder(self, rows: Tensor, length: int) -> None:
        """Row b becomes what row ``rows[b]`` was, for the first ``length`` slots."""
        for buffer in self.buffers:
            used = buffer[:, :, :length]
            used.copy_(used.index_select(0, rows))
