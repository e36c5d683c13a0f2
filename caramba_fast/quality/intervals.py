"""95% confidence intervals over text windows.

Predictions within a window share their context and are not independent; windows are. An estimate is the
mean over all predictions, and its standard error that of a mean of clusters (the windows), with Student's t
for as many degrees of freedom as there are windows but one. With one window there is no interval: nan.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_RESAMPLES = 400

Interval = tuple[float, float]


def t_quantile(freedom: int) -> float:
    """The 97.5% point of Student's t, within 0.2%.

    Exact for 1 and 2 degrees of freedom, else Abramowitz & Stegun 26.7.5.
    """
    if freedom == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if freedom == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z, n = _Z, freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / n**power for power, term in enumerate(terms))


def mean_interval(
    values: np.ndarray,
    chosen: np.ndarray | None = None,
    within: Interval = (-math.inf, math.inf),
) -> tuple[float, Interval]:
    """Mean of (W, N) values over W windows, or of those ``chosen`` (W, N) bool, and its interval.

    The interval is cut to ``within``, the values that are possible.

    Windows may count differently many values: the error is that of a ratio of two totals (Cochran,
    Sampling Techniques, 1977, section 6.3).
    """
    values = np.asarray(values, dtype=np.float64)
    weights = np.ones(values.shape) if chosen is None else chosen.astype(np.float64)
    counts, totals = weights.sum(1), np.where(weights > 0, values, 0.0).sum(1)
    if not counts.sum():
        return math.nan, (math.nan, math.nan)
    mean = float(totals.sum() / counts.sum())
    windows = int((counts > 0).sum())
    if windows < 2:
        return mean, (math.nan, math.nan)
    residual = totals - mean * counts
    variance = float((residual**2).sum()) * windows / (windows - 1)
    half = t_quantile(windows - 1) * math.sqrt(variance) / float(counts.sum())
    return mean, (max(mean - half, within[0]), min(mean + half, within[1]))


def share_interval(hits: np.ndarray, chosen: np.ndarray | None = None) -> tuple[float, Interval]:
    """Share of (W, N) bools that are true, and its interval within 0 to 1.

    Never narrower than if all were independent (Agresti & Coull 1998), so that a share of 0 or 1 keeps one.
    """
    mean, (low, high) = mean_interval(hits, chosen)
    count = hits.size if chosen is None else int(chosen.sum())
    if count and not math.isnan(low):
        n = count + _Z**2
        middle = (mean * count + _Z**2 / 2) / n
        half = _Z * math.sqrt(middle * (1 - middle) / n)
        low, high = max(min(low, middle - half), 0.0), min(max(high, middle + half), 1.0)
    return mean, (low, high)


def paired_interval(
    candidate: np.ndarray, baseline: np.ndarray, chosen: np.ndarray | None = None
) -> tuple[float, Interval]:
    """Difference of two shares of the same (W, N) trials, candidate - baseline, and its interval.

    Never narrower than if all trials were independent (Agresti & Min 2005), so that no difference seen is
    not taken for none.
    """
    difference = candidate.astype(np.float64) - baseline.astype(np.float64)
    mean, (low, high) = mean_interval(difference, chosen)
    counted = difference if chosen is None else difference[chosen]
    if counted.size and not math.isnan(low):
        n, won, lost = counted.size + 2, (counted > 0).sum() + 0.5, (counted < 0).sum() + 0.5
        middle = (won - lost) / n
        half = _Z * math.sqrt((won + lost) - (won - lost) ** 2 / n) / n
        low, high = min(low, middle - half), max(high, middle + half)
    return mean, (float(low), float(high))


def quantile_interval(values: np.ndarray, share: float, seed: int = 0) -> tuple[float, Interval]:
    """A quantile of (W, N) values and its percentile bootstrap interval, whole windows resampled."""
    windows, count = values.shape
    order = np.argsort(values, axis=None)
    ranked, window_of = values.reshape(-1)[order].astype(np.float64), order // count
    quantile = float(ranked[_rank(len(ranked), share)])
    if windows < 2:
        return quantile, (math.nan, math.nan)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(windows, np.full(windows, 1 / windows), size=_RESAMPLES)
    wanted = _rank(windows * count, share)
    found = np.sort(
        [ranked[np.searchsorted(np.cumsum(n[window_of]), wanted, "right")] for n in drawn]
    )
    tail = (1 - CONFIDENCE) / 2
    return quantile, (
        float(found[_rank(_RESAMPLES, tail)]), float(found[_rank(_RESAMPLES, 1 - tail)])
    )  # fmt: skip


def _rank(count: int, share: float) -> int:
    """Index of the quantile among ``count`` ascending values."""
    return min(count - 1, math.ceil(share * count) - 1)
