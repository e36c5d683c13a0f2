"""Computes the figures of a cache, each with its 95% confidence interval, from scores per position.

Predictions within a window of text are not independent; windows are. An estimate is the mean over all predictions; its
standard error is that of a cluster mean (clusters are windows), with Student's t for (windows - 1) degrees of freedom.
With one window the interval is nan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from torch import Tensor

from caramba_fast.config import KVCacheKind
from caramba_fast.models import LanguageModel
from caramba_fast.quality.compare import CacheSize, Scores, cache_size, cached_forward, compare

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_RESAMPLES = 400
#: Depth ranges, as shares of the text, for which needles are reported separately; 0 is its start.
DEPTHS = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0))

Interval = tuple[float, float]


def t_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t, within 0.2% (Abramowitz & Stegun 26.7.5; exact for 1 and 2 degrees)."""
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

    The interval is clipped to ``within``, the possible values. Windows may contribute different numbers of values: the
    error is that of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.3).
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

    Never narrower than for independent trials (Agresti & Coull 1998), so that a share of 0 or 1 has an interval too.
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

    Never narrower than for independent trials (Agresti & Min 2005), so that a difference of 0 has an interval too.
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
    """A quantile of (W, N) values and its percentile bootstrap interval, resampling whole windows."""
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
    return min(count - 1, math.ceil(share * count) - 1)


@dataclass(frozen=True)
class CacheQuality:
    """Figures of one cache at one context length.

    Attributes:
        kind: cache spec.
        tokens: predictions scored.
        nll: mean negative log likelihood, nats per token.
        delta_nll: nll minus the baseline's on the same tokens.
        ppl_ratio: exp(delta_nll).
        mean_kl: mean KL(baseline ‖ candidate) of the next-token distributions, nats.
        top1_agreement: share of positions where both rank the same token first.
        bytes_per_token: bytes of codes and scales per token.
        p99_kl: 99th percentile of the KL.
        acceptance: mean Σ min(p_baseline, p_candidate): the share of tokens drawn with this cache that speculative
            sampling against the baseline would accept.
        bits_per_value: bits of codes and scales per cached number.
        cache_bytes_per_token: bytes of a whole cache of ``context`` tokens, tail, sinks and unused slots included,
            divided by ``context``.
        context: tokens of a text window; predictions are made after 1 to context - 1 of them.
        windows: windows of text, the independent samples of the intervals.
        needles: needles asked for; 0 if they were not measured.
        recall: share of needles answered exactly (greedy), or nan.
        delta_recall: recall minus the baseline's on the same needles, or nan.
        delta_needle_nll: increase of the answers' negative log likelihood over the baseline's, nats, or nan; it rises
            long before recall drops.
        pareto: on the Pareto front of cache_bytes_per_token and mean_kl at this context: no other cache is as good in
            both and better in one.
        ci: 95% confidence interval (low, high) of each figure that has one, by name; nan for one window.
    """

    kind: str
    tokens: int
    nll: float
    delta_nll: float
    ppl_ratio: float
    mean_kl: float
    top1_agreement: float
    bytes_per_token: float
    p99_kl: float = math.nan
    acceptance: float = math.nan
    bits_per_value: float = math.nan
    cache_bytes_per_token: float = math.nan
    context: int = 0
    windows: int = 0
    needles: int = 0
    recall: float = math.nan
    delta_recall: float = math.nan
    delta_needle_nll: float = math.nan
    pareto: bool = False
    ci: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class NeedleQuality:
    """Retrieval of the needles in one depth range through one cache.

    Attributes:
        kind: cache spec.
        context: tokens of a row.
        depth_from, depth_to: the depth range, as shares of the text before the questions.
        needles, recall, delta_recall, delta_needle_nll: as in `CacheQuality`.
        ci: 95% confidence interval (low, high) of the last three, with rows as samples.
    """

    kind: str
    context: int
    depth_from: float
    depth_to: float
    needles: int
    recall: float
    delta_recall: float
    delta_needle_nll: float
    ci: dict[str, Interval] = field(default_factory=dict)


def cache_quality(
    kind: str,
    scores: Scores,
    baseline: Scores,
    size: CacheSize,
    recall: NeedleQuality | None = None,
) -> CacheQuality:
    """The figures of one cache; each row of the scores, (W, context - 1), is a window.

    ``recall`` is retrieval over the whole depth, if needles were measured.
    """
    nll, nll_ci = mean_interval(scores.nll)
    delta, delta_ci = mean_interval(scores.nll.astype(np.float64) - baseline.nll)
    kl, kl_ci = mean_interval(scores.kl, within=(0.0, math.inf))
    p99, p99_ci = quantile_interval(scores.kl, 0.99)
    same, same_ci = share_interval(scores.same)
    if scores is baseline:  # equal by definition, not by observation
        same_ci = (1.0, 1.0)
    accept, accept_ci = mean_interval(scores.accept, within=(0.0, 1.0))
    ci = {
        "nll": nll_ci, "delta_nll": delta_ci, "ppl_ratio": (_exp(delta_ci[0]), _exp(delta_ci[1])),
        "mean_kl": kl_ci, "p99_kl": p99_ci, "top1_agreement": same_ci, "acceptance": accept_ci,
    }  # fmt: skip
    needles: dict[str, Any] = {}
    if recall is not None:
        needles = {name: getattr(recall, name) for name in recall.ci}
        ci.update(recall.ci)
    return CacheQuality(
        kind=kind, tokens=scores.nll.size, nll=nll, delta_nll=delta, ppl_ratio=_exp(delta),
        mean_kl=kl, top1_agreement=same, bytes_per_token=size.bytes_per_token, p99_kl=p99,
        acceptance=accept, bits_per_value=size.bits_per_value,
        cache_bytes_per_token=size.cache_bytes_per_token, context=scores.shape[1] + 1,
        windows=scores.shape[0], needles=0 if recall is None else recall.needles, ci=ci, **needles,
    )  # fmt: skip


def _exp(value: float) -> float:
    """exp, or inf on overflow: a broken cache may lose any number of nats."""
    return math.exp(value) if not value > 700 else math.inf


def needle_quality(
    kind: str,
    context: int,
    scores: Scores,
    baseline: Scores,
    depths: np.ndarray,
    between: tuple[float, float] = (0.0, 1.0),
) -> NeedleQuality:
    """Retrieval of the needles whose depth lies in ``between``, without its upper end unless that is 1.

    Scores and depths (0 to 1) are (R, pairs), R rows of ``context`` tokens.
    """
    low, high = between
    chosen = (depths >= low) & ((depths < high) | (high >= 1))
    rate, rate_ci = share_interval(scores.correct, chosen)
    delta, delta_ci = paired_interval(scores.correct, baseline.correct, chosen)
    if scores is baseline:  # equal by definition, not by observation
        delta_ci = (0.0, 0.0)
    nll, nll_ci = mean_interval(scores.nll.astype(np.float64) - baseline.nll, chosen)
    ci = {"recall": rate_ci, "delta_recall": delta_ci, "delta_needle_nll": nll_ci}
    return NeedleQuality(kind, context, low, high, int(chosen.sum()), rate, delta, nll, ci)


def compare_caches(
    model: LanguageModel,
    ids: Tensor,
    kinds: Sequence[KVCacheKind | str],
    *,
    baseline: KVCacheKind | str = KVCacheKind.FP16,
) -> list[CacheQuality]:
    """Measures each kind of cache against the baseline on the same tokens; one `CacheQuality` per kind, in order.

    Args:
        model: the model.
        ids: (B, T) token ids of real text; each row is one sample of the confidence intervals.
        kinds: cache specs to measure; "q8/q4" stores K and V differently.
        baseline: the cache to compare with.
    """
    names = [kind.value if isinstance(kind, KVCacheKind) else kind for kind in (baseline, *kinds)]
    sizes = [cache_size(model.cache_layout, name, ids.shape[-1]) for name in names]
    scores = compare(cached_forward(model), ids, names[1:], names[0])
    return [
        cache_quality(name, scores[name], scores[names[0]], size)
        for name, size in zip(names[1:], sizes[1:], strict=True)
    ]
