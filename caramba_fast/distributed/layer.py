"""ContextParallelLayer: one layer's cache, its tokens spread over ranks by pages.

Every rank gets all new tokens and queries, stores the tokens of its own pages and attends over these; one all-gather
combines the partial results. Lengths are those of whole rows, the same on every rank.

Arguments are checked before any op runs (`asked`): a rank that raised inside an op would leave the others waiting.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import AttentionLimits, LayerCache, PageAllocator, PageTable, RowLengths
from caramba_fast.cache.interface import CachedRows, DecoupledKeysAndValues, KeysAndValues, Rope
from caramba_fast.cache.rows import Refill
from caramba_fast.cache.sizes import by_heads
from caramba_fast.cache.stream import CacheTensor
from caramba_fast.distributed.asked import PLAIN, SCALES, asked_queries
from caramba_fast.distributed.group import RankGroup
from caramba_fast.distributed.partial_attention import (
    attend_to_pages,
    attend_to_ring,
    default_scale,
    gather_and_merge,
    with_extras,
)
from caramba_fast.distributed.placement import Placement, Queries
from caramba_fast.ops import merge_state
from caramba_fast.ops.gradients import results_of

if TYPE_CHECKING:
    from typing_extensions import Self


def picked(x: Tensor, index: Tensor | None, most: int) -> Tensor:
    """Tokens ``index`` (B, most) of x (B, H, T, D), or the first ``most``."""
    if index is None:
        return x[:, :, :most]
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def copied(cache: LayerCache, rows: Sequence[int], pages_per_row: int) -> LayerCache:
    """A copy of a paged cache, with its own pool, whose row b is row ``rows[b]`` of ``cache``."""
    assert cache.pages is not None
    other = cache.select_rows(rows)
    shared = other.pages
    assert shared is not None
    allocator = PageAllocator(len(rows) * pages_per_row)
    size = cache.pages.page_size
    other.pages = PageTable(len(rows), pages_per_row, size, allocator, cache.device)
    other.pages.reserve([0] * len(rows), other.lengths.host)
    pairs = [
        pair
        for old, new in zip(shared.rows, other.pages.rows, strict=True)
        for pair in zip(old, new, strict=True)
    ]
    source, target = (
        torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).T.to(cache.device)
    )
    for stream in other.streams.values():
        stream.replace_buffers(*stream.with_pages(len(allocator.references), target, source))
    shared.shrink([0] * len(rows))
    return other


class ContextParallelLayer(CachedRows):
    """One layer's cache, spread over ranks; created by `caramba_fast.distributed.cache.Context`.

    Args:
        local: a paged cache of this rank's pages.
        ring: the fp16 tail, or None.
        placement: which rank stores which tokens.
        group: the ranks.
        max_seq_len: tokens a row can hold over all ranks.
    """

    def __init__(
        self,
        local: LayerCache,
        ring: LayerCache | None,
        placement: Placement,
        group: RankGroup,
        max_seq_len: int,
    ) -> None:
        self.local, self.ring, self.placement, self.group = local, ring, placement, group
        self.batch_size, self.max_seq_len = local.batch_size, max_seq_len
        self.n_kv_heads, self.device = local.n_kv_heads, local.device
        self.residual_len = 0 if ring is None else ring.residual_len
        self.ring_len = 0 if ring is None else ring.ring_len
        self.tail_slack = local.tail_slack
        self.reads_all_slots, self.reach = False, AttentionLimits()
        self._newest: list[int] = []  # real tokens of the last append, by row
        with torch.inference_mode(False):  # like the buffers
            self.lengths = RowLengths(self.batch_size, self.device)

    @property
    def streams(self) -> dict[str, CacheTensor]:
        """The streams as this rank stores them."""
        return self.local.streams

    @property
    def nulls(self) -> tuple[str, ...]:
        """Names of the options for null keys and values of the streams."""
        return tuple(f"null_{name}" for name in self.streams)

    @property
    def nbytes(self) -> int:
        """Bytes allocated on this rank."""
        return self.local.nbytes + (0 if self.ring is None else self.ring.nbytes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of codes and scales per token of one row, on the rank that stores it."""
        return self.local.bytes_per_token

    @torch.no_grad()
    def append_streams(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
        rope: Rope | None = None,
    ) -> None:
        """As `CachedRows.append_streams`; ``cache_leftpad`` is refused. Errors are the same on every rank."""
        if cache_leftpad is not None:
            raise ValueError(
                "cache_leftpad is given; rows spread over ranks begin with real tokens, allowed is None"
            )
        new = by_heads(new, self.streams, self.batch_size, self.n_kv_heads)
        tokens = next(iter(new.values())).shape[2]
        added = self.lengths.per_row("new_lens", tokens if new_lens is None else new_lens)
        self.lengths.check_room(tokens, added, self.max_seq_len, f" over {self.group.size} ranks")
        if rope is not None:  # applied once, since a token goes both to a rank and to the ring
            new = rope.turn(new)
        self._store(new, added, tokens, will_attend)
        query_lens = None if min(added) == tokens else self.lengths.on_device(added)
        self.lengths.advance(tokens, added, query_lens)
        self._newest = added

    def _store(
        self, new: dict[str, Tensor], added: list[int], tokens: int, will_attend: bool
    ) -> None:
        plan = self.placement.append(self.lengths.host, added, tokens)
        if plan.most:
            mine = {name: picked(x, plan.index, plan.most) for name, x in new.items()}
            self.local.append_streams(mine, plan.counts, None, False)
        if self.ring is not None:
            self.ring.append_streams(new, added, None, will_attend)

    def attend_from(self, queries: tuple[Tensor, ...], before: int, options: dict[str, Any]) -> Any:
        """As `CachedRows.attend_from`; bitwise the same result on every rank.

        Raises:
            ValueError, TypeError: as there, and for options other than `asked.ALLOWED` and null keys and values.
            RankLostError: a rank is lost.
        """
        asked = asked_queries(self, queries, before, options)
        with torch.no_grad():
            found = self._attended(queries, before, asked, options)
        sources = (*queries, *options.values())
        out, lse = results_of("attention over a packed cache", found, *sources)
        return (out, lse) if options.get("return_softmax_lse") else out

    def _attended(
        self, queries: tuple[Tensor, ...], before: int, asked: Queries, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        plain = {name: options[name] for name in (*PLAIN, *SCALES) if options.get(name) is not None}
        if self.reach.q_chunk is not None:
            plain.setdefault("q_chunk", self.reach.q_chunk)
        state = attend_to_pages(self.local, queries, self.placement.read(asked), plain)
        if self.ring is not None and self.group.rank == self.placement.spread.first_rank:
            few = {name: value for name, value in plain.items() if name != "q_chunk"}
            recent = attend_to_ring(self.ring, queries, before, asked, few)
            state = merge_state(*state, *recent)
        elif self.ring is not None and not before:
            self.ring.narrow_tails()
        out, lse = gather_and_merge(*state, self.group)
        # in the order of the streams, whatever the caller's
        extras = {name: options[name] for name in (*self.nulls, "s_aux") if name in options}
        if extras:
            names = SCALES[:1] if len(queries) == 1 else SCALES[1:]
            scales = [plain.get(n, default_scale(q)) for n, q in zip(names, queries, strict=True)]
            out, lse = with_extras((out, lse), queries, scales, extras, plain.get("softcap", 0.0))
        return out, lse

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Truncates rows to ``lengths``, none longer than the row, on every rank.

        If rings lost what is needed, ranks exchange it; RuntimeError on every rank if one of them fails there.
        """
        held = [0] * self.batch_size if self.ring is None else self.ring.lengths.host
        wanted = [min(a, b) for a, b in zip(lengths, held, strict=True)]
        lost = [] if self.ring is None else self.ring.tail.lost(held, wanted)
        if not lost:
            self._shorten(lengths, wanted, lambda *_: None)
            return
        crop = f"a crop to {list(lengths)} tokens"
        with self.group.together(crop):
            own = {n: [self._own_values(n, place) for place in lost] for n in self.streams}
            flat = torch.cat([x.flatten() for values in own.values() for x in values])
        flat = self.group.all_gather(flat).sum(0)
        with self.group.together(crop):
            self._shorten(lengths, wanted, self._put_back(lost, own, flat))

    def _shorten(self, lengths: Sequence[int], wanted: Sequence[int], refill: Refill) -> None:
        if self.ring is not None:
            self.ring.shorten(wanted, refill)
        spread, rank = self.placement.spread, self.group.rank
        held = spread.count(rank, np.array(lengths)).tolist()
        self.local.set_lengths(
            [min(a, b) for a, b in zip(held, self.local.lengths.host, strict=True)]
        )
        if self.local.group > 1:
            self._take_open_groups(lengths)
        self.lengths.set(lengths)

    def _take_open_groups(self, lengths: Sequence[int]) -> None:
        """Copies the tokens of the incomplete groups of rows of ``lengths`` from the ring to the ring of the pages.

        The ring holds what that of a single process does; that of the pages has fewer slots and only the rank's tokens.
        """
        assert self.ring is not None
        spread, rank, group = self.placement.spread, self.group.rank, self.local.group
        for row, length in enumerate(lengths):
            position = spread.positions_of(rank, length // group * group, length)
            if len(position):
                first = int(spread.count(rank, position[0]))
                index = torch.from_numpy(position).to(self.device)
                for name, stream in self.local.streams.items():
                    newest = self.ring.streams[name].from_tail(row, index)
                    stream.put_in_tail(row, first, newest)

    def reorder(self, beam_idx: Tensor) -> None:
        """Row b becomes a copy of row ``beam_idx[b]`` ((B,) integers, on the CPU); shared pages are copied on write."""
        if beam_idx.device.type != "cpu":
            raise ValueError(
                f"beam_idx is on {beam_idx.device}; cpu is needed where rows have pages"
            )
        self.local.reorder(beam_idx)
        if self.ring is not None:
            self.ring.reorder(beam_idx)
        self.lengths.set([self.lengths.host[row] for row in beam_idx.tolist()])

    def select_rows(self, rows: Sequence[int]) -> Self:
        """A new cache whose row b is a copy of row ``rows[b]``; ValueError for no rows, or one that does not exist."""
        other = copy.copy(self)
        pages = len(self.placement.spread.pages_of(self.group.rank))
        with torch.inference_mode(False):
            other.local = copied(self.local, rows, max(1, pages))
            other.ring = None if self.ring is None else self.ring.select_rows(rows)
            other.lengths = self.lengths.select_rows(rows)
        other.batch_size, other._newest = len(rows), []
        return other

    def reset(self) -> None:
        """Removes all tokens; the memory stays allocated."""
        self.local.reset()
        if self.ring is not None:
            self.ring.reset()
        self.lengths.set([0] * self.batch_size)

    def tail_state(self) -> tuple[list[Tensor], list[int]]:
        """As `CachedRows.tail_state`, of the shared ring and the ring of this rank's pages; empty without a tail."""
        found: tuple[list[Tensor], list[int]] = ([], [])
        for part in self._with_rings:
            tensors, numbers = part.tail_state()
            found[0].extend(tensors)
            found[1].extend(numbers)
        return found

    def restore_tail(self, state: tuple[list[Tensor], list[int]]) -> None:
        """As `CachedRows.restore_tail`."""
        tensors, numbers = list(state[0]), list(state[1])
        for part in self._with_rings:
            mine = sum(stream.tail is not None for stream in part.streams.values())
            count = part.batch_size
            part.restore_tail((tensors[:mine], numbers[:count]))
            del tensors[:mine], numbers[:count]

    @property
    def _with_rings(self) -> list[LayerCache]:
        rings = [self.ring, self.local if self.local.ring_len else None]
        return [part for part in rings if part is not None]

    def _put_back(
        self, places: Sequence[tuple[int, int, int]], own: dict[str, list[Tensor]], flat: Tensor
    ) -> Refill:
        """Puts positions (row, start, stop) into the ring: ``flat`` has those of all ranks in the order of ``own``."""
        pieces = iter(flat.split([x.numel() for values in own.values() for x in values]))
        whole = {
            name: {place: next(pieces).view_as(x) for place, x in zip(places, values, strict=True)}
            for name, values in own.items()
        }

        def put_back(row: int, start: int, stop: int) -> None:
            assert self.ring is not None
            for name, stream in self.ring.streams.items():
                stream.put_in_tail(row, start, whole[name][row, start, stop])

        return put_back

    def _own_values(self, name: str, place: tuple[int, int, int]) -> Tensor:
        """(lanes, stop - start, lane_dim) float32 in the stored basis; 0 for tokens stored by another rank."""
        row, start, stop = place
        spread, rank, stream = self.placement.spread, self.group.rank, self.streams[name]
        width = stream.lanes.heads_per_lane * stream.head_dim
        values = torch.zeros(stream.lanes.count, stop - start, width, device=self.device)
        position = spread.positions_of(rank, start, stop)
        if len(position):
            slot = torch.from_numpy(spread.count(rank, position)).to(self.device)
            held = int(spread.count(rank, np.array(stop)))
            stored = self.local.stored(name, held)[row : row + 1, :, slot]
            place_in = torch.from_numpy(position - start).to(self.device)
            values[:, place_in] = stream.lanes.pack(stored)[0]
            sink = self.local.streams[name].sink
            if sink is not None:  # the first tokens are in the sinks; their codes are not valid
                early = slot < sink.shape[2]
                values[:, place_in[early]] = sink[row, :, slot[early]].float()
        return values


class ContextParallelLayerKVCache(ContextParallelLayer, KeysAndValues):
    """K and V of one layer; as `caramba_fast.cache.LayerKVCache`, with the options of `asked.ALLOWED`."""


class ContextParallelDecoupledLayerKVCache(ContextParallelLayer, DecoupledKeysAndValues):
    """K_sem, K_geo and V of one layer; as `caramba_fast.cache.DecoupledLayerKVCache`."""
