"""Effect of a cache on the acceptance: target and draft read the same text through it, position by position.

A drafted token is accepted with probability sum min(p, q); greedy, if both have the same most likely token. With the
same text for every cache only the cache differs. Drafts are one token long here; prompt lookup counts only where it
finds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from caramba_fast.infer import GenerateConfig, SpeculativeConfig
from caramba_fast.infer.lookup import NGramIndex
from caramba_fast.infer.sampling import probabilities
from caramba_fast.models import LanguageModel, demo_tokenizer, held_out_text
from caramba_fast.quality import cached_forward

WINDOWS = 8
#: Tokens before the first scored position, so that most of the cache is beyond the fp16 tail.
SKIPPED = 64


def forced(
    target: LanguageModel,
    drafts: Sequence[Any],
    modes: Mapping[str, Mapping[str, Any]],
    caches: Sequence[str],
    positions: int,
) -> list[dict[str, Any]]:
    """Acceptance with the first cache, and the difference of the others in points, with half 95% intervals.

    ``positions`` are scored in each of 8 windows. Drafts are objects with a ``name`` and a ``model``, whose cache is of
    the target's kind; None for lookup. ``modes`` are settings of `GenerateConfig` by name.
    """
    ids = demo_tokenizer().encode(held_out_text()).ids
    length = SKIPPED + positions
    starts = torch.linspace(0, len(ids) - length - 1, WINDOWS).long().tolist()
    texts = torch.tensor([ids[start : start + length] for start in starts])
    looked_up = _looked_up(texts, target.vocab_size)
    drafted = looked_up.any(-1)
    found: dict[tuple[str, str, str], torch.Tensor] = {}
    for cache in caches:
        logits = _logits(target, texts, cache)
        guesses = {d.name: d.model and _logits(d.model, texts, cache) for d in drafts}
        for (mode, settings), (name, guess) in product(modes.items(), guesses.items()):
            config = GenerateConfig(**settings)
            p = probabilities(logits, config)
            if guess is None:
                q = looked_up.to(p.dtype)
            else:
                q = probabilities(guess, config)
            found[mode, name, cache] = torch.minimum(p, q).sum(-1).double()
    lines = []
    for mode, draft, cache in product(modes, drafts, caches[1:]):
        base, mine = found[mode, draft.name, caches[0]], found[mode, draft.name, cache]
        counts = drafted if draft.model is None else torch.ones_like(drafted)
        by_window = 100 * (mine - base).sum(1) / counts.sum(1)
        lines.append({
            "mode": mode, "draft": draft.name, "cache": cache, "positions": int(counts.sum()),
            caches[0]: round(100 * (base.sum() / counts.sum()).item(), 2), "points": round(by_window.mean().item(), 2),
            "half_width": round(2.36 * by_window.std().item() / WINDOWS**0.5, 2),
        })  # fmt: skip
    return lines


def _logits(model: LanguageModel, texts: torch.Tensor, cache: str) -> torch.Tensor:
    """(B, positions, V) after the skipped tokens."""
    parts = list(cached_forward(model)(texts, cache))
    return torch.cat(parts, dim=1)[:, SKIPPED:]


def _looked_up(texts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(B, positions, V) bool: the token that prompt lookup drafts at a position, if any."""
    settings = SpeculativeConfig()
    found = torch.zeros(len(texts), texts.shape[1] - SKIPPED, vocab_size, dtype=torch.bool)
    for row, tokens in enumerate(texts.tolist()):
        index = NGramIndex(settings.lookup_max_ngram, settings.lookup_min_ngram)
        for place in range(found.shape[1]):
            for token in index.draft(tokens[: SKIPPED + place + 1], 1):
                found[row, place, token] = True
    return found
