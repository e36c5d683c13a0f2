"""Needle retrieval: does the model still find a line it read far back?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from caramba_fast.cache import ModelKVCache
from caramba_fast.config import KVCacheKind, cache_configs
from caramba_fast.models import LanguageModel
from caramba_fast.quality.recall import RecallFormat, needle_prompt


def draw_needles(
    form: RecallFormat, text: Sequence[int] | np.ndarray, distance: int, trials: int, seed: int = 0
) -> list[tuple[np.ndarray, int]]:
    """``trials`` prompts and answers, each hidden in its own stretch of ``text``."""
    rng = np.random.default_rng(seed)
    text = np.asarray(text)
    size = distance + 64
    if len(text) < size:
        raise ValueError(f"text has {len(text)} tokens; distance {distance} needs {size}")
    starts = rng.integers(len(text) - size + 1, size=trials)
    return [needle_prompt(form, text[start : start + size], distance, rng) for start in starts]


@torch.no_grad()
def retrieval_rate(
    model: LanguageModel,
    needles: Sequence[tuple[np.ndarray, int]],
    kind: KVCacheKind | str,
    *,
    batch_size: int = 8,
) -> float:
    """Share of needles answered exactly (greedy) when K and V are stored as ``kind``."""
    configs: dict[str, Any] = cache_configs(kind)
    hits = 0
    for start in range(0, len(needles), batch_size):
        batch = needles[start : start + batch_size]
        lens = [len(prompt) for prompt, _ in batch]
        longest = max(lens)
        rows = [np.pad(prompt, (0, longest - len(prompt))) for prompt, _ in batch]
        cache = ModelKVCache(
            model.cache_layout,
            len(batch),
            longest,
            device=model.device,
            prefill="stored",
            constants_from_prompt=True,
            **configs,
        )
        logits = model.forward(
            torch.from_numpy(np.stack(rows)).to(model.device),
            cache,
            query_lens=lens,
            logits_index=torch.tensor([length - 1 for length in lens], device=model.device),
        )
        answers = torch.tensor([answer for _, answer in batch])
        hits += int((logits[:, 0].argmax(-1).cpu() == answers).sum())
    return hits / len(needles)
