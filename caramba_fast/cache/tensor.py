"""CacheTensor: the buffers of one cached stream (K or V of a layer)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from caramba_fast.cache.tail import WideRing
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.formats import SCALE_DTYPE, check_block
from caramba_fast.ops import KVView, Transform
from caramba_fast.ops.memory import empty
from caramba_fast.ops.view import Lanes

#: Capacity is rounded up to this many slots, so that kernels load codes without masks.
SLOT_MULTIPLE = 128
SIDE_DTYPE = torch.float16


def capacity(max_seq_len: int) -> int:
    """Slots allocated for ``max_seq_len`` tokens."""
    return -(-max_seq_len // SLOT_MULTIPLE) * SLOT_MULTIPLE


class CacheTensor:
    """Codes, scales, fp16 tail and fp16 sinks of one stream.

    The buffers are uninitialised: slots at or past a row's length hold anything.

    Args:
        batch_size: rows, which tail and sinks have each their own of.
        blocks: (rows, slots) of a contiguous cache or (pages, slots of a page) of a paged one.
        lanes: how kv heads are put side by side.
        head_dim: values of one kv head.
        config: how the stream is stored.
        device: where.
    """

    def __init__(
        self,
        batch_size: int,
        blocks: tuple[int, int],
        lanes: Lanes,
        head_dim: int,
        config: KVCacheTensorConfig,
        device: torch.device,
    ) -> None:
        self.config, self.lanes, self.head_dim = config, lanes, head_dim
        form, dim = config.kind.storage, lanes.heads_per_lane * head_dim
        lead = (blocks[0], lanes.count, blocks[1])
        self.scales: Tensor | None = None
        if form.quantized:
            check_block(dim, config.qblock, "qblock")
            self.scales = empty((*lead, dim // config.qblock), SCALE_DTYPE, device)
        self.codes = empty((*lead, form.code_width(dim)), form.dtype, device)

        def side(size: int) -> Tensor | None:
            shape = (batch_size, lanes.count, size, dim)
            return torch.empty(shape, dtype=SIDE_DTYPE, device=device) if size else None

        self.tail, self.sink = side(config.tail_len), side(config.sink_len)
        self._wide: WideRing | None = None
        self._view: KVView | None = None
        self.transform = Transform(rotate=config.rotate)

    def widen_tail(self, start: Tensor, tokens: int) -> None:
        """Makes room for ``tokens`` at once behind the ``start`` (B,) held, until `narrow_tail`."""
        assert self.tail is not None
        self._wide = WideRing(self.tail, start, tokens, self.config.residual_len)
        self.tail = self._wide.wide

    def narrow_tail(self, end: Tensor) -> None:
        """Goes back to the ring of usual size; ``end`` (B,) are the tokens held now."""
        if self._wide is not None:
            self.tail, self._wide = self._wide.narrowed(end), None

    def taken(self, rows: Tensor, used: int | None) -> CacheTensor:
        """The stream of a cache whose row b is what row ``rows[b]`` (int64, on the device) is here.

        Args:
            used: slots of codes and scales that are copied; None keeps them, a pool of pages, in common.
        """
        other = copy.copy(self)
        other._view = None
        if used is not None:
            other.codes = _rows_of(self.codes, rows, used)
            other.scales = None if self.scales is None else _rows_of(self.scales, rows, used)
        other.tail = None if self.tail is None else self.tail.index_select(0, rows)
        other.sink = None if self.sink is None else self.sink.index_select(0, rows)
        return other

    def replace_buffers(self, codes: Tensor, scales: Tensor | None, transform: Transform) -> None:
        """Takes other buffers with the same tokens in them, and the transform they are stored in."""
        self.codes, self.scales, self.transform, self._view = codes, scales, transform, None

    @property
    def buffers(self) -> list[Tensor]:
        """Everything allocated."""
        return [x for x in (self.codes, self.scales, self.tail, self.sink) if x is not None]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales, tail, sinks and unused slots included."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def view(self) -> KVView:
        """What the ops read and write: all slots. The same object while nothing of it is replaced."""
        known = self._view
        if known is None or known.tail is not self.tail or known.transform is not self.transform:
            known = self._view = KVView(
                self.codes, self.scales, self.config.kind.value, self.tail, self.sink, self.transform,
                self.config.fit,
            )  # fmt: skip
        return known


def _rows_of(buffer: Tensor, rows: Tensor, used: int) -> Tensor:
    """A new buffer with the first ``used`` slots of some rows; the others hold anything."""
    new = empty((len(rows), *buffer.shape[1:]), buffer.dtype, buffer.device)
    if used:
        new[:, :, :used] = buffer[:, :, :used].index_select(0, rows)
    return new
