"""What models and generators ask of the cache of one layer, wherever its tokens are kept.

`LayerCache` keeps them in one place, `caramba_fast.distributed` over several ranks. `CachedRows` is what both offer for
rows; `KeysAndValues` and `DecoupledKeysAndValues` are the two ways to call them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from caramba_fast.cache.lengths import Counts, RowLengths
from caramba_fast.ops import apply_rotary_emb
from caramba_fast.ops.apply_rotary_emb import ROTARY

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from caramba_fast.ops.options import AttendOptions, DecoupledAttendOptions


QueryRms = Callable[[], Mapping[str, Tensor]]
"""Gives the root mean square of queries by channel, (H_kv, D) float32, of streams of keys by name."""


class AttentionLimits(NamedTuple):
    """Limits of every read of a cache, on top of the model's own.

    Attributes:
        q_chunk: query tokens `ops.extend_attention` takes at a time, which bounds its scratch and changes no
            result; None for the op's default.
        local_window: tokens a query reaches back, itself included, where the model reaches no less far;
            None for no limit. **It changes results.**
        bucket: which part of a decode plan it came from, for reports.
    """

    q_chunk: int | None = None
    local_window: int | None = None
    bucket: str = "none"

    def problems(self) -> list[str]:
        """What is out of range."""
        given = {"q_chunk": self.q_chunk, "local_window": self.local_window}
        return [
            f"{name} is {value!r}; 1 or more, or None, is allowed"
            for name, value in given.items()
            if value is not None and (type(value) is not int or value < 1)
        ]

    def window(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """``window_size`` of a read: the narrower of the call's own and ``local_window``."""
        left, right = options.get("window_size") or (-1, -1)
        if self.local_window is None:
            return left, right
        most = self.local_window - 1
        return (most if left < 0 else min(left, most)), right


@dataclass(slots=True)
class Rope:
    """RoPE as a part of an append (`ops.append_`): the queries of its tokens, and the angles of these tokens.

    Attributes:
        q: (B, H_q, T, D), of the dtype of the keys.
        cos, sin: (B or 1, T, D) or (B or 1, T, D / 2), of the same dtype.
        out: the turned queries, as q and contiguous, once the append is done. No gradient flows.
    """

    #: Kinds of devices where this takes less time than `ops.apply_rotary_emb` and an append behind it: it saves a
    #: launch. On a CPU there is none, and an op with four more tensors takes longer to call.
    FASTER_ON: ClassVar[tuple[str, ...]] = ("cuda",)

    q: Tensor
    cos: Tensor
    sin: Tensor
    out: Any = field(default=None, init=False)

    def options(self) -> dict[str, Tensor]:
        """As the ops take it, with a place for the turned queries."""
        self.out = self.q.new_empty(self.q.shape)
        found = (self.q, self.cos, self.sin, self.out)
        return dict(zip(ROTARY, found, strict=True))

    def turn(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turns the queries, and the last stream of keys of ``new``, in a call of its own; returns ``new`` with them.

        Raises:
            TypeError, ValueError: as `ops.apply_rotary_emb`.
        """
        name = [*new][-2]
        self.out, keys = apply_rotary_emb(self.q, new[name], self.cos, self.sin)
        return {**new, name: keys}


class CachedRows(ABC):
    """Rows of one layer: how long they are, how they get shorter and change places.

    Attributes:
        batch_size: rows.
        max_seq_len: tokens a row can hold.
        n_kv_heads: kv heads.
        device: where the buffers are.
        lengths: tokens each row holds.
        residual_len: keys less than this many tokens behind a query are read in fp16; 0 for none.
        ring_len: newest tokens kept in fp16 for such reads, and for groups by channel that are not full; 0 for none.
        reach: limits of every read, as a decode plan sets them (`ModelKVCache.reach`).
        reads_all_slots: attend to all slots by name, whatever is held: a recorded read then serves every length.
    """

    batch_size: int
    max_seq_len: int
    n_kv_heads: int
    device: torch.device
    lengths: RowLengths
    residual_len: int
    ring_len: int
    reach: AttentionLimits
    reads_all_slots: bool

    @property
    def pos(self) -> int:
        """Tokens in the longest row."""
        return self.lengths.longest

    @property
    def seq_lens(self) -> Tensor:
        """(B,) int32 on the device, tokens in each row; updated in place."""
        return self.lengths.seq_lens

    @property
    def is_empty(self) -> bool:
        """Whether no row holds a token."""
        return self.pos == 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, tails and sinks of all streams, unused slots, block table."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> float:
        """Bytes of codes and scales that one token of one row takes."""

    # -- growing and reading --------------------------------------------------------------

    @abstractmethod
    def append_streams(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
        rope: Rope | None = None,
    ) -> None:
        """`KeysAndValues.append` of the streams by name."""

    @abstractmethod
    def attend_from(self, queries: tuple[Tensor, ...], before: int, options: dict[str, Any]) -> Any:
        """`KeysAndValues.attend` with the queries of each key stream."""

    # -- shrinking and moving -------------------------------------------------------------

    def crop(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens of every row, or ``n[b]`` of row b (a CPU tensor or list).

        Raises:
            TypeError, ValueError: negative, more than a row holds, or a wrong number of rows.
        """
        counts = self.lengths.per_row("n", n)
        for row, (length, count) in enumerate(zip(self.lengths.host, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot crop {count} tokens of row {row}, which holds {length}")
        self.set_lengths([a - b for a, b in zip(self.lengths.host, counts, strict=True)])

    def truncate(self, new_pos: int) -> None:
        """Keeps the first ``new_pos`` tokens of every row; rows that are shorter stay as they are.

        Raises:
            ValueError: ``new_pos`` is negative or beyond the longest row.
        """
        if type(new_pos) is not int or not 0 <= new_pos <= self.pos:
            raise ValueError(f"new_pos is {new_pos!r}; 0 to {self.pos} (tokens cached) is allowed")
        self.set_lengths([min(length, new_pos) for length in self.lengths.host])

    @abstractmethod
    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Shortens rows to ``lengths``, none longer than it is."""

    @abstractmethod
    def reorder(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was (beam search)."""

    @abstractmethod
    def select_rows(self, rows: Sequence[int]) -> Self:
        """A new cache whose row b holds what row ``rows[b]`` holds here; this one stays as it is."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything; the memory stays allocated."""

    @abstractmethod
    def tail_state(self) -> tuple[list[Tensor], list[int]]:
        """Copies of the fp16 rings, for `restore_tail`: what they hold now cannot be had from the codes again."""

    @abstractmethod
    def restore_tail(self, state: tuple[list[Tensor], list[int]]) -> None:
        """Puts rings back, after the rows have got the lengths they had then."""


class KeysAndValues(CachedRows):
    """How a layer of standard attention is called."""

    def append(
        self,
        k: Tensor,
        v: Tensor,
        new_lens: Sequence[int] | None = None,
        cache_leftpad: Tensor | None = None,
        *,
        will_attend: bool = True,
        rope: Rope | None = None,
    ) -> None:
        """Quantizes and stores T tokens a row.

        Args:
            k: (B, H_kv, T, D_k), or flat (B, T, k_dim); float32, float16 or bfloat16.
            v: (B, H_kv, T, D_v), or flat (B, T, v_dim).
            new_lens: of the T tokens of row b the first ``new_lens[b]`` count, the rest is padding and
                is not stored; by default all count.
            cache_leftpad: (B,) int32, leading slots that hold padding. Sinks begin behind them: where there are some,
                it goes with the first append and every `attend`, or with none.
            will_attend: whether `attend` follows with the queries of all T tokens. With a tail, more than
                tail_slack of them need memory until then; False saves it.
            rope: turns k by RoPE on its way, and the queries of the same tokens, which are in ``rope.out`` then.

        Raises:
            ValueError: a wrong shape, or a row that would exceed max_seq_len.
            OutOfPagesError: the pool of a paged cache is too small.
            TypeError: a wrong dtype. The cache is unchanged in every case.
        """
        self.append_streams({"k": k, "v": v}, new_lens, cache_leftpad, will_attend, rope)

    def attend(self, q: Tensor, *, before: int = 0, **options: Unpack[AttendOptions]) -> Any:
        """Attention of the T newest tokens over everything cached, as `ops.decode_attention`.

        Args:
            q: (B, H_q, T, D_k), queries of the T tokens appended last; more than 32 go through
                `ops.extend_attention`.
            before: how many of the newest tokens of every row come after these T; they are not seen.
            options: softmax_scale, window_size, softcap, … of `ops.decode_attention`.

        Raises:
            ValueError: more queries than tokens cached, or an option that does not fit.
        """
        return self.attend_from((q,), before, {**options})


class DecoupledKeysAndValues(CachedRows):
    """How a layer of decoupled attention is called."""

    def append(
        self,
        k_sem: Tensor,
        k_geo: Tensor,
        v: Tensor,
        new_lens: Sequence[int] | None = None,
        cache_leftpad: Tensor | None = None,
        *,
        will_attend: bool = True,
        rope: Rope | None = None,
    ) -> None:
        """Quantizes and stores T tokens a row: (B, H_kv, T, D) each, or flat (B, T, dim).

        Arguments and errors as in `LayerKVCache.append`; ``rope`` turns k_geo.
        """
        new = {"k_sem": k_sem, "k_geo": k_geo, "v": v}
        self.append_streams(new, new_lens, cache_leftpad, will_attend, rope)

    def attend(
        self,
        q_sem: Tensor,
        q_geo: Tensor,
        *,
        before: int = 0,
        **options: Unpack[DecoupledAttendOptions],
    ) -> Any:
        """Attention of the T newest tokens, as `ops.decoupled_decode_attention`.

        Args:
            q_sem: (B, H_q, T, D_sem); q_geo: (B, H_q, T, D_geo).
            before: how many of the newest tokens of every row come after these T; they are not seen.
            options: sem_scale, geo_scale, window_size, … of the op.
        """
        return self.attend_from((q_sem, q_geo), before, {**options})
