"""LayerKVCache and DecoupledLayerKVCache: the cache of one attention layer.

`LayerCache` appends and attends; `LayerRows` crops, grows and reorders rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from caramba_fast.cache.interface import (
    DecoupledKeysAndValues,
    KeysAndValues,
    QueryRms,
    Rope,
)
from caramba_fast.cache.pages import PageAllocator, PageTable
from caramba_fast.cache.rows import LayerRows
from caramba_fast.cache.sizes import by_heads, check_agreement, check_sizes
from caramba_fast.cache.stream import SLOT_MULTIPLE, CacheTensor, capacity
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.config.kvcache import ring_size
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS
from caramba_fast.ops.gradients import results_of
from caramba_fast.ops.hadamard import rotated
from caramba_fast.ops.view import Lanes

#: Most rows whose lengths are written one by one.
MOST_ROWS = 32


def _is_observed(x: Tensor) -> bool:
    """Whether something other than the values of ``x`` follows the ops on it: a subclass, a dispatch mode, a trace."""
    modes = torch._C._len_torch_dispatch_stack()
    return type(x) is not Tensor or modes > 0 or torch._C._get_tracing_state() is not None


class LayerCache(LayerRows):
    """Streams of one layer and the lengths of their rows.

    Args:
        batch_size: rows.
        max_seq_len: capacity of a row in tokens.
        dims: width of each stream over all kv heads.
        configs: storage of each stream, same keys.
        device: device of the buffers.
        n_kv_heads: kv heads; every width is a multiple of it.
        page_size: None for a contiguous cache (memory for max_seq_len tokens per row, rounded up to 128), else tokens
            per page, a multiple of 32.
        num_pages: pages of the pool; by default enough for every row to reach max_seq_len.
        query_rms: as `LayerShape.query_rms`; called if a key stream splits its bytes between channels (q4_channel with
            fit "mse"). None to weight the errors of all channels equally.

    Attributes:
        attended_again: whether later layers also attend to this cache; widened tails are then kept until the next
            change.
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        dims: dict[str, int],
        configs: dict[str, KVCacheTensorConfig],
        device: torch.device | str,
        n_kv_heads: int,
        page_size: int | None,
        num_pages: int | None,
        query_rms: QueryRms | None = None,
    ) -> None:
        check_sizes(batch_size, max_seq_len, n_kv_heads, dims, page_size, num_pages)
        check_agreement(configs)
        place = torch.device(device)
        heads = {name: dim // n_kv_heads for name, dim in dims.items()}
        lanes = Lanes.of(n_kv_heads, *heads.values())
        blocks, pages = (batch_size, capacity(max_seq_len)), None
        with torch.inference_mode(False):  # else buffers are read-only outside of it
            if page_size is not None:
                per_row = -(-max_seq_len // page_size)
                blocks = (num_pages or batch_size * per_row, page_size)
                allocator = PageAllocator(blocks[0])
                pages = PageTable(batch_size, per_row, page_size, allocator, place)
            ring = ring_size(configs.values())
            streams = {
                name: CacheTensor(
                    batch_size, blocks, lanes, heads[name], configs[name], place, ring
                )
                for name in dims
            }
            super().__init__(streams, batch_size, max_seq_len, n_kv_heads, place, pages)
            known = query_rms() if query_rms and any(s.weighs for s in streams.values()) else {}
            for name in known.keys() & streams.keys():
                streams[name].set_query_rms(known[name])
        self.attended_again = False
        self._front = SLOT_MULTIPLE  # slots that hold the longest row, of a contiguous cache

    def get(
        self,
        dtype: torch.dtype = torch.float32,
        cache_leftpad: Tensor | None = None,
        *,
        as_read: bool = False,
        queries: int = 1,
    ) -> tuple[Tensor, ...]:
        """Every stream dequantized, in the model's basis: (B, H_kv, pos, D) of ``dtype``; 0 past a row's length.

        Reads the codes, not the fp16 tail or sinks, except for tokens of per-channel kinds that have no codes yet.

        Args:
            cache_leftpad: (B,) int32, leading slots that hold padding, as given to `append`.
            as_read: use the tail and sinks as attention of the newest token does. A tail reaches residual_len tokens
                back from each query, so earlier queries of a multi-token step would read more in fp16.
            queries: with ``as_read``, how many of the newest tokens are queries. All read what the oldest of them does,
                so that none sees codes chosen with later tokens. Clipped to what `attend` takes.
        """
        earlier = max(0, min(queries, self.attendable) - 1) if as_read else 0
        if earlier < max(1, self.tail_slack):
            self.narrow_tails()
        position = torch.arange(self.pos, device=self.device)
        held = (position < self.seq_lens[:, None])[:, None, :, None]
        shortest, found = min(self.lengths.host), []
        asked, ends = self.lengths.query_lens, self.seq_lens.to(torch.int64)
        ends = ends - (earlier if asked is None else (asked.to(torch.int64) - 1).clamp(0, earlier))
        for name, stream in self.streams.items():
            x = self.stored(name, self.pos)
            if as_read or stream.group > 1:
                group, newest = (self.group, self.residual_len) if as_read else (stream.group, 0)
                first = max((shortest - earlier - newest) // group * group, 0)
                x = stream.overlay(x, (ends - newest) // group * group, first, cache_leftpad)
            x = rotated(x, stream.config.rotate)
            found.append(torch.where(held, x, torch.zeros_like(x)).to(dtype))
        return tuple(found)

    def append_streams(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
        rope: Rope | None = None,
    ) -> None:
        """`KeysAndValues.append`, with the streams by name."""
        if self._widened:
            self.narrow_tails()
        if new_lens is not None or not self.append_again((*new.values(),), cache_leftpad, rope):
            self._append_anew(new, new_lens, cache_leftpad, will_attend, rope)

    @torch.no_grad()  # a cache holds no autograd graph
    def _append_anew(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
        rope: Rope | None,
    ) -> None:
        new = by_heads(new, self.streams, self.batch_size, self.n_kv_heads)
        tokens = next(iter(new.values())).shape[2]
        added = self.lengths.per_row("new_lens", tokens if new_lens is None else new_lens)
        if not max(self.lengths.host):
            sinks = any(stream.sink is not None for stream in self.streams.values())
            self._begun_padded = cache_leftpad is not None if sinks else None
        self._make_room(tokens, added)
        query_lens = None if min(added) == tokens else self.lengths.on_device(added)
        if self.ring_len and will_attend and tokens > self.tail_slack:
            start, before = self.seq_lens.clone(), self.ring_len - self.tail_slack
            self._widened, self._widened_from = tokens, list(self.lengths.host)
            for stream in self.streams.values():
                stream.widen_tail(start, tokens, before)
        given = {
            "block_table": None if self.pages is None else self.pages.tensor,
            "cache_leftpad": cache_leftpad,
            "query_lens": query_lens,
        }
        options = {name: value for name, value in given.items() if value is not None}
        if rope is not None:
            options |= rope.options()
        try:
            self.plans.append(tuple(new.values()), self.seq_lens, options)
        except BaseException:
            if self.pages is not None:  # nothing was written: free the reserved pages
                self.pages.shrink(self.lengths.host)
            self.narrow_tails()
            raise
        self.lengths.advance(tokens, added, query_lens)

    def append_again(
        self,
        new: Sequence[Tensor],
        cache_leftpad: Tensor | None = None,
        rope: Rope | None = None,
    ) -> bool:
        """Fast path for a step like an earlier one in a contiguous cache; otherwise returns False, changing nothing.

        ``new`` is (B, H_kv, T, D) of each stream; other arguments as in `append`.
        """
        lengths = self.lengths
        longest, first = max(lengths.host), new[0]
        if self.pages is not None or self._widened or not longest or first.ndim != 4:
            return False
        tokens = first.shape[2]
        if longest + tokens > self.max_seq_len or (self.ring_len and tokens > self.tail_slack):
            return False
        if torch.is_grad_enabled():
            return False
        options = {} if cache_leftpad is None else {"cache_leftpad": cache_leftpad}
        if rope is not None:
            options |= rope.options()
        if not self.plans.append_as_before((*new, lengths.seq_lens), options):
            return False
        self._grow(tokens)
        return True

    def _grow(self, tokens: int) -> None:
        """Every row is ``tokens`` longer: on a CPU without an op, which would take as long as a short append."""
        self._grown(tokens)
        lengths, held = self.lengths, self.lengths.seq_lens
        if held.device.type != "cpu" or self.batch_size > MOST_ROWS or _is_observed(held):
            held.add_(tokens)
            return
        place = held.data_ptr()
        if lengths.memory is None or lengths.memory[0] != place:  # `Tensor.share_memory_` moves it
            lengths.memory = place, held.numpy().data
        for row, length in enumerate(lengths.host):
            lengths.memory[1][row] = length

    def _grown(self, tokens: int) -> None:
        lengths = self.lengths
        lengths.host = [length + tokens for length in lengths.host]
        lengths.newest, lengths.query_lens = tokens, None

    def _make_room(self, tokens: int, added: Sequence[int]) -> None:
        self.lengths.check_room(tokens, added, self.max_seq_len)
        if self.pages is not None:
            moved = self.pages.reserve(self.lengths.host, added)
            try:
                self.copy_pages(moved)
            except BaseException:  # out of memory, or an interrupt: restore the old pages
                self.pages.take_back(moved, self.lengths.host)
                raise

    def before_replay(self) -> None:
        """The host's part of a captured append of one token per row: makes room; errors as in `append`."""
        self.narrow_tails()
        self._make_room(1, [1] * self.batch_size)

    def after_replay(self) -> None:
        """Updates the host's lengths after a captured append wrote one token to each row."""
        self._grown(1)

    @property
    def attendable(self) -> int:
        """Most of the newest tokens that can be queries at once, if there is a tail."""
        return max(self.tail_slack, self._widened)

    def attend_from(self, queries: tuple[Tensor, ...], before: int, options: dict[str, Any]) -> Any:
        """`KeysAndValues.attend`, with the queries of each key stream."""
        slots, lengths = None, self.lengths
        longest = max(lengths.host)
        self._check_tokens(queries[0], before, longest)
        pad = options.get("cache_leftpad")
        fits = self._begun_padded is None or self._begun_padded == (pad is not None)
        if not fits and (pad is None or isinstance(pad, Tensor)):  # other types are refused later
            raise ValueError(
                "cache_leftpad says where the sinks of a row begin: it goes with the first append and with every call "
                "of attend, or with none of them"
            )
        if self.pages is not None:
            whole = self.reads_all_slots
            options["block_table"] = self.pages.tensor if whole else self.pages.columns(longest)
        elif not self.reads_all_slots:
            if not self._front - SLOT_MULTIPLE < longest <= self._front:
                self._front = capacity(max(longest, 1))
            slots = self._front
        if lengths.query_lens is not None:
            options.setdefault("query_lens", lengths.query_lens)
        if self.residual_len:
            options["residual_len"] = self.residual_len
        if self.reach.local_window is not None:
            options["window_size"] = self.reach.window(options)
        if self.reach.q_chunk is not None and queries[0].shape[2] > MAX_QUERY_TOKENS:
            options.setdefault("q_chunk", self.reach.q_chunk)
        with_lse = options.pop("return_softmax_lse", False)
        held = lengths.seq_lens - before if before else lengths.seq_lens
        out, lse = self.plans.attend(queries, held, options, slots)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # see `tangents_go_along`
            given = (*queries, *options.values())
            out, lse = results_of("attention over a packed cache", (out, lse), *given)
        if self._widened and not before and not self.attended_again:
            self.narrow_tails()
        return (out, lse) if with_lse else out

    def _check_tokens(self, q: Tensor, before: int, longest: int) -> None:
        """Raises ValueError unless this many of the newest tokens can be queries."""
        tokens = q.shape[2] + before if q.ndim == 4 and before >= 0 else 0
        lengths = self.lengths
        if not 1 <= tokens <= max(longest, lengths.newest):
            raise ValueError(
                f"q has shape {tuple(q.shape)}; (B, H_q, T, D) with T from 1 to the "
                f"{max(longest, lengths.newest)} tokens cached is needed"
            )
        if self.ring_len and tokens > self.attendable:
            raise ValueError(
                f"q has T={tokens} tokens; with a tail up to tail_slack={self.tail_slack} are allowed, "
                "or those of the latest append, once and right after it"
            )
        if lengths.query_lens is not None and (before or tokens != lengths.newest):
            raise ValueError(
                f"q has T={tokens} tokens after an append of {lengths.newest} with padding; "
                "they must agree"
            )


class LayerKVCache(LayerCache, KeysAndValues):
    """K and V of one layer, each in any kind.

    Args:
        batch_size: rows.
        max_seq_len: capacity of a row in tokens.
        k_dim, v_dim: width of K and of V over all kv heads, ``n_kv_heads * head_dim`` each.
        k_cfg, v_cfg: how each is stored; by default fp16.
        device: device of the buffers.
        n_kv_heads: kv heads; both widths must be multiples of it.
        page_size, num_pages, query_rms: see `LayerCache`; the first two make a paged cache.

    Raises:
        ValueError: a size that is not positive or does not divide, or a block size that does not fit.
    """

    k: CacheTensor
    v: CacheTensor

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
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        query_rms: QueryRms | None = None,
    ) -> None:
        dims = {"k": k_dim, "v": v_dim}
        configs = {"k": k_cfg or KVCacheTensorConfig(), "v": v_cfg or KVCacheTensorConfig()}
        super().__init__(
            batch_size, max_seq_len, dims, configs, device, n_kv_heads, page_size, num_pages,
            query_rms,
        )  # fmt: skip


class DecoupledLayerKVCache(LayerCache, DecoupledKeysAndValues):
    """K_sem, K_geo and V of one layer of decoupled attention, each in any kind.

    Args:
        batch_size, max_seq_len, device, n_kv_heads, page_size, num_pages, query_rms: as in `LayerKVCache`.
        k_sem_dim, k_geo_dim, v_dim: widths over all kv heads.
        k_sem_cfg, k_geo_cfg, v_cfg: how each is stored; by default fp16.

    Raises:
        ValueError: as in `LayerKVCache`.
    """

    k_sem: CacheTensor
    k_geo: CacheTensor
    v: CacheTensor

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        k_sem_dim: int,
        k_geo_dim: int,
        v_dim: int,
        k_sem_cfg: KVCacheTensorConfig | None = None,
        k_geo_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        n_kv_heads: int = 1,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        query_rms: QueryRms | None = None,
    ) -> None:
        dims = {"k_sem": k_sem_dim, "k_geo": k_geo_dim, "v": v_dim}
        given = {"k_sem": k_sem_cfg, "k_geo": k_geo_cfg, "v": v_cfg}
        configs = {name: config or KVCacheTensorConfig() for name, config in given.items()}
        super().__init__(
            batch_size, max_seq_len, dims, configs, device, n_kv_heads, page_size, num_pages,
            query_rms,
        )  # fmt: skip
