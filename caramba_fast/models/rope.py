"""Rotary position embedding: frequencies, tables, rotation.

Sources: RoFormer (arXiv:2104.09864); linear interpolation (arXiv:2306.15595); YaRN (arXiv:2309.00071); the llama3 rule
of the Llama 3.1 release. Pairs are (i, i + D/2), the "half-split" layout of Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from caramba_fast.models.config import RopeParameters
from caramba_fast.ops.apply_rotary_emb import rotary_op


def frequencies(rope: RopeParameters, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies (head_dim / 2,) float64 in radians per token, and the factor of cos and sin."""
    values, factor = _frequencies(rope, head_dim)
    return torch.tensor(values.tolist(), dtype=torch.float64, device="cpu"), factor


def _frequencies(rope: RopeParameters, head_dim: int) -> tuple[np.ndarray, float]:
    plain = rope.rope_theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain, 1.0


def _trained_length(rope: RopeParameters) -> int:
    return rope.original_max_position_embeddings or 8192


def _llama3(rope: RopeParameters, plain: np.ndarray) -> np.ndarray:
    """Scales low frequencies by 1 / ``factor``, keeps high ones, with a linear ramp between."""
    turns = _trained_length(rope) * plain / (2 * math.pi)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = ramp.clip(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeParameters, plain: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """NTK-by-parts: a ramp over dimensions, between beta_fast and beta_slow turns."""

    def dimension_of(turns: float) -> float:
        length = _trained_length(rope)
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = np.arange(head_dim // 2)
    ramp = ((index - low) / max(high - low, 1e-3)).clip(0, 1)
    return ramp * plain / rope.factor + (1 - ramp) * plain, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeParameters) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class RopeTable(torch.nn.Module):
    """cos and sin for any position, from float32 angles as in transformers.

    It is not in the ``state_dict`` and stays float32 when the model is cast.
    """

    def __init__(self, rope: RopeParameters, head_dim: int) -> None:
        super().__init__()
        inv_freq, self.attention_factor = frequencies(rope, head_dim)
        self.inv_freq = inv_freq.to(torch.float32)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (B, T) -> cos, sin, each (B, T, head_dim / 2) float32."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None].to(torch.float32) * self.inv_freq
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + D/2) of x (B, H, T, D) by the angle of their position."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate` of queries and keys (B, H, T, D); cos and sin are (B, T, D / 2). One fused call without gradients."""
    if torch.is_grad_enabled():
        return rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    found: tuple[Tensor, Tensor] = rotary_op.call(q, k, cos, sin)
    return found
