"""The interface of a layer's cache that models and generators use, wherever its tokens are stored.

`LayerCache` stores them in one place, `caramba_fast.distributed` across several ranks. `KeysAndValues` and
`DecoupledKeysAndValues` add append and attend to `CachedRows`.
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
"""Returns the root mean square of the queries per channel, (H_kv, D) float32, by name of the key stream."""


class AttentionLimits(NamedTuple):
    """Limits of every read of a cache, on top of the model's own.

    Attributes:
        q_chunk: query tokens that `ops.extend_attention` processes at a time; bounds its scratch memory and does not
            change results. None for the op's default.
        local_window: most tokens a query sees, itself included, if the model's own window is not smaller; None for no
            limit. **It changes results.**
        bucket: the bucket of the decode plan that set the limits, for reports.
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
        """``window_size`` of a read: the narrower of the call's own window and ``local_window``."""
        left, right = options.get("window_size") or (-1, -1)
        if self.local_window is None:
            return left, right
        most = self.local_window - 1
        return (most if left < 0 else min(left, most)), right


@dataclass(slots=True)
class Rope:
    """RoPE fused into an append (`ops.append_`): the queries of the new tokens and their angles.

    Attributes:
        q: (B, H_q, T, D), same dtype as the keys.
        cos, sin: (B or 1, T, D) or (B or 1, T, D / 2), same dtype.
        out: the rotated queries after the append: shape and dtype of q, contiguous. No gradient flows.
    """

    #: Device types where this saves a kernel launch. A CPU has none to save, and more arguments make a call slower.
    FASTER_ON: ClassVar[tuple[str, ...]] = ("cuda",)

    q: Tensor
    cos: Tensor
    sin: Tensor
    out: Any = field(default=None, init=False)

    def options(self) -> dict[str, Tensor]:
        """Keyword arguments for the ops, with a new buffer for the rotated queries."""
        self.out = self.q.new_empty(self.q.shape)
        found = (self.q, self.cos, self.sin, self.out)
        return dict(zip(ROTARY, found, strict=True))

    def turn(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Applies `ops.apply_rotary_emb` to q and the last key stream of ``new``; returns ``new`` with those keys."""
        name = [*new][-2]
        self.out, keys = apply_rotary_emb(self.q, new[name], self.cos, self.sin)
        return {**new, name: keys}


class CachedRows(ABC):
    """Rows of one layer: their lengths, and how to shorten and reorder them.

    Attributes:
        batch_size: rows.
        max_seq_len: capacity of a row in tokens.
        n_kv_heads: kv heads.
        device: device of the buffers.
        lengths: tokens each row holds.
        residual_len: keys at a distance of less than this many tokens before a query are read in fp16; 0 for none.
        ring_len: newest tokens kept in fp16 for such reads, and for incomplete per-channel groups; 0 for none.
        reach: limits of every read, set by a decode plan (`ModelKVCache.reach`).
        reads_all_slots: pass all slots to attention whatever the lengths, so that a captured read serves every length.
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
        return max(self.lengths.host)

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
        """Bytes of codes and scales per token of one row."""

    @abstractmethod
    def append_streams(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
        rope: Rope | None = None,
    ) -> None:
        """`KeysAndValues.append`, with the streams by name."""

    @abstractmethod
    def attend_from(self, queries: tuple[Tensor, ...], before: int, options: dict[str, Any]) -> Any:
        """`KeysAndValues.attend`, with the queries of each key stream."""

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
        """Keeps the first ``new_pos`` tokens of every row; shorter rows are unchanged.

        Raises ValueError if ``new_pos`` is negative or beyond the longest row.
        """
        if type(new_pos) is not int or not 0 <= new_pos <= self.pos:
            raise ValueError(f"new_pos is {new_pos!r}; 0 to {self.pos} (tokens cached) is allowed")
        self.set_lengths([min(length, new_pos) for length in self.lengths.host])

    @abstractmethod
    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Shortens rows to ``lengths``, none of which may exceed the current length."""

    @abstractmethod
    def reorder(self, beam_idx: Tensor) -> None:
        """Reorders rows: new row b is old row ``beam_idx[b]`` (beam search)."""

    @abstractmethod
    def select_rows(self, rows: Sequence[int]) -> Self:
        """A new cache whose row b is row ``rows[b]`` of this one, which is unchanged."""

    @abstractmethod
    def reset(self) -> None:
        """Removes all tokens; the memory stays allocated."""

    @abstractmethod
    def tail_state(self) -> tuple[list[Tensor], list[int]]:
        """Copies of the fp16 rings, for `restore_tail`: the codes do not preserve their exact values."""

    @abstractmethod
    def restore_tail(self, state: tuple[list[Tensor], list[int]]) -> None:
        """Restores the rings; call it after the rows have their former lengths again."""


class KeysAndValues(CachedRows):
    """Append and attend for a layer of standard attention."""

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
        """Quantizes and stores T tokens per row.

        Args:
            k: (B, H_kv, T, D_k), or flat (B, T, k_dim); float32, float16 or bfloat16.
            v: (B, H_kv, T, D_v), or flat (B, T, v_dim).
            new_lens: the number of real tokens of each row; the rest of the T tokens is right padding and is not
                stored. By default all are real.
            cache_leftpad: (B,) int32, leading slots that hold padding. Sinks begin after them: with sinks, pass it to
                the first append and to every `attend`, or to none of them.
            will_attend: whether `attend` follows with the queries of all T tokens. With a tail, more than tail_slack
                tokens need extra memory until then, which False saves.
            rope: applies RoPE to k as it is stored, and to the queries of the same tokens, returned in ``rope.out``.

        Raises:
            ValueError: a wrong shape, or a row would exceed max_seq_len.
            OutOfPagesError: the pool of a paged cache has too few free pages.
            TypeError: a wrong dtype. After any of these errors the cache is unchanged.
        """
        self.append_streams({"k": k, "v": v}, new_lens, cache_leftpad, will_attend, rope)

    def attend(self, q: Tensor, *, before: int = 0, **options: Unpack[AttendOptions]) -> Any:
        """Attention of the T newest tokens over everything cached, as `ops.decode_attention`.

        Args:
            q: (B, H_q, T, D_k), queries of the T tokens appended last; more than 32 use `ops.extend_attention`.
            before: how many of the newest tokens of every row follow these T; they are not visible to the queries.
            options: softmax_scale, window_size, softcap, … of `ops.decode_attention`.

        Returns:
            (B, H_q, T, D_v) in q's dtype; with ``return_softmax_lse=True`` also lse (B, H_q, T) float32.

        Raises:
            TypeError: a wrong dtype, or an unknown option.
            ValueError: an invalid option, more queries than cached tokens, or, with an fp16 tail, more than tail_slack,
                except those of the latest append.
        """
        return self.attend_from((q,), before, {**options})


class DecoupledKeysAndValues(CachedRows):
    """Append and attend for a layer of decoupled attention."""

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
        """Quantizes and stores T tokens per row: (B, H_kv, T, D) each, or flat (B, T, dim).

        Arguments and errors as in `LayerKVCache.append`; ``rope`` is applied to k_geo.
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
        """Attention of the T newest tokens: q_sem (B, H_q, T, D_sem), q_geo (B, H_q, T, D_geo).

        Options as in `ops.decoupled_decode_attention`; ``before`` and errors as in `KeysAndValues.attend`.
        """
        return self.attend_from((q_sem, q_geo), before, {**options})
