"""Attention layers of the native model: grouped-query attention, and decoupled bottleneck attention (DBA).

A DBA score is the sum of a semantic product (keys without position) and a geometric one (keys with RoPE), each with
its own small width and scale; values have their own width. A cached token takes ``sem_dim + geo_dim + v_dim`` values
(fewer with grouped heads) instead of two full widths. An optional learned null key and value lets a head attend to
nothing. Prompts attend to their exact K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba_fast.cache import DecoupledLayerKVCache, LayerKVCache, Rope
from caramba_fast.models.config import ModelConfig
from caramba_fast.models.merged import MergedLinear, Projecting
from caramba_fast.models.rope import rotate, rotate_both
from caramba_fast.ops.extend_attention import causal_attention, serves_prompts
from caramba_fast.ops.gradients import without_gradient


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    nulls: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention among T tokens: by our kernels on a CPU, else by torch's SDPA.

    Queries that are not finite, or reach a key that is not, give NaN; torch's causal SDPA hides them on some devices.

    Args:
        q: (B, H_q, T, D).
        k, v: (B, H_kv, T, D) and (..., D_v), H_q a multiple of H_kv.
        window: sliding window in tokens, the query's own included; None for all.
        scale: of the scores; by default D ** -0.5.
        nulls: a key (H_kv, D) and a value (H_kv, D_v) that every query also attends to; not with a window.

    Returns:
        (B, H_q, T, D_v).
    """
    if serves_prompts(q, k, v) and _adds_up(q) and _adds_up(k):
        null_k, null_v = nulls or (None, None)
        return causal_attention(
            q, k, v, softmax_scale=scale, local_window=window, null_k=null_k, null_v=null_v
        )
    leading = 0
    if nulls is not None:
        leading = 1
        k, v = (
            torch.cat((null[:, None].expand(x.shape[0], -1, 1, -1), x), dim=2)
            for null, x in zip(nulls, (k, v), strict=True)
        )
    missing = v.shape[-1] - q.shape[-1]
    if missing > 0:  # with equal widths SDPA uses its flash kernel
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    spoilt = _spoilt(q, k, window, leading, groups)
    if groups > 1:  # SDPA's enable_gqa does not use the flash kernel on a CPU
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = None
    if window is not None and length > window:
        row = torch.arange(length, device=q.device)
        distance = row[:, None] - row
        mask = (distance >= 0) & (distance < window)
    elif leading:
        mask = torch.ones(length, leading + length, dtype=torch.bool, device=q.device).tril(leading)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.masked_fill(spoilt[..., None], torch.nan)


def _spoilt(q: Tensor, k: Tensor, window: int | None, leading: int, groups: int) -> Tensor:
    """(B, H_q, T) bool: queries that are not finite, or reach a key that is not."""
    seen = _unsound(k).cumsum(-1)
    here = seen[..., leading:]
    if window is not None and q.shape[2] > window:
        here = here - F.pad(here, (window, 0))[..., : q.shape[2]]
    return _unsound(q) | (here > 0).repeat_interleave(groups, 1)


def _adds_up(x: Tensor) -> bool:
    """Whether the sum of x is finite, which implies that all of x is."""
    return bool(x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None).isfinite())


def _unsound(x: Tensor) -> Tensor:
    """(...) bool for x (..., D): whether the sum is not finite; one pass, where checking each value takes four."""
    return ~x.sum(-1, dtype=torch.float32).isfinite()


class Step(NamedTuple):
    """One forward pass.

    Attributes:
        phases: cos and sin (B, T, D / 2) of the query positions, in the model's dtype.
        exact: a prompt on an empty cache, which attends to its exact K and V.
        query_lens: real tokens of each row; None if no row is padded.
        rows: (M,) int64, the rows whose result is needed, in the last layer; None for all.
    """

    phases: tuple[Tensor, Tensor]
    exact: bool
    query_lens: Sequence[int] | None
    rows: Tensor | None = None

    def wanted(self, x: Tensor) -> Tensor:
        """The rows of x (N, ...) whose result is needed."""
        return x if self.rows is None else x[self.rows]

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE applied to q of the needed rows and k of all, (B, H, T, D)."""
        if self.rows is None:
            return rotate_both(q, k, *self.phases)
        cos, sin = (x[:, None] for x in self.phases)
        return rotate(q, self.wanted(cos), self.wanted(sin)), rotate(k, cos, sin)

    def rope(self, q: Tensor) -> Rope | None:
        """RoPE of q (B, H, T, D) and its keys, to be fused into the append; None if it cannot be, or is slower.

        A prompt attends to its exact keys, and needs them rotated; so does a gradient.
        """
        if q.device.type not in Rope.FASTER_ON:
            return None
        if self.exact or self.rows is not None or torch.is_grad_enabled():
            return None
        cos, sin = self.phases
        return Rope(q, cos.to(q.dtype), sin.to(q.dtype))


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
        """x (B, T, hidden) -> (B, T, hidden) of the needed rows."""
        wanted = step.wanted(x)
        q_sem = self._heads(self.q_sem_proj(wanted), self.sem_head)
        k_sem = self._heads(self.k_sem_proj(x), self.sem_head)
        q_geo = self._heads(self.q_geo_proj(wanted), self.geo_head)
        k_geo = self._heads(self.k_geo_proj(x), self.geo_head)
        rope = None if cache is None else step.rope(q_geo)
        if rope is None:
            q_geo, k_geo = step.rotated(q_geo, k_geo)
        v = self._heads(self.v_proj(x), self.v_head)
        if cache is None:
            out = self._self_attend(q_sem, q_geo, k_sem, k_geo, v)
        else:
            cache.append(k_sem, k_geo, v, step.query_lens, will_attend=not step.exact, rope=rope)
            if step.exact:
                out = self._self_attend(q_sem, q_geo, k_sem, k_geo, v)
            else:
                nulls: dict[str, Any] = {**self._null()}
                out = cache.attend(q_sem, q_geo if rope is None else rope.out, **nulls)
                if torch.is_grad_enabled():
                    out = without_gradient(out, q_sem, q_geo, k_sem, k_geo, v, *nulls.values())
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
        """One product for both scores: queries and keys side by side, the scales folded into the queries."""
        q = torch.cat((q_sem * self.sem_head**-0.5, q_geo * self.geo_head**-0.5), dim=-1)
        k = torch.cat((k_sem, k_geo), dim=-1)
        nulls = None
        if self.has_null:
            nulls = (torch.cat((self.null_k_sem, self.null_k_geo), dim=-1), self.null_v)
        return dense_attention(q, k, v, scale=1.0, nulls=nulls)


class Attention(Projecting):
    """Grouped-query attention with optional biases, q/k norm and a sliding window."""

    qkv_proj: MergedLinear  # replaces q_proj, k_proj and v_proj if they were merged

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.window = config.head_dim, config.sliding_window
        width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.widths = [width, kv_width, kv_width]
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
            for _ in range(2)
        )

    def forward(self, x: Tensor, step: Step, cache: LayerKVCache | None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden) of the needed rows."""
        if "qkv_proj" in self._modules:
            q, k, v = self.qkv_proj(x).split(self.widths, dim=-1)
            q = step.wanted(q)
        else:
            q, k, v = self.q_proj(step.wanted(x)), self.k_proj(x), self.v_proj(x)
        q = self.q_norm(self._heads(q, self.n_heads))
        k, v = self.k_norm(self._heads(k, self.n_kv_heads)), self._heads(v, self.n_kv_heads)
        rope = None if cache is None else step.rope(q)
        if rope is None:
            q, k = step.rotated(q, k)
        if cache is None:
            out = self._self_attend(q, k, v)
        else:
            cache.append(k, v, step.query_lens, will_attend=not step.exact, rope=rope)
            if step.exact:
                out = self._self_attend(q, k, v)
            else:
                window = (-1, -1) if self.window is None else (self.window - 1, 0)
                out = cache.attend(q if rope is None else rope.out, window_size=window)
                if torch.is_grad_enabled():
                    out = without_gradient(out, q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _self_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_attention(q, k, v, window=self.window)
