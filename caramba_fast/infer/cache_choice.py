"""CacheChoice: the kind of cache a generator uses, chosen by the policy where it is "auto"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from caramba_fast.cache import Calibration, ModelKVCache
from caramba_fast.config import KVCacheKind
from caramba_fast.infer.config import AUTO, GenerateConfig
from caramba_fast.infer.cuda_graph import DecodeGraph, why_no_graph
from caramba_fast.models import LanguageModel
from caramba_fast.policy import CachePlan, cache_bytes, choose_cache, plain_step
from caramba_fast.quality import RecallFormat


class CacheChoice:
    """See the module.

    Args:
        model: what the cache is for.
        config: settings; ``cache_kind`` and the fields of `caramba_fast.policy`.
        calibration: of the cache's transforms.
        calibration_ids: text that quality is measured on.
        tokenizer: of the model; needles are written with it.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: GenerateConfig,
        calibration: Calibration | None,
        calibration_ids: Tensor | Sequence[int] | None,
        tokenizer: Any = None,
    ) -> None:
        if calibration_ids is not None and config.cache_kind != AUTO:
            raise ValueError(
                f"calibration_ids are for cache_kind='auto'; cache_kind is {config.cache_name!r}"
            )
        self._model, self._config = model, config
        self._calibration, self._ids, self._tokenizer = calibration, calibration_ids, tokenizer
        self._plans: dict[int, CachePlan] = {}
        self.latest: CachePlan | None = None

    def kind(self, rows: int) -> KVCacheKind | str:
        """The kind for a batch of ``rows``; measured the first time it is asked for.

        Raises:
            NoCandidateError: nothing fits the budget, or passes the gates.
        """
        config = self._config
        if config.cache_kind != AUTO:
            return config.cache_kind
        if rows not in self._plans:
            self._plans[rows] = choose_cache(
                self._model,
                config,
                max_seq_len=config.max_seq_len,
                batch_size=rows,
                prefill=config.prefill,
                calibration=self._calibration,
                calibration_ids=self._ids,
                fields=config.stream_fields,
                recall=self._recall(),
                make_step=_recorded_step if self._model.device.type == "cuda" else None,
            )
        self.latest = self._plans[rows]
        return self.latest.spec

    def _recall(self) -> RecallFormat | None:
        """How needles are written; None where none are asked for."""
        if self._config.cache_quality_min_needle is None:
            return None
        tokenizer = getattr(self._tokenizer, "tokenizer", self._tokenizer)
        if tokenizer is None or not hasattr(tokenizer, "get_vocab"):
            raise ValueError(
                "cache_quality_min_needle needs Generator(tokenizer=...): needles are written with it"
            )
        return RecallFormat.of(tokenizer)

    def check_budget(self, rows: int) -> None:
        """Raises ValueError where a fixed kind takes more than ``cache_budget_mb`` for so many rows."""
        config = self._config
        if config.cache_kind != AUTO and config.cache_budget_mb is not None:
            nbytes = cache_bytes(
                self._model.cache_layout, config.cache_kind, rows, config.max_seq_len,
                config.stream_fields,
            )  # fmt: skip
            config.check_budget(
                nbytes,
                f"a {config.cache_name} cache of {rows} rows of max_seq_len={config.max_seq_len}",
            )


def _recorded_step(model: LanguageModel, cache: ModelKVCache) -> Callable[[Tensor], Tensor]:
    """What a generator runs on CUDA: launches cost all caches alike, and would hide the difference."""
    return (
        DecodeGraph(model, cache).step if why_no_graph(model) is None else plain_step(model, cache)
    )
