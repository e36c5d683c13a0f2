"""Quality: how much a model loses with a given kind of cache, measured on real text."""

from caramba_fast.quality.compare import (
    CacheSize,
    Forward,
    ModelForward,
    Scores,
    cache_size,
    cached_forward,
    compare,
)
from caramba_fast.quality.figures import (
    CacheQuality,
    NeedleQuality,
    cache_quality,
    compare_caches,
    needle_quality,
)
from caramba_fast.quality.lab import measure
from caramba_fast.quality.needles import (
    RecallFormat,
    RecallRow,
    draw_needles,
    needle_prompt,
    recall_rows,
    retrieval_rate,
)
from caramba_fast.quality.report import QualityReport, read_csv

__all__ = [
    "CacheQuality",
    "CacheSize",
    "Forward",
    "ModelForward",
    "NeedleQuality",
    "QualityReport",
    "RecallFormat",
    "RecallRow",
    "Scores",
    "cache_quality",
    "cache_size",
    "cached_forward",
    "compare",
    "compare_caches",
    "draw_needles",
    "measure",
    "needle_prompt",
    "needle_quality",
    "read_csv",
    "recall_rows",
    "retrieval_rate",
]
