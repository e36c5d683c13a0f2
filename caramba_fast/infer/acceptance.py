"""Which drafted tokens stand, and the token that follows them.

Speculative sampling (arXiv:2211.17192, arXiv:2302.01318): with p the target's and q the draft's distribution, both
after every filter, a drafted token stands with probability min(1, p/q); the first that does not is drawn
again from max(0, p - q), normalised. What comes out is distributed as p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.drafts import Drafted
from caramba_fast.infer.sampling import draw_marked, filtered_logits, likeliest, sample_marked


def accept(
    scores: Tensor,
    drafted: Drafted,
    config: GenerateConfig,
    method: str,
    rng: torch.Generator | None,
) -> tuple[list[int], list[int]]:
    """How many tokens of each draft stand, and the token behind them.

    Args:
        scores: (B, K + 1, V), the target's processed logits before each drafted token and behind the last.
        drafted: the drafts, each of at most K tokens.
        config: temperature and filters.
        method: "reject_sampling" or "sample_match"; the same when greedy.
        rng: what random numbers come from.

    Returns:
        (B,) accepted counts and (B,) next tokens, `NOTHING` where none can be chosen.
    """
    lengths = [len(tokens) for tokens in drafted.tokens]
    if not config.samples:
        return _matching(likeliest(scores).tolist(), drafted.tokens)
    if method == "sample_match":
        return _drawn_alike(scores, drafted.tokens, config, rng)
    probability = filtered_logits(scores, config).softmax(-1)
    counts = _accepted(probability, drafted, lengths, rng)
    return counts, _next(probability, drafted.probability, drafted.tokens, counts, rng)


def _matching(chosen: list[list[int]], drafts: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Drafted tokens stand while they are what the target chose."""
    counts = []
    for picked, draft in zip(chosen, drafts, strict=True):
        count = 0
        while count < len(draft) and draft[count] == picked[count]:
            count += 1
        counts.append(count)
    return counts, [picked[count] for picked, count in zip(chosen, counts, strict=True)]


def _drawn_alike(
    scores: Tensor,
    drafts: Sequence[list[int]],
    config: GenerateConfig,
    rng: torch.Generator | None,
) -> tuple[list[int], list[int]]:
    """Draws from the target, position by position, as plain decoding would, while any draft drew the same."""
    counts, tokens = [0] * len(drafts), [0] * len(drafts)
    running = [True] * len(drafts)
    place = 0
    while any(running):
        drawn = sample_marked(scores[:, min(place, scores.shape[1] - 1)], config, rng).tolist()
        for row, draft in enumerate(drafts):
            if running[row]:
                tokens[row] = drawn[row]
                running[row] = place < len(draft) and draft[place] == drawn[row]
                counts[row] += running[row]
        place += 1
    return counts, tokens


def _accepted(
    p: Tensor, drafted: Drafted, lengths: Sequence[int], rng: torch.Generator | None
) -> list[int]:
    """How many tokens of each draft stand before the first that does not."""
    width = max(lengths)
    if width == 0:
        return [0] * len(lengths)
    padded = [tokens + [0] * (width - len(tokens)) for tokens in drafted.tokens]
    ids = torch.tensor(padded, device=p.device)[..., None]
    target = p[:, :width].gather(-1, ids)[..., 0]
    q = drafted.probability
    guess = torch.ones_like(target) if q is None else q[:, :width].gather(-1, ids)[..., 0]
    chance = torch.rand(target.shape, generator=rng, device=p.device)
    stands = chance * guess < target  # u < p / q without dividing; never where p is 0
    place = torch.arange(width, device=p.device)
    stands &= place < torch.tensor(lengths, device=p.device)[:, None]
    return stands.cumprod(-1).sum(-1).tolist()


def _next(
    p: Tensor,
    q: Tensor | None,
    drafts: Sequence[list[int]],
    counts: Sequence[int],
    rng: torch.Generator | None,
) -> list[int]:
    """The token behind what stands: from what the draft missed of p, or from p where nothing was rejected."""
    rows = torch.arange(len(counts), device=p.device)
    place = torch.tensor(counts, device=p.device)
    here = p[rows, place]
    rejected = torch.tensor(
        [count < len(draft) for count, draft in zip(counts, drafts, strict=True)], device=p.device
    )[:, None]
    if q is None:
        guess = torch.zeros_like(here)
        ids = [
            draft[count] if count < len(draft) else 0
            for count, draft in zip(counts, drafts, strict=True)
        ]
        guess[rows, torch.tensor(ids, device=p.device)] = 1.0
    else:
        guess = q[rows, place.clamp(max=q.shape[1] - 1)]
    missed = (here - guess).clamp(min=0.0)
    # Where p and q agree but for rounding nothing is left of the difference: then p itself is as good.
    missed = torch.where(missed.sum(-1, keepdim=True) > 0, missed, here)
    return draw_marked(torch.where(rejected, missed, here), rng).tolist()
