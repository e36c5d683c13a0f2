"""Quality: what storing K and V in a given kind costs a model, measured on real text."""

from caramba_fast.quality.needles import draw_needles, retrieval_rate
from caramba_fast.quality.nll import CacheQuality, compare_caches
from caramba_fast.quality.recall import RecallFormat, needle_prompt

__all__ = [
    "CacheQuality",
    "RecallFormat",
    "compare_caches",
    "draw_needles",
    "needle_prompt",
    "retrieval_rate",
]
