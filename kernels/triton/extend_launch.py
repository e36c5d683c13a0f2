"""From the flat arguments of the extend ops to launches: those of decode, in blocks of queries.

A prompt is read at once, up to TOKENS_AT_ONCE: what a launch leaves for the merge is as large as the queries in
float32, and does not grow with the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from .extend_settings import extend_settings, extend_within
from .splits import processors
from .splits_launch import Call, capability, launch, shared_memory
from .tiles_layout import Settings, Shape
from .tuned import Tuned

#: Query tokens of one round of launches, at least.
TOKENS_AT_ONCE = 2048
#: Blocks of queries of one launch at most, CUDA's limit of a grid's second axis, and query tokens of a block at least.
#: Lanes may have room for more heads than there are, though not for four times as many.
MOST_BLOCKS, FEWEST_ROWS = 65535, 16


@dataclass
class ExtendCall(Call):
    """One call of an extend op."""

    @property
    def tuned(self) -> Tuned:
        """Nothing: what is measured is decode."""
        return Tuned()

    @cached_property
    def settings(self) -> Settings:
        """Launch settings."""
        major = 0 if torch.version.hip is not None else capability(self.q.device)[0]
        chosen = extend_settings(
            self.records, self.tokens, self.value.codes.shape[2], major=major,
            edges=self.window >= 0 or self.sink_len > 0,
        )  # fmt: skip
        return extend_within(chosen, self.records, shared_memory(self.q.device))

    @cached_property
    def shape(self) -> Shape:
        """The other constexpr record."""
        return replace(super().shape, tokens=0, extend=True)

    @property
    def row_groups(self) -> int:
        """Blocks of the queries of a lane's heads."""
        blocks = triton.cdiv(self.tokens, self.settings.rows)
        return self.per_lane * self.shape.groups * blocks

    def plan(self) -> tuple[int, int]:
        """Most splits, and tiles each has at least: one where blocks alone fill the GPU."""
        if self.num_splits <= 0 and self.batch * self.lanes * self.row_groups >= processors(
            self.q.device
        ):
            return 1, 1
        return super().plan()


def launch_extend(
    queries: Mapping[str, Tensor],
    stored: Mapping[str, tuple[Tensor, Tensor | None, str]],
    cache_seqlens: Tensor,
    factors: Mapping[str, float | None],
    *,
    q_chunk: int = 1,
    batch_invariant: bool = True,  # noqa: ARG001 - there is one way
    query_lens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Runs one extend op; arguments as of `launch`, ``q_chunk`` as of the op."""
    _, heads, tokens, _ = next(iter(queries.values())).shape
    at_once = min(max(q_chunk, TOKENS_AT_ONCE), max(1, MOST_BLOCKS // (4 * heads)) * FEWEST_ROWS)

    def part(
        some: Mapping[str, Tensor], lens: Tensor | None, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        return launch(
            some, stored, ends, factors, kind_of_call=ExtendCall, query_lens=lens, **options
        )

    if (
        tokens <= at_once
    ):  # the tensors themselves: a view of one could not be told apart in a kept launch
        return part(queries, query_lens, cache_seqlens)
    parts = []
    for first in range(0, tokens, at_once):
        last, lens = min(first + at_once, tokens), query_lens
        ends = cache_seqlens - (tokens - last)
        if query_lens is not None:
            lens = (query_lens - first).clamp(0, last - first)
            ends = cache_seqlens - (query_lens - last).clamp(min=0)
        parts.append(part({name: q[:, :, first:last] for name, q in queries.items()}, lens, ends))
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)
