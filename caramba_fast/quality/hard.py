"""Hard variants of a model: the same function, with keys or values that are harder to quantize.

Large models have outlier channels, small ones do not, and outliers decide how much a 4-bit cache loses: one channel
sets the scale of its quantization block. They can be added without training. With RoPE, a pair of key dims may be
multiplied by any factor if the query pair is divided by it, because RoPE rotates both dims of a pair together; a value
channel, if the matching column of the output projection is divided. The logits do not change, so whatever a cache loses
on such a model is due to outliers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from caramba_fast.models import Transformer, load_demo, split_projections
from caramba_fast.models.attention import Attention, DecoupledAttention
from caramba_fast.models.demos import NAMES


@torch.no_grad()
def scale_key_pairs(
    model: Transformer, low: float, high: float, *, count: int = 2, seed: int = 0
) -> Transformer:
    """A copy of ``model`` with some RoPE pairs of K multiplied, and those of Q divided, by large factors.

    ``count`` pairs of every layer and kv head are scaled, each by its own factor; the queries of the head's whole group
    are divided by it. Decoupled attention: ``count`` pairs of K_geo, and as many single channels of K_sem, which has no
    RoPE. With q/k norm, the factors go into the norms' weights, which all heads of a layer share, so the same pairs are
    scaled in all heads.

    Args:
        model: a native model; it is not changed.
        low, high: smallest and largest factor; log-uniform in between. Powers of two are exact in any dtype.
        count: pairs of each kv head.
        seed: seed of the pairs and factors.

    Raises:
        ValueError: factors that are not 0 < low <= high, or more pairs than a head has.
    """
    draw = _Draw(low, high, count, seed)
    changed = split_projections(copy.deepcopy(model))
    for attention in _attentions(changed):
        if isinstance(attention, DecoupledAttention):
            _scale_decoupled_keys(attention, draw)
        else:
            _scale_keys(attention, draw)
    return changed


@torch.no_grad()
def scale_value_channels(
    model: Transformer, low: float, high: float, *, count: int = 2, seed: int = 0
) -> Transformer:
    """A copy of ``model`` with some channels of V multiplied, and their columns of o_proj divided, by large factors.

    ``count`` channels of each kv head are scaled; other arguments and errors as in `scale_key_pairs`.
    """
    draw = _Draw(low, high, count, seed)
    changed = split_projections(copy.deepcopy(model))
    for attention in _attentions(changed):
        heads, groups = attention.n_kv_heads, attention.n_heads // attention.n_kv_heads
        factors = draw(heads, attention.v_proj.out_features // heads)
        _scale_rows(attention.v_proj, factors)
        if isinstance(attention, DecoupledAttention) and attention.has_null:
            attention.null_v.mul_(factors.to(attention.null_v))
        columns = factors.repeat_interleave(groups, 0).flatten()
        attention.o_proj.weight.div_(columns.to(attention.o_proj.weight))
    return changed


def hard_variants(name: str) -> dict[str, Callable[[], Transformer]]:
    """Functions that build the hard variants of a demo model, by name; ValueError for an unknown model.

    "outliers-8" scales key pairs by 8, "outliers-64" by 2 to 64, "value-outliers" value channels by 8 to 64, and "bias"
    (gqa) is `load_demo("gqa/bias")`, which was trained with key biases.
    """
    if name not in NAMES:
        raise ValueError(f"unknown demo model {name!r}; known are {', '.join(NAMES)}")
    variants: dict[str, Callable[[], Transformer]] = {
        "outliers-8": lambda: scale_key_pairs(load_demo(name), 8, 8),
        "outliers-64": lambda: scale_key_pairs(load_demo(name), 2, 64),
        "value-outliers": lambda: scale_value_channels(load_demo(name), 8, 64),
    }
    if name == "gqa":
        variants["bias"] = partial(load_demo, "gqa/bias")
    return variants


class _Draw:
    """Draws factors (heads, channels): 1 except for ``count`` channels of each head."""

    def __init__(self, low: float, high: float, count: int, seed: int) -> None:
        if not 0 < low <= high < math.inf:
            raise ValueError(f"factors are {low} to {high}; 0 < low <= high is needed")
        if count < 1:
            raise ValueError(f"count is {count}; 1 or more is needed")
        self.low, self.high, self.count = low, high, count
        self.rng = np.random.default_rng(seed)

    def __call__(self, heads: int, channels: int) -> Tensor:
        if self.count > channels:
            raise ValueError(f"count is {self.count}; a head has {channels} to choose from")
        factors = np.ones((heads, channels))
        for row in factors:
            exponents = self.rng.uniform(math.log2(self.low), math.log2(self.high), self.count)
            row[self.rng.choice(channels, self.count, replace=False)] = 2.0**exponents
        return torch.from_numpy(factors)

    def pairs(self, heads: int, head_dim: int) -> Tensor:
        """(heads, head_dim), the same for both dims of a half-split RoPE pair."""
        return self(heads, head_dim // 2).repeat(1, 2)


def _attentions(model: Transformer) -> Iterator[Attention | DecoupledAttention]:
    for module in model.model.layers.modules():
        if isinstance(module, (Attention, DecoupledAttention)):
            yield module


def _scale_keys(attention: Attention, draw: _Draw) -> None:
    if isinstance(attention.k_norm, nn.RMSNorm) and isinstance(attention.q_norm, nn.RMSNorm):
        factors = draw.pairs(1, attention.head_dim)[0].to(attention.k_norm.weight)
        attention.k_norm.weight.mul_(factors)
        attention.q_norm.weight.div_(factors)
        return
    factors = draw.pairs(attention.n_kv_heads, attention.head_dim)
    _scale_rows(attention.k_proj, factors)
    _scale_rows(attention.q_proj, _of_queries(attention, factors))


def _scale_decoupled_keys(attention: DecoupledAttention, draw: _Draw) -> None:
    heads = attention.n_kv_heads
    sem = draw(heads, attention.sem_head)
    geo = draw.pairs(heads, attention.geo_head)
    _scale_rows(attention.k_sem_proj, sem)
    _scale_rows(attention.k_geo_proj, geo)
    _scale_rows(attention.q_sem_proj, _of_queries(attention, sem))
    _scale_rows(attention.q_geo_proj, _of_queries(attention, geo))
    if attention.has_null:
        attention.null_k_sem.mul_(sem.to(attention.null_k_sem))
        attention.null_k_geo.mul_(geo.to(attention.null_k_geo))


def _of_queries(attention: Attention | DecoupledAttention, factors: Tensor) -> Tensor:
    """Factors (H_kv, D) of keys -> factors (H_q, D) of their queries."""
    return factors.reciprocal().repeat_interleave(attention.n_heads // attention.n_kv_heads, 0)


def _scale_rows(linear: nn.Linear, factors: Tensor) -> None:
    """Multiplies the outputs of ``linear`` by factors (heads, D)."""
    flat = factors.flatten().to(linear.weight)
    linear.weight.mul_(flat[:, None])
    if linear.bias is not None:
        linear.bias.mul_(flat)
