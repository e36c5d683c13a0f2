"""The quality lab: compares caches with a baseline on text windows and needles, at several context lengths.

All caches read the tokens of a batch in lockstep. With a folder, each cache's scores on each batch are saved there,
and an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from caramba_fast.quality.compare import CacheSize, ModelForward, Scores, cache_size, compare
from caramba_fast.quality.figures import (
    DEPTHS,
    CacheQuality,
    NeedleQuality,
    cache_quality,
    needle_quality,
)
from caramba_fast.quality.identity import digest_of, package_version
from caramba_fast.quality.needles import RecallFormat
from caramba_fast.quality.report import QualityReport, on_pareto_front
from caramba_fast.quality.store import CONFIG_DIGEST, ScoreStore
from caramba_fast.quality.text import Batch, needle_batches, text_batches

#: Called with the work done and the total, in tokens × caches.
Progress = Callable[[int, int], None]
#: Scores on one batch, by cache.
ByCache = dict[str, Scores]


def measure(
    forward: ModelForward,
    specs: Sequence[str],
    *,
    text_ids: np.ndarray | Sequence[int],
    recall: RecallFormat | None = None,
    contexts: Sequence[int] = (1024,),
    tokens: int = 16384,
    needles: int = 1024,
    baseline: str = "fp16",
    batch: int = 4,
    bos_token_id: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> QualityReport:
    """Figures of each cache at each context length, with confidence intervals.

    Predictions on text are made after 1 to context - 1 tokens of a window. Needles are hidden in rows of ``context``
    tokens (`recall_rows`), the same for every cache.

    Args:
        forward: the model (`cached_forward`).
        specs: caches to measure; the baseline is always reported as well.
        text_ids: (N,) token ids of real text, at least two windows of the longest context.
        recall: the needle format, or None for no needles.
        contexts: context lengths, the tokens of a window.
        tokens: tokens of text to measure at each context; fewer if the text is shorter.
        needles: needles at each context, rounded up to whole rows.
        baseline: cache to compare with.
        batch: rows per batch.
        bos_token_id: token every window starts with, for models that expect one.
        seed: seed of windows, needles and their places.
        folder: where scores are saved; any run of the same model, text and baseline reuses them.
        progress: called as work is done.

    Raises:
        ValueError: an unknown spec or one that does not fit the model, too little text, too short a context, or a
            folder of another measurement.
    """
    text = np.asarray(text_ids, dtype=np.int64)
    names = list(dict.fromkeys((baseline, *specs)))
    _check(text, contexts, batch, needles)
    sizes = {(n, name): cache_size(forward.layout, name, n) for n in contexts for name in names}
    work: dict[int, list[Batch]] = {}
    for context in contexts:
        work[context] = [*text_batches(text, context, tokens, batch, bos_token_id, seed)]
        if recall is not None and needles:
            work[context] += needle_batches(
                recall, text, context, needles, batch, bos_token_id, seed
            )
    about = {
        "model": forward.identity,
        "text": digest_of([text]),
        "baseline": baseline,
        "version": package_version("unknown"),
    }
    config = getattr(forward, "config_digest", "")
    runner = _Runner(
        forward,
        names,
        ScoreStore(folder, {**about, **({CONFIG_DIGEST: config} if config else {})}),
        work,
        progress,
    )
    report = QualityReport(about={**about, "seed": seed, "batch": batch})
    for context, batches in work.items():
        scores = [runner.scores(item) for item in batches]
        rows, stretches = _figures(names, context, batches, scores, sizes)
        report.rows.extend(rows)
        report.needles.extend(stretches)
    return report


class _Runner:
    """Measures batches, or loads what an earlier run measured."""

    def __init__(
        self,
        forward: ModelForward,
        names: Sequence[str],
        store: ScoreStore,
        work: dict[int, list[Batch]],
        progress: Progress | None,
    ) -> None:
        self.forward, self.names, self.store, self.progress = forward, names, store, progress
        sizes = [item.ids.size for batches in work.values() for item in batches]
        self.done, self.total = 0, len(names) * sum(sizes)

    def scores(self, batch: Batch) -> ByCache:
        """Every cache's scores on a batch; measures and saves those missing from the store."""
        with self.store.lock():
            found: ByCache = {}
            for name in self.names:
                kept = self.store.load(name, batch)
                if kept is not None:
                    found[name] = kept
            missing = [name for name in self.names if name not in found]
            self._advance(batch.ids.size * len(found))
            if missing:
                ids = torch.from_numpy(batch.ids)
                fresh = compare(self._counted, ids, missing, self.names[0], batch.positions)
                self._advance(
                    len(batch.ids) * len(missing)
                )  # the last tokens, which predict nothing
                for name in missing:
                    found[name] = fresh[name]
                    self.store.save(name, batch, fresh[name])
        return found

    def _counted(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Runs ``forward``, reporting progress."""
        for logits in self.forward(ids, spec):
            self._advance(logits.shape[0] * logits.shape[1])
            yield logits

    def _advance(self, tokens: int) -> None:
        self.done = min(self.done + tokens, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total)


def _figures(
    names: Sequence[str],
    context: int,
    batches: Sequence[Batch],
    scores: Sequence[ByCache],
    sizes: dict[tuple[int, str], CacheSize],
) -> tuple[list[CacheQuality], list[NeedleQuality]]:
    """All figures of one context; the first name is the baseline."""
    asked = [b.depths for b in batches if b.depths is not None]
    on_text, on_needles = (
        [s for s, b in zip(scores, batches, strict=True) if (b.depths is not None) == needles]
        for needles in (False, True)
    )
    rows: list[CacheQuality] = []
    stretches: list[NeedleQuality] = []
    text, found = _by_cache(on_text), _by_cache(on_needles)
    for name in names:
        whole = None
        if asked:
            depths, pair = np.concatenate(asked), (found[name], found[names[0]])
            whole = needle_quality(name, context, *pair, depths)
            stretches += [needle_quality(name, context, *pair, depths, part) for part in DEPTHS]
        size = sizes[context, name]
        rows.append(cache_quality(name, text[name], text[names[0]], size, whole))
    front = on_pareto_front([(row.cache_bytes_per_token, row.mean_kl) for row in rows])
    rows = [replace(row, pareto=best) for row, best in zip(rows, front, strict=True)]
    return rows, stretches


def _by_cache(scores: Sequence[ByCache]) -> ByCache:
    return {
        name: Scores.joined([s[name] for s in scores]) for name in (scores[0] if scores else ())
    }


def _check(text: np.ndarray, contexts: Sequence[int], batch: int, needles: int) -> None:
    problems = []
    if text.ndim != 1:
        problems.append(f"text_ids has shape {text.shape}; (N,) token ids are needed")
    if not contexts or min(contexts) < 2 or len(set(contexts)) < len(contexts):
        problems.append(f"contexts is {list(contexts)}; different numbers of 2 or more are needed")
    if batch < 1:
        problems.append(f"batch is {batch}; 1 or more is needed")
    if needles < 0:
        problems.append(f"needles is {needles}; 0 (off) or more is needed")
    if problems:
        raise ValueError("; ".join(problems))
