"""CacheChoice: makes the caches of a generator, of a kind chosen by the policy if it is "auto".

The policy measures generations, so it lies above this package and registers itself when it is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.config import KVCacheKind, short_name
from caramba_fast.infer.config import AUTO, GenerateConfig
from caramba_fast.infer.policy_fields import CachePolicyFields
from caramba_fast.models import LanguageModel


class ChosenCache(Protocol):
    """The choice of a policy, such as a `caramba_fast.policy.CachePlan`."""

    @property
    def spec(self) -> str:
        """The cache spec, such as "q4"."""

    @property
    def reason(self) -> str:
        """The reason, as text."""


_CHOOSERS: list[Callable[..., ChosenCache]] = []


def register_chooser(chooser: Callable[..., ChosenCache]) -> None:
    """Makes `chosen_cache` call ``chooser(model, settings, **options)``."""
    _CHOOSERS[:] = [chooser]


def chosen_cache(model: LanguageModel, settings: CachePolicyFields, **options: Any) -> ChosenCache:
    """The cache the policy chooses for a model; errors are those of `caramba_fast.policy.choose_cache`.

    Args:
        model: the model the cache is for.
        settings: budget, quality gates, and how to measure.
        options: those of `choose_cache`, and ``tokenizer`` for the needle test.
    """
    if not _CHOOSERS:
        importlib.import_module("caramba_fast.policy")
    return _CHOOSERS[0](model, settings, **options)


class CacheChoice:
    """Makes caches of the configured kind, or the one chosen by the policy, within the budget.

    Args:
        model, config: the model the caches are for, and the settings.
        calibration_ids: token ids that quality is measured on.
        tokenizer: the model's, for the needle test.

    Attributes:
        row_factor: how many rows each row of the next cache will become.
        cache_bytes, bytes_per_token: of the latest cache.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: GenerateConfig,
        calibration_ids: Tensor | Sequence[int] | None,
        tokenizer: Any = None,
    ) -> None:
        if calibration_ids is not None and config.cache != AUTO:
            raise ValueError(
                f"calibration_ids are for cache='auto'; cache is {config.cache_name!r}"
            )
        reason = getattr(model, "why_not_chosen", None)
        if reason and config.cache_kind == AUTO:
            raise ValueError(f"cache is 'auto'; name a kind: {reason}")
        self._model, self._config = model, config
        self._ids, self._tokenizer = calibration_ids, tokenizer
        self._plans: dict[int, ChosenCache] = {}
        self.latest: ChosenCache | None = None
        self.row_factor, self.cache_bytes, self.bytes_per_token = 1, 0, 0.0

    def new_cache(self, rows: int) -> ModelKVCache:
        """An empty cache; raises ValueError if it, or every kind for "auto", exceeds ``cache_budget_mb``."""
        most, self.row_factor = rows * self.row_factor, 1
        kind, config = self.kind(most), self._config
        self.check_budget(most, kind)
        cache = ModelKVCache(
            self._model.cache_layout,
            rows,
            config.max_seq_len,
            device=self._model.device,
            prefill=config.prefill,
            **config.stream_configs(kind),
        )
        self.cache_bytes, self.bytes_per_token = cache.nbytes, cache.bytes_per_token
        return cache

    def expect_rows(self, cache: ModelKVCache | None, factor: int) -> None:
        """Prepares for ``factor`` times the rows; ValueError if the current cache would then exceed the budget."""
        if cache is None:
            self.row_factor = factor
        elif factor > 1:
            rows = factor * cache.batch_size
            self._check(factor * cache.nbytes, f"a cache of {rows} rows")

    def kind(self, rows: int) -> KVCacheKind | str:
        """The cache spec for ``rows`` rows; "auto" is measured at the first call.

        Raises NoCandidateError if nothing fits the budget or passes the gates.
        """
        config = self._config
        if config.cache != AUTO:
            return config.cache
        if rows not in self._plans:
            self._plans[rows] = chosen_cache(
                self._model,
                config,
                max_seq_len=config.max_seq_len,
                batch_size=rows,
                prefill=config.prefill,
                calibration_ids=self._ids,
                fields=config.stream_fields,
                tokenizer=self._tokenizer,
            )
        self.latest = self._plans[rows]
        return self.latest.spec

    def check_budget(self, rows: int, kind: KVCacheKind | str | None = None) -> None:
        """Raises ValueError where a cache takes more than ``cache_budget_mb`` for so many rows.

        Args:
            rows: of the cache.
            kind: of "auto" what was chosen; before that nothing is checked.
        """
        config = self._config
        kind = kind or config.cache
        if kind != AUTO and config.cache_budget_mb is not None:
            cache = ModelKVCache(
                self._model.cache_layout, rows, config.max_seq_len, device="meta",
                **config.stream_configs(kind),
            )  # fmt: skip
            self._check(
                cache.nbytes,
                f"a {short_name(kind)} cache of {rows} rows of max_seq_len={config.max_seq_len}",
            )

    def _check(self, nbytes: int, what: str) -> None:
        """`check_budget` of the config, for the largest part of a cache that several ranks share."""
        if self._config.cache_budget_mb is not None:
            largest = getattr(self._model, "largest_of_ranks", int)
            self._config.check_budget(largest(nbytes), what)
