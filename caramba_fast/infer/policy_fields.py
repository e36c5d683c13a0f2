"""Settings of the cache policy and of the decode plan, as mixins of `GenerateConfig`.

Each also works alone, so that a plan can be made without a generator.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from caramba_fast.config.names import NamedFields
from caramba_fast.config.spec import spec_name

MIB = 2**20
#: Quality gates -> the metric of a candidate that each limits.
GATES = {
    "cache_quality_max_delta_nll": "delta_nll",
    "cache_quality_max_ppl_ratio": "ppl_ratio",
    "cache_quality_max_mean_kl": "mean_kl",
    "cache_quality_min_needle": "needles",
}
#: Fields that also apply to a fixed cache kind.
WITH_ANY_KIND = ("cache_budget_mb",)


class CachePolicyFields(NamedFields):
    """Settings of ``cache="auto"``: budget, quality gates, benchmark, and where plans are kept.

    Attributes:
        cache_budget_mb: most MiB (2**20 bytes) of the whole cache: all rows, layers and streams, fp16 tail and unused
            slots included; None for no limit. A fixed kind that takes more is an error. The cache of a draft model is
            not counted.
        cache_quality_max_delta_nll: largest increase of the mean negative log likelihood over an fp16 cache, nats per
            token.
        cache_quality_max_ppl_ratio: largest perplexity ratio, exp(delta_nll); 1 or more.
        cache_quality_max_mean_kl: largest mean KL(fp16 ‖ candidate) of the next-token distributions, in nats.
        cache_quality_min_needle: smallest share of needles found, relative to an fp16 cache; None is off.
        cache_quality_prompt_len: tokens of each text window that are prefilled.
        cache_quality_decode_steps: tokens of each window that are then decoded, comparing the prediction after each.
        cache_auto_benchmark: time the candidates that pass; otherwise the smallest of them is taken.
        cache_auto_bench_steps: decode steps of one timed round.
        cache_auto_bench_prompt_len: cached tokens when the timing starts.
        cache_auto_candidates: cache specs to choose from; None for a set that fits the model.
        cache_plan_path: JSON file in which plans are stored and looked up; None for none.
        cache_plan_probe: check a stored plan again once it is older than the interval.
        cache_plan_probe_interval_sec: seconds for which a plan is trusted without a check.
        on_no_candidate: if nothing passes the gates, "raise", or take the "best": lowest mean KL within the budget.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_budget_mb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cache_quality_max_delta_nll: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    cache_quality_max_ppl_ratio: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    cache_quality_max_mean_kl: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    cache_quality_min_needle: float | None = Field(default=None, gt=0, le=1)
    cache_quality_prompt_len: int = Field(default=64, ge=1)
    cache_quality_decode_steps: int = Field(default=4, ge=1)
    cache_auto_benchmark: bool = True
    cache_auto_bench_steps: int = Field(default=8, ge=1)
    cache_auto_bench_prompt_len: int = Field(default=64, ge=1)
    cache_auto_candidates: tuple[str, ...] | None = Field(default=None, min_length=1)
    cache_plan_path: Path | None = None
    cache_plan_probe: bool = False
    cache_plan_probe_interval_sec: float = Field(default=3600.0, ge=0, allow_inf_nan=False)
    on_no_candidate: Literal["raise", "best"] = "raise"

    @field_validator("cache_auto_candidates")
    @classmethod
    def _candidates_by_name(cls, given: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if given is None else tuple(dict.fromkeys(map(spec_name, given)))

    @model_validator(mode="after")
    def _policy_fits(self) -> Any:
        given = self.model_fields_set
        if self.cache_plan_path is None and self.cache_plan_probe:
            raise ValueError("cache_plan_probe=True needs a cache_plan_path; none is given")
        if not self.cache_plan_probe and "cache_plan_probe_interval_sec" in given:
            raise ValueError(
                f"cache_plan_probe_interval_sec={self.cache_plan_probe_interval_sec:g} has no effect without "
                "cache_plan_probe=True"
            )
        if not self.cache_auto_benchmark:
            _refuse(self, ("cache_auto_bench_steps", "cache_auto_bench_prompt_len"),
                    "has no effect with cache_auto_benchmark=False")  # fmt: skip
        return self

    @property
    def budget_bytes(self) -> int | None:
        """``cache_budget_mb`` in bytes."""
        return None if self.cache_budget_mb is None else int(self.cache_budget_mb * MIB)

    @property
    def gates(self) -> dict[str, float]:
        """The gates in use, by field name."""
        limits = {name: getattr(self, name) for name in GATES}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def given_policy_fields(self) -> list[str]:
        """Fields that were given and apply only to ``cache="auto"``."""
        names = CachePolicyFields.model_fields
        given = self.model_fields_set
        return [
            name
            for name, field in names.items()
            if name in given and name not in WITH_ANY_KIND and getattr(self, name) != field.default
        ]

    def check_budget(self, nbytes: int, what: str) -> None:
        """Raises ValueError if a cache of ``nbytes`` bytes exceeds the budget; ``what`` names it in the message."""
        most = self.budget_bytes
        if most is not None and nbytes > most:
            raise ValueError(
                f"cache_budget_mb={self.cache_budget_mb:g}: {what} takes {nbytes / MIB:.2f} MiB "
                f"({nbytes:,} bytes); the budget is {most:,} bytes"
            )


class DecodePlanFields(NamedFields):
    """Attention limits that depend on the length of the cache.

    Attributes:
        decode_plan: "auto" uses the settings for the bucket of the length, "fixed" one setting for every length,
            "none" the layers' defaults.
        decode_bucket_short: most cached tokens of the short bucket.
        decode_bucket_mid: most cached tokens of the mid bucket; more are long.
        decode_q_chunk: query tokens processed at a time when a prompt follows a cached prefix: for every length with
            "fixed", in the short bucket with "auto". Bounds memory, changes no result.
        decode_q_chunk_mid, decode_q_chunk_long: the same in the other buckets; None is 256 and 128.
        decode_local_window: sliding window: tokens a query attends to in the cache, itself included; for every length
            with "fixed", in the short bucket with "auto". **Changes results**; None for no window.
        decode_local_window_mid, decode_local_window_long: the same in the other buckets.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    decode_plan: Literal["auto", "fixed", "none"] = "none"
    decode_bucket_short: int = Field(default=512, ge=1)
    decode_bucket_mid: int = Field(default=2048, ge=1)
    decode_q_chunk: int | None = Field(default=None, ge=1)
    decode_q_chunk_mid: int | None = Field(default=None, ge=1)
    decode_q_chunk_long: int | None = Field(default=None, ge=1)
    decode_local_window: int | None = Field(default=None, ge=1)
    decode_local_window_mid: int | None = Field(default=None, ge=1)
    decode_local_window_long: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _decode_plan_fits(self) -> Any:
        if self.decode_bucket_mid < self.decode_bucket_short:
            raise ValueError(
                f"decode_bucket_mid={self.decode_bucket_mid} is less than decode_bucket_short="
                f"{self.decode_bucket_short}; {self.decode_bucket_short} or more is allowed"
            )
        buckets = ("decode_bucket_short", "decode_bucket_mid")
        fixed = ("decode_q_chunk", "decode_local_window")
        by_bucket = [f"{name}_{bucket}" for name in fixed for bucket in ("mid", "long")]
        if self.decode_plan == "none":
            _refuse(self, (*buckets, *fixed, *by_bucket), "needs decode_plan 'auto' or 'fixed'; "
                    "decode_plan is 'none'")  # fmt: skip
        elif self.decode_plan == "fixed":
            _refuse(
                self, (*buckets, *by_bucket), "needs decode_plan='auto'; decode_plan is 'fixed'"
            )
            if self.decode_q_chunk is None and self.decode_local_window is None:
                raise ValueError(
                    "decode_plan='fixed' needs decode_q_chunk or decode_local_window, 1 or more; both are None"
                )
        return self


def _refuse(model: BaseModel, names: Iterable[str], why: str) -> None:
    """Raises ValueError for settings that differ from their default and have no effect."""
    fields = type(model).model_fields
    for name in names:
        value = getattr(model, name)
        if name in model.model_fields_set and value != fields[name].default:
            raise ValueError(f"{name}={value!r} {why}")
