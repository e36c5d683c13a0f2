"""TailKeeper: which positions the fp16 ring of each row really holds.

The ring has residual_len + tail_slack slots; position j is in slot j modulo that. Cropping up to
tail_slack tokens loses nothing. A deeper crop needs positions whose slots were overwritten: those are put
back from their codes, so that every read stays correct, at the codes' precision.

More tokens than tail_slack at once (a chunk of a prompt) would overwrite what their first queries still
have to read: they are written to a `WideRing` that lives from the append until they have been attended to.

Memory of large CPU buffers: in huge pages where the system has them to give.

A decode step reads every page of the cache once, from two streams at a time; with pages of 4 KiB a good part of
that is looking up addresses (q4 decodes 1.1 times, fp16 1.25 times as fast from 2 MiB pages, measured).

CacheTensor: the buffers of one cached stream (K or V of a layer).
"""

from __future__ import annotations

import copy
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.formats import SCALE_DTYPE, check_block
from caramba_fast.ops import KVView, Transform
from caramba_fast.ops.view import Lanes


class WideRing:
    """A ring for ``tokens`` new tokens and the residual_len before them, in place of a stream's own.

    Args:
        ring: (B, lanes, R, lane_dim), the stream's ring.
        start: (B,) integer, tokens held before the append.
        tokens: tokens appended.
        residual_len: tokens behind a query that are read from the ring.
    """

    def __init__(self, ring: Tensor, start: Tensor, tokens: int, residual_len: int) -> None:
        self.ring, self.start = ring, start.to(torch.int64)
        shape = (*ring.shape[:2], residual_len + tokens, ring.shape[3])
        self.wide = ring.new_empty(shape)
        back = torch.arange(1, residual_len + 1, device=ring.device)
        _copy(ring, self.wide, self.start[:, None] - back)

    def narrowed(self, end: Tensor) -> Tensor:
        """The stream's ring again, with the newest of the tokens up to ``end`` (B,) in it."""
        position = end.to(torch.int64)[:, None] - torch.arange(
            1, self.ring.shape[2] + 1, device=self.ring.device
        )
        _copy(self.wide, self.ring, position, position >= self.start[:, None])
        return self.ring


def _copy(source: Tensor, target: Tensor, position: Tensor, keep: Tensor | None = None) -> None:
    """Moves positions (B, N) from ring to ring; where ``keep`` is false the target stays as it is."""
    row = torch.arange(len(position), device=position.device)[:, None]
    slot = position % target.shape[2]
    values = source[row, :, position % source.shape[2]]
    if keep is not None:
        values = torch.where(keep[..., None, None], values, target[row, :, slot])
    target[row, :, slot] = values


class TailKeeper:
    """Per row, the lowest position whose fp16 values are in the ring.

    Args:
        batch_size: rows.
        residual_len: tokens behind a query that are read from the ring; 0 for no ring.
        size: slots of the ring.
    """

    def __init__(self, batch_size: int, residual_len: int, size: int) -> None:
        self.residual_len, self.size = residual_len, size
        self.lowest = [0] * batch_size

    def appended(self, lengths: Sequence[int]) -> None:
        """Rows have grown to ``lengths``."""
        if self.residual_len:
            self.lowest = [
                max(low, n - self.size) for low, n in zip(self.lowest, lengths, strict=True)
            ]

    def shortened(
        self, before: Sequence[int], after: Sequence[int], refill: Callable[[int, int, int], None]
    ) -> None:
        """Rows go from ``before`` to ``after`` tokens; calls refill(row, start, stop) where needed."""
        if not self.residual_len:
            return
        for row, (old, new) in enumerate(zip(before, after, strict=True)):
            needed = max(0, new - self.size + 1)  # the newest tokens may be asked again
            if new < old and self.lowest[row] > needed:
                if new > needed:
                    refill(row, needed, min(self.lowest[row], new))
                self.lowest[row] = needed

    def select_rows(self, rows: Sequence[int]) -> TailKeeper:
        """The keeper of a cache whose row b is what row ``rows[b]`` is here."""
        other = TailKeeper(len(rows), self.residual_len, self.size)
        other.lowest = [self.lowest[row] for row in rows]
        return other

    def reordered_unknown(self) -> None:
        """Rows were permuted by an order the host does not know: assume the worst for each."""
        self.lowest = [max(self.lowest)] * len(self.lowest)

    def reordered(self, rows: Sequence[int]) -> None:
        """Row b is now what row ``rows[b]`` was."""
        self.lowest = [self.lowest[row] for row in rows]


HUGE_PAGE = 2 * 2**20
#: ``MADV_HUGEPAGE`` of Linux (madvise(2)): a wish, which the kernel may leave unfulfilled.
ADVICE = 14


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, in huge pages if it is large, on the CPU and under Linux."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    if torch.compiler.is_compiling():  # it has no address yet, and its size may be a symbol
        return buffer
    if device.type == "cpu" and type(buffer) is Tensor and buffer.nbytes >= 2 * HUGE_PAGE:
        _advise(buffer.data_ptr(), buffer.nbytes)
    return buffer


def _advise(start: int, length: int) -> None:
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    whole = (start + length - first) // HUGE_PAGE * HUGE_PAGE
    advise = _madvise()
    if advise is not None and whole > 0:
        advise(first, whole, ADVICE)  # refused (no such pages here), everything works as without


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


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

    def select_rows(self, rows: Tensor, used: int | None) -> CacheTensor:
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
