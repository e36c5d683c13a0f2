"""ContextParallelLayer: one layer's cache, its tokens spread over ranks page by page.

It offers what a model and a generator use of `caramba_fast.cache.LayerCache`. Every rank is given all new tokens and
stores those of its own pages; every rank asks for all queries, attends over its own pages, and one collective makes
the attention of the parts. Lengths are those of the whole rows, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.tensor import capacity
from caramba_fast.distributed.asking import PLAIN, SCALES, asked_queries, nulls_of
from caramba_fast.distributed.merge import default_scale, gather_and_merge, with_extras
from caramba_fast.distributed.moving import on_pages, picked
from caramba_fast.distributed.partial import attend_to_pages
from caramba_fast.distributed.recent import attend_to_ring
from caramba_fast.distributed.rows import SpreadRows
from caramba_fast.ops import Transform, merge_state


class ContextParallelLayer(SpreadRows):
    """See the module; made by `caramba_fast.distributed.context.Context`."""

    # -- growing ------------------------------------------------------------------------

    @torch.no_grad()
    def _append(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
    ) -> None:
        if cache_leftpad is not None:
            raise ValueError(
                "cache_leftpad is given; rows spread over ranks begin with real tokens, allowed is None"
            )
        new = {name: self.local._heads(name, x, self.streams[name]) for name, x in new.items()}
        counts = {name: x.shape[2] for name, x in new.items()}
        tokens = next(iter(counts.values()))
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
            raise ValueError(f"{listed} tokens; they must agree")
        added = self.lengths.per_row("new_lens", tokens if new_lens is None else new_lens)
        self._check_room(tokens, added)
        if self.is_empty and not self._by_hand:
            self._set_constants(new, added)
        self._store(new, added, tokens, will_attend)
        query_lens = None if min(added) == tokens else self.lengths.on_device(added)
        self.lengths.advance(tokens, added, query_lens)
        self._newest = added

    def _check_room(self, tokens: int, added: Sequence[int]) -> None:
        for row, (length, count) in enumerate(zip(self.lengths.host, added, strict=True)):
            if not 0 <= count <= tokens:
                raise ValueError(f"new_lens[{row}] is {count}; 0 to T={tokens} is allowed")
            if length + count > self.max_seq_len:
                raise ValueError(
                    f"row {row} holds {length} tokens over {self.group.size} ranks and cannot take {count} more: "
                    f"max_seq_len is {self.max_seq_len}"
                )

    def _set_constants(self, new: dict[str, Tensor], added: list[int]) -> None:
        """The same constants on every rank: all of them see all new tokens."""
        configs = {name: stream.config for name, stream in self.streams.items()}
        slots = capacity(self.max_seq_len)
        self._transform(self.known.transforms(configs, slots, new, added, None))

    def _transform(self, found: dict[str, Transform]) -> None:
        spread = self.plans.spread
        pages = spread.pages_of(self.group.rank).tolist()
        own = {name: on_pages(t, pages, spread.page_size) for name, t in found.items()}
        self.local.set_transforms(**own)
        if self.ring is not None:
            self.ring.set_transforms(**found)

    def set_transforms(self, **transforms: Transform) -> None:
        """As `LayerCache.set_transforms`, with phases for positions of the whole row.

        Raises:
            ValueError: the cache holds tokens, constants do not fit, or a turning bias with pages that are no
                multiple of 128.
        """
        if not self.is_empty:
            raise ValueError(
                f"transforms are fixed while tokens are cached ({self.pos} are); reset() first"
            )
        self._transform(transforms)
        self._by_hand = True

    def _store(
        self, new: dict[str, Tensor], added: list[int], tokens: int, will_attend: bool
    ) -> None:
        plan = self.plans.append(self.lengths.host, added, tokens)
        if plan.most:
            mine = {name: picked(x, plan.index, plan.most) for name, x in new.items()}
            self.local._append(mine, plan.counts, None, False)
        if self.ring is not None:
            self.ring._append(new, added, None, will_attend)

    # -- reading ------------------------------------------------------------------------

    def _attend(self, *queries: Tensor, before: int = 0, **options: Any) -> Any:
        asked = asked_queries(self, queries, before, options)
        plain = {name: options[name] for name in (*PLAIN, *SCALES) if options.get(name) is not None}
        if self.reach.q_chunk is not None:
            plain.setdefault("q_chunk", self.reach.q_chunk)
        state = attend_to_pages(self.local, queries, self.plans.read(asked), plain)
        if self.ring is not None and self._carries:
            few = {name: value for name, value in plain.items() if name != "q_chunk"}
            recent = attend_to_ring(self.ring, queries, before, asked.left, few)
            state = merge_state(*state, *recent)
        elif self.ring is not None and not before:
            self.ring._narrow()
        out, lse = gather_and_merge(*state, self.group)
        extras = {name: x for name, x in options.items() if name in ("s_aux", *nulls_of(self))}
        if extras:
            names = SCALES[:1] if len(queries) == 1 else SCALES[1:]
            scales = [plain.get(n, default_scale(q)) for n, q in zip(names, queries, strict=True)]
            out, lse = with_extras((out, lse), queries, scales, extras, plain.get("softcap", 0.0))
        return (out, lse) if options.get("return_softmax_lse") else out
