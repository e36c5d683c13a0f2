"""Jackknife intervals of ratios of sums, leaving out one prompt at a time: acceptances in a prompt are correlated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Sum of the first by sum of the second, and half its 95% interval."""
    top, bottom = (sum(column) for column in zip(*pairs, strict=True))
    if not bottom:
        return float("nan"), float("nan")
    left = [(top - a) / (bottom - b) for a, b in pairs if bottom > b]
    return top / bottom, half_width(left)


def half_width(left_out: Sequence[float]) -> float:
    """Half the 95% interval of a jackknife."""
    count, mean = len(left_out), statistics.fmean(left_out)
    return 1.96 * ((count - 1) / count * sum((x - mean) ** 2 for x in left_out)) ** 0.5


def points_apart(pairs: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """How many points two acceptances are apart, paired by sample.

    ``pairs`` has (accepted, drafted, accepted by the other, drafted by the other) of each sample. Returns tokens
    drafted, the other's acceptance in percent as ``fp16``, the difference in points, and half its 95% interval.
    """
    sums = [sum(column) for column in zip(*pairs, strict=True)]

    def gap(totals: Sequence[float]) -> float:
        mine, base = totals[0] / (totals[1] or 1), totals[2] / (totals[3] or 1)
        return 100 * (mine - base)

    left = [gap([s - x for s, x in zip(sums, pair, strict=True)]) for pair in pairs]
    return {
        "drafted": sums[1], "fp16": round(100 * sums[2] / (sums[3] or 1), 2),
        "points": round(gap(sums), 2), "half_width": round(half_width(left), 2),
    }  # fmt: skip
