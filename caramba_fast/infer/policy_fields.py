"""Settings of the cache policy and of the decode plan, as mixins of a generation's settings.

Both are complete models of their own, so that a plan can be made and tested without a generator.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from caramba_fast.config.names import NamedFields
from caramba_fast.config.spec import spec_name

MIB = 2**20
#: Gates, each with the figure of a candidate that it limits.
GATES = {
    "cache_quality_max_delta_nll": "delta_nll",
    "cache_quality_max_ppl_ratio": "ppl_ratio",
    "cache_quality_max_mean_kl": "mean_kl",
    "cache_quality_min_needle": "needles",
}
#: Fields that are of use with a fixed cache kind too.
WITH_ANY_KIND = ("cache_budget_mb",)


class CachePolicyFields(NamedFields):
    """What ``cache="auto"`` goes by: budget, quality gates, speed, and where plans are kept.

    Attributes:
        cache_budget_mb: most bytes of the whole cache, all rows, layers and streams, tail and unused slots
            included, in MiB (2**20 bytes); None for no limit. With a fixed kind a cache that is larger is an
            error.
        cache_quality_max_delta_nll: most nats a token may become less likely, against an fp16 cache on the
            same tokens.
        cache_quality_max_ppl_ratio: largest perplexity ratio, exp(delta_nll); 1 or more.
        cache_quality_max_mean_kl: largest mean KL(fp16 ‖ candidate) of the next-token distributions, nats.
        cache_quality_min_needle: smallest share of needles found, relative to an fp16 cache; None is off.
        cache_quality_prompt_len: tokens of each window that are prefilled.
        cache_quality_decode_steps: tokens of each window that are then fed through the cache, and after each of
            which a prediction is compared.
        cache_auto_benchmark: time the candidates that pass; without, the smallest of them is taken.
        cache_auto_bench_steps: decode steps of one timed round.
        cache_auto_bench_prompt_len: tokens the cache holds when they start.
        cache_auto_candidates: cache specs to choose from; None for a set that fits the model.
        cache_plan_path: JSON file in which plans are kept and found again; None keeps none.
        cache_plan_probe: check a kept plan again after a while.
        cache_plan_probe_interval_sec: how long a plan is trusted without a check.
        on_no_candidate: "raise" if nothing passes the gates, or take the "best", the one of the lowest mean KL
            among those that fit the budget.
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
        """Canonical words, each once."""
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
        """The budget in bytes."""
        return None if self.cache_budget_mb is None else int(self.cache_budget_mb * MIB)

    @property
    def gates(self) -> dict[str, float]:
        """The gates that are on, by field name."""
        limits = {name: getattr(self, name) for name in GATES}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def given_policy_fields(self) -> list[str]:
        """Fields given that only ``cache="auto"`` heeds: what a fixed kind has to refuse."""
        names = CachePolicyFields.model_fields
        given = self.model_fields_set
        return [
            name
            for name, field in names.items()
            if name in given and name not in WITH_ANY_KIND and getattr(self, name) != field.default
        ]

    def check_budget(self, nbytes: int, what: str) -> None:
        """Refuses a cache that is larger than the budget.

        Args:
            nbytes: bytes of the whole cache (`caramba_fast.policy.cache_bytes`).
            what: which cache, for the message.

        Raises:
            ValueError: it does not fit; the message has both sizes.
        """
        most = self.budget_bytes
        if most is not None and nbytes > most:
            raise ValueError(
                f"cache_budget_mb={self.cache_budget_mb:g}: {what} takes {nbytes / MIB:.2f} MiB "
                f"({nbytes:,} bytes); the budget is {most:,} bytes"
            )


class DecodePlanFields(NamedFields):
    """How reads of the cache adapt to its length.

    Attributes:
        decode_plan: "auto" goes by the bucket of the length, "fixed" takes one setting for every length,
            "none" leaves the layers' defaults.
        decode_bucket_short: most cached tokens of the short bucket.
        decode_bucket_mid: most cached tokens of the mid bucket; more are long.
        decode_q_chunk: query tokens of a prompt on a cached prefix that are taken at a time: for every length
            with "fixed", in the short bucket with "auto". Bounds memory, changes no result.
        decode_q_chunk_mid, decode_q_chunk_long: the same in the other buckets; None chooses.
        decode_local_window: tokens a query reaches back in the cache, itself included: for every length with
            "fixed", in the short bucket with "auto". **Changes results**; None does not narrow anything.
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
    """Raises for settings that were given another value than their default, and have no effect."""
    fields = type(model).model_fields
    for name in names:
        value = getattr(model, name)
        if name in model.model_fields_set and value != fields[name].default:
            raise ValueError(f"{name}={value!r} {why}")
