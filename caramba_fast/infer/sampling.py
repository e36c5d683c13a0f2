"""From logits to the next token: greedy, temperature, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig

#: Temperatures below this are greedy: the quotient would overflow long before it made a difference.
GREEDY_BELOW = 1e-5


def filtered_logits(logits: Tensor, config: GenerateConfig) -> Tensor:
    """Logits (B, V) float32 after temperature, top-k and top-p; removed tokens are -inf.

    ``config.temperature`` must be at least GREEDY_BELOW.
    """
    scores = logits.to(torch.float32) / config.temperature
    if config.top_k is not None and config.top_k < scores.shape[-1]:
        least = scores.topk(config.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if config.top_p is not None and config.top_p < 1.0:
        ordered, index = scores.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        drop = torch.zeros_like(scores, dtype=torch.bool)
        drop.scatter_(-1, index, before >= config.top_p)  # the likeliest has 0 before it: it stays
        scores = scores.masked_fill(drop, -torch.inf)
    return scores


def sample(logits: Tensor, config: GenerateConfig, generator: torch.Generator | None) -> Tensor:
    """Next token ids (B,) int64 for logits (B, V)."""
    if config.temperature < GREEDY_BELOW:
        return logits.argmax(-1)
    probability = filtered_logits(logits, config).softmax(-1)
    return torch.multinomial(probability, 1, generator=generator).squeeze(-1)
