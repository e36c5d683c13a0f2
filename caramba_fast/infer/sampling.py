"""From logits to the next token: greedy, temperature, top-k, top-p, min-p, typical."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.fields import GREEDY_BELOW

#: Tokens a nucleus is looked for in before everything is sorted.
FIRST_FEW = 256
#: Where random numbers come from: a generator, None for torch's own, or (B,) float64 in [0, 1), one a row.
Randomness = torch.Generator | Tensor | None


def filtered_logits(logits: Tensor, config: GenerateConfig) -> Tensor:
    """Logits (..., V) float32 after temperature and the filters; removed tokens are -inf.

    ``config.temperature`` must be at least GREEDY_BELOW.
    """
    scores = logits.to(torch.float32) / config.temperature
    if config.top_k is not None and config.top_k < scores.shape[-1]:
        least = scores.topk(config.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if config.top_p is not None and config.top_p < 1.0:
        scores = _nucleus(scores, config.top_p)
    if config.min_p:
        probability = scores.softmax(-1)
        least = probability.amax(-1, keepdim=True) * config.min_p
        scores = scores.masked_fill(probability < least, -torch.inf)
    if config.typical_p is not None and config.typical_p < 1.0:
        scores = _typical(scores, config.typical_p)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keeps the likeliest tokens up to ``top_p``; a full sort only where the first few hundred are too few."""
    probability = scores.softmax(-1)
    ordered, index = probability.topk(min(FIRST_FEW, scores.shape[-1]))
    if not bool((ordered.sum(-1) >= top_p).all()):
        ordered, index = probability.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    drop = torch.ones_like(scores, dtype=torch.bool)
    drop.scatter_(-1, index, before >= top_p)  # the likeliest has 0 before it: it stays
    return scores.masked_fill(drop, -torch.inf)


def _typical(scores: Tensor, typical_p: float) -> Tensor:
    log_p = scores.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).nansum(-1, keepdim=True)
    order = (-log_p - entropy).abs().argsort(-1)  # removed tokens are infinitely surprising: last
    ordered = p.gather(-1, order)
    drop = torch.zeros_like(scores, dtype=torch.bool)
    drop.scatter_(-1, order, ordered.cumsum(-1) - ordered >= typical_p)
    return scores.masked_fill(drop, -torch.inf)


def probabilities(scores: Tensor, config: GenerateConfig) -> Tensor:
    """What tokens are drawn from, (..., V) float32: one-hot where the config is greedy."""
    if not config.samples:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(torch.float32)
    return filtered_logits(scores, config).softmax(-1)


def sample(logits: Tensor, config: GenerateConfig, generator: Randomness) -> Tensor:
    """Next token ids (B,) int64 for logits (B, V).

    Raises:
        ValueError: every token of a row was removed, or a logit is NaN.
    """
    if not config.samples:
        return logits.argmax(-1)
    return _drawn_from_few(logits, config, generator)


def _drawn_from_few(logits: Tensor, config: GenerateConfig, generator: Randomness) -> Tensor:
    """As drawing from the filtered distribution; where a few hundred tokens hold all of it, from those alone."""
    few = min(config.top_k or FIRST_FEW, FIRST_FEW, logits.shape[-1])
    unlimited = config.top_k is None and config.top_p is None
    if unlimited or config.min_p or config.typical_p or (config.top_k or 0) > few:
        return draw(filtered_logits(logits, config).softmax(-1), generator)
    scores = logits.to(torch.float32) / config.temperature
    values, index = scores.topk(few)
    whole = values if config.top_k else scores
    probability = (values - whole.logsumexp(-1, keepdim=True)).exp()
    if config.top_p is not None:
        if not config.top_k and not bool((probability.sum(-1) >= config.top_p).all()):
            return draw(filtered_logits(logits, config).softmax(-1), generator)
        before = probability.cumsum(-1) - probability
        probability = probability.masked_fill(before >= config.top_p, 0.0)
    return index.gather(-1, draw(probability, generator)[..., None])[..., 0]


def draw(probability: Tensor, generator: Randomness) -> Tensor:
    """Ids (...) int64 drawn from probabilities (..., V), which need not add up to 1.

    By inverting the cumulated sum: one random number a row, and several times faster than
    ``torch.multinomial`` for a few rows on a CPU.

    Raises:
        ValueError: as `sample`.
    """
    flat = probability.reshape(-1, probability.shape[-1])
    exact = torch.float32 if flat.device.type == "mps" else torch.float64
    reached = flat.cumsum(-1, dtype=exact)
    total = reached[:, -1:]
    if not all(0.0 < reach < math.inf for reach in total.flatten().tolist()):
        raise ValueError(
            "no token can be drawn: logits are NaN, or every token of a row was removed by "
            "the settings (suppress_tokens, bad_words_ids, logit_bias, a logits processor)"
        )
    if isinstance(generator, Tensor):
        point = generator.to(total).view(total.shape) * total
    else:
        point = total * torch.rand(
            total.shape, generator=generator, dtype=exact, device=flat.device
        )
    # Of the steps of the sum the first that passes the point; what has no probability makes none.
    below = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.searchsorted(reached, torch.minimum(point, below), right=True)
    return drawn.view(probability.shape[:-1])


__all__ = ["GREEDY_BELOW", "draw", "filtered_logits", "probabilities", "sample"]
