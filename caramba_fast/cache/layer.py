"""LayerKVCache: the K and V cache of one attention layer, stored in any mix of kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.lengths import Counts, RowLengths
from caramba_fast.cache.tensor import CacheTensor, capacity
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.ops import append_, checks, decode_attention
from caramba_fast.ops.view import Lanes

#: Score entries of one reference pass; more query tokens than fit go in several passes.
SCORES_PER_PASS = 2**24


class LayerKVCache:
    """Contiguous cache of one layer.

    Args:
        batch_size: rows.
        max_seq_len: tokens a row can hold; memory is allocated for it, rounded up to 128.
        k_dim, v_dim: width of K and of V over all kv heads, ``n_kv_heads * head_dim`` each.
        k_cfg, v_cfg: how each is stored; by default fp16.
        device: where the buffers live.
        n_kv_heads: kv heads; both widths must be multiples of it.

    Raises:
        ValueError: a size that is not positive or does not divide, a block that does not fit.
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        k_dim: int,
        v_dim: int,
        k_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        n_kv_heads: int = 1,
    ) -> None:
        sizes = dict(
            batch_size=batch_size, max_seq_len=max_seq_len, k_dim=k_dim, v_dim=v_dim,
            n_kv_heads=n_kv_heads,
        )  # fmt: skip
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; a positive int is needed")
        for name in ("k_dim", "v_dim"):
            if sizes[name] % n_kv_heads:
                raise ValueError(f"{name}={sizes[name]} is not a multiple of n_kv_heads={n_kv_heads}")
        self.batch_size, self.max_seq_len, self.n_kv_heads = batch_size, max_seq_len, n_kv_heads
        self.device = torch.device(device)
        k_head, v_head = k_dim // n_kv_heads, v_dim // n_kv_heads
        lanes, slots = Lanes.of(n_kv_heads, k_head, v_head), capacity(max_seq_len)
        k_cfg, v_cfg = k_cfg or KVCacheTensorConfig(), v_cfg or KVCacheTensorConfig()
        self.k = CacheTensor(batch_size, slots, lanes, k_head, k_cfg, self.device)
        self.v = CacheTensor(batch_size, slots, lanes, v_head, v_cfg, self.device)
        self.lengths = RowLengths(batch_size, self.device)

    # -- what it holds ------------------------------------------------------------------

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
        return self.pos == 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated: codes and scales of K and V, unused slots included."""
        return self.k.nbytes + self.v.nbytes

    def get(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """K (B, H_kv, pos, D_k) and V (B, H_kv, pos, D_v), dequantized; 0 past a row's length."""
        held = torch.arange(self.pos, device=self.device) < self.seq_lens[:, None]
        held = held[:, None, :, None]
        k, v = self.k.values(self.pos, dtype), self.v.values(self.pos, dtype)
        return torch.where(held, k, torch.zeros_like(k)), torch.where(held, v, torch.zeros_like(v))

    # -- growing ------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, new_lens: Sequence[int] | None = None) -> None:
        """Quantizes and stores T tokens a row.

        Args:
            k: (B, H_kv, T, D_k), or flat (B, T, k_dim); float32, float16 or bfloat16.
            v: (B, H_kv, T, D_v), or flat (B, T, v_dim).
            new_lens: of the T tokens of row b the first ``new_lens[b]`` count, the rest is padding;
                by default all count.

        Raises:
            ValueError: a wrong shape, or a row that would exceed max_seq_len.
            TypeError: a wrong dtype. The cache is unchanged in every case.
        """
        k, v = self._heads("k", k, self.k), self._heads("v", v, self.v)
        tokens = k.shape[2]
        if v.shape[2] != tokens:
            raise ValueError(f"k has {tokens} tokens and v {v.shape[2]}; they must agree")
        added = self.lengths.per_row("new_lens", tokens if new_lens is None else new_lens)
        for row, (length, count) in enumerate(zip(self.lengths.host, added, strict=True)):
            if not 0 <= count <= tokens:
                raise ValueError(f"new_lens[{row}] is {count}; 0 to T={tokens} is allowed")
            if length + count > self.max_seq_len:
                raise ValueError(
                    f"row {row} holds {length} tokens and cannot take {count} more: "
                    f"max_seq_len is {self.max_seq_len}"
                )
        append_(self.k.view(), self.v.view(), k, v, self.seq_lens)
        self.lengths.advance(tokens, added)

    def _heads(self, name: str, x: Tensor, stream: CacheTensor) -> Tensor:
        checks.float_tensor(name, x)
        wanted = (self.n_kv_heads, stream.head_dim)
        if x.ndim == 3 and x.shape[2] == wanted[0] * wanted[1]:
            x = x.unflatten(2, wanted).transpose(1, 2)
        fits = x.ndim == 4 and x.shape[0] == self.batch_size and (x.shape[1], x.shape[3]) == wanted
        if not fits or x.shape[2] == 0:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; ({self.batch_size}, {wanted[0]}, T, {wanted[1]}) "
                f"or ({self.batch_size}, T, {wanted[0] * wanted[1]}) with T >= 1 is needed"
            )
        if x.device != self.k.codes.device:
            raise ValueError(f"{name} is on {x.device}; the cache is on {self.k.codes.device}")
        return x

    # -- reading ------------------------------------------------------------------------

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Attention of the T newest tokens over everything cached, as `ops.decode_attention`.

        Args:
            q: (B, H_q, T, D_k), queries of the T tokens appended last.
            options: softmax_scale, window_size, softcap, … of `ops.decode_attention`.

        Raises:
            ValueError: more queries than tokens cached, or an option that does not fit.
        """
        if q.ndim != 4 or not 1 <= q.shape[2] <= max(self.lengths.padded_to, 0):
            raise ValueError(
                f"q has shape {tuple(q.shape)}; (B, H_q, T, D) with T from 1 to the "
                f"{self.lengths.padded_to} tokens cached is needed"
            )
        heads, tokens = q.shape[1], q.shape[2]
        length = min(self.lengths.padded_to, self.k.codes.shape[2])
        k, v = self.k.view(length), self.v.view(length)
        step = max(1, SCORES_PER_PASS // (self.batch_size * heads * k.codes.shape[2]))
        parts = []
        for start in range(0, tokens, step):
            part = q[:, :, start : start + step]
            behind = tokens - start - part.shape[2]
            ends = self.lengths.ends - behind if behind else self.lengths.ends
            parts.append(
                decode_attention(part, k, v, ends, n_kv_heads=self.n_kv_heads, **options)
            )
        if options.get("return_softmax_lse"):
            return tuple(torch.cat(each, dim=2) for each in zip(*parts, strict=True))  # type: ignore[return-value]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    # -- shrinking and moving -----------------------------------------------------------

    def crop(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens of every row, or ``n[b]`` of row b (a CPU tensor or list).

        Raises:
            TypeError, ValueError: negative, more than a row holds, or a wrong number of rows.
        """
        counts = self.lengths.per_row("n", n)
        for row, (length, count) in enumerate(zip(self.lengths.host, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot crop {count} tokens of row {row}, which holds {length}")
        self.lengths.set([a - b for a, b in zip(self.lengths.host, counts, strict=True)])

    def truncate(self, new_pos: int) -> None:
        """Keeps the first ``new_pos`` tokens of every row; rows that are shorter stay as they are.

        Raises:
            ValueError: ``new_pos`` is negative or beyond the longest row.
        """
        if not isinstance(new_pos, int) or not 0 <= new_pos <= self.pos:
            raise ValueError(f"new_pos is {new_pos!r}; 0 to {self.pos} (tokens cached) is allowed")
        self.lengths.set([min(length, new_pos) for length in self.lengths.host])

    def reorder(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was (beam search).

        Args:
            beam_idx: (B,) integer tensor; on cpu when rows differ in length, since lengths are
                never read from a device.
        """
        if beam_idx.shape != (self.batch_size,) or beam_idx.is_floating_point():
            raise ValueError(
                f"beam_idx is {tuple(beam_idx.shape)} {beam_idx.dtype}; ({self.batch_size},) "
                "integers are needed"
            )
        host = self.lengths.host
        if beam_idx.device.type == "cpu":
            rows = beam_idx.tolist()
            if min(rows) < 0 or max(rows) >= self.batch_size:
                raise ValueError(f"beam_idx is {rows}; 0 to {self.batch_size - 1} is allowed")
            host = [host[row] for row in rows]
        elif len(set(host)) > 1:
            raise ValueError("beam_idx must be on cpu while rows differ in length")
        order = beam_idx.to(self.k.codes.device)
        for stream in (self.k, self.v):
            stream.reorder(order, self.pos)
        self.lengths.set(host)

    def reset(self) -> None:
        """Forgets everything; the memory stays allocated."""
        self.lengths.set([0] * self.batch_size)
