"""Log-probabilities of generated tokens, as vLLM and OpenAI's API have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """How likely one generated token was.

    Of the model's own distribution: before penalties, biases, temperature and filters.

    Attributes:
        token: its id.
        logprob: the natural logarithm of its probability.
        top: ids and log-probabilities of the likeliest tokens in its place, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """What was chosen from each row of logits, and the ``count`` likeliest there.

    Args:
        logits: (R, V), the model's own.
        tokens: (R,), the ids chosen.
        count: of the likeliest, all where there are fewer.
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
