"""Log-probabilities of generated tokens, as in vLLM and OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Log-probability of a generated token in the model's distribution, before penalties, temperature and filters.

    Attributes:
        token: its id.
        logprob: the natural logarithm of its probability.
        top: (id, log-probability) of the most likely tokens in its place, most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens, and of the most likely ones.

    Args:
        logits: (R, V), the model's own.
        tokens: (R,), the chosen ids.
        count: how many of the most likely tokens to return; at most V are.
    """
    scores = logits.to(torch.float32).log_softmax(-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=scores.device)
    own = scores.gather(-1, ids[:, None])[:, 0].tolist()
    best = scores.topk(min(count, scores.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, mine, tuple(zip(*row, strict=True)))
        for token, mine, row in zip(tokens, own, rows, strict=True)
    ]
