"""Decoupled bottleneck attention (DBA): semantic keys without position, geometric keys with RoPE.

A score is the sum of a semantic and a geometric product, each with its own narrow width and scale; values
have a width of their own. The cache of a token is ``sem_dim + geo_dim + v_dim`` values instead of two full
widths. An optional learned null key and value lets a head attend to nothing.

What every layer of one forward pass needs besides the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba_fast.cache import DecoupledLayerKVCache
from caramba_fast.models.config import ModelConfig
from caramba_fast.models.dense import dense_attention
from caramba_fast.models.rope import rotate


class Step(NamedTuple):
    """One forward pass.

    Attributes:
        phases: cos and sin of the query positions.
        exact: a prompt on an empty cache attends to its exact K and V.
        query_lens: real tokens of each row, or None when no row is padded.
        rows: (M,) int64, the rows whose result is wanted, in a layer that none follows; None for all.
    """

    phases: tuple[Tensor, Tensor]
    exact: bool
    query_lens: Sequence[int] | None
    rows: Tensor | None = None

    def wanted(self, x: Tensor) -> Tensor:
        """The rows of x (N, ...) whose result is wanted."""
        return x if self.rows is None else x[self.rows]

    @property
    def query_phases(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions of those rows."""
        cos, sin = self.phases
        return self.wanted(cos), self.wanted(sin)


class DecoupledAttention(nn.Module):
    """DBA with grouped heads; widths from ``config.decoupled``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dims = config.decoupled
        assert dims is not None
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.n_heads, self.n_kv_heads, hidden = heads, kv_heads, config.hidden_size
        self.sem_head, self.geo_head, self.v_head = (
            dim // heads for dim in (dims.sem_dim, dims.geo_dim, dims.v_dim)
        )
        self.q_sem_proj = nn.Linear(hidden, heads * self.sem_head, bias=False)
        self.k_sem_proj = nn.Linear(hidden, kv_heads * self.sem_head, bias=False)
        self.q_geo_proj = nn.Linear(hidden, heads * self.geo_head, bias=False)
        self.k_geo_proj = nn.Linear(hidden, kv_heads * self.geo_head, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.v_head, bias=False)
        self.o_proj = nn.Linear(heads * self.v_head, hidden, bias=False)
        if dims.null_kv:
            self.null_k_sem = nn.Parameter(torch.zeros(kv_heads, self.sem_head))
            self.null_k_geo = nn.Parameter(torch.zeros(kv_heads, self.geo_head))
            self.null_v = nn.Parameter(torch.zeros(kv_heads, self.v_head))
        self.has_null = dims.null_kv

    def forward(self, x: Tensor, step: Step, cache: DecoupledLayerKVCache | None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden), of the rows that are wanted."""
        wanted = step.wanted(x)
        q_sem = self._heads(self.q_sem_proj(wanted), self.sem_head)
        k_sem = self._heads(self.k_sem_proj(x), self.sem_head)
        q_geo = rotate(self._heads(self.q_geo_proj(wanted), self.geo_head), *step.query_phases)
        k_geo = rotate(self._heads(self.k_geo_proj(x), self.geo_head), *step.phases)
        v = self._heads(self.v_proj(x), self.v_head)
        if cache is None:
            out = self._self_attend(q_sem, q_geo, k_sem, k_geo, v)
        else:
            exact = step.exact and cache.is_empty
            cache.append(k_sem, k_geo, v, step.query_lens, will_attend=not exact)
            if exact:
                out = self._self_attend(q_sem, q_geo, k_sem, k_geo, v)
            else:
                out = cache.attend(q_sem, q_geo, **self._null())
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, dim: int) -> Tensor:
        return x.unflatten(-1, (-1, dim)).transpose(1, 2)

    def _null(self) -> dict[str, Tensor]:
        if not self.has_null:
            return {}
        return {"null_k_sem": self.null_k_sem, "null_k_geo": self.null_k_geo, "null_v": self.null_v}

    def _self_attend(
        self, q_sem: Tensor, q_geo: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor
    ) -> Tensor:
        """Both products as one: queries and keys side by side, the scales folded into the queries."""
        q = torch.cat((q_sem * self.sem_head**-0.5, q_geo * self.geo_head**-0.5), dim=-1)
        k = torch.cat((k_sem, k_geo), dim=-1)
        if self.has_null:
            null_k = torch.cat((self.null_k_sem, self.null_k_geo), dim=-1)
            k = torch.cat((null_k[:, None].expand(k.shape[0], -1, 1, -1), k), dim=2)
            v = torch.cat((self.null_v[:, None].expand(v.shape[0], -1, 1, -1), v), dim=2)
        missing = v.shape[-1] - q.shape[-1]
        if missing > 0:  # equal widths keep SDPA on its flash kernel
            q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
        return dense_attention(q, k, v, scale=1.0, leading=int(self.has_null))
