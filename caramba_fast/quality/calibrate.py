"""calibrate: statistics of a model's K and V on real text, for the transforms of its caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from caramba_fast.cache import Calibration, ModelKVCache, StreamStatistics
from caramba_fast.cache.statistics import MIN_TOKENS, observe
from caramba_fast.config import cache_configs
from caramba_fast.models import LanguageModel

CHUNK = 512


@torch.no_grad()
def calibrate(
    model: LanguageModel,
    ids: Tensor | Sequence[int],
    *,
    about: dict[str, str] | None = None,
) -> Calibration:
    """Reads text once and notes mean, deviation and diversity of every stream of every layer.

    A few hundred tokens of the kind of text the model will see are enough; more do not hurt.

    Args:
        model: the model.
        ids: (B, T) or (T,) token ids of real text, 64 or more in all.
        about: anything to keep with the result, such as where the text is from.

    Returns:
        a `Calibration`; ``save`` it, and give it to `Generator` or `ModelKVCache`.

    Raises:
        ValueError: fewer than 64 tokens, or ids of another shape.
    """
    tokens = torch.as_tensor(ids, device=model.device)
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or tokens.numel() < MIN_TOKENS:
        raise ValueError(
            f"ids has shape {tuple(tokens.shape)}; (B, T) or (T,) with at least {MIN_TOKENS} tokens is needed"
        )
    batch, length = tokens.shape
    cache = ModelKVCache(
        model.cache_layout, batch, length, device=model.device, **cache_configs("fp32:plain")
    )
    last = torch.zeros(batch, dtype=torch.int64, device=model.device)
    for start in range(0, length, CHUNK):
        model.forward(tokens[:, start : start + CHUNK], cache, logits_index=last)
    t = torch.arange(length, device=model.device).expand(batch, -1)
    real = torch.ones_like(t, dtype=torch.bool)
    layers: list[dict[str, StreamStatistics]] = []
    for layer in cache:
        streams = zip(layer.streams, layer.get(), strict=True)
        layers.append(
            {
                name: observe(x, t, real, layer.calibration.rotary.get(name), length).to("cpu")
                for name, x in streams
            }
        )
    return Calibration(layers, {"tokens": str(tokens.numel()), **(about or {})})
